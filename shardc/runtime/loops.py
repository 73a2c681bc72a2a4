"""Runs a step in microbatches: `Loops` runs the graphs in order, and `Microstep` holds a call's results and
gradients.

A call runs forward and backward of each microbatch in turn, and keeps the gradients of the loss. The backward of the
user's loss hands them out, times the gradient that it gets. If a backward also uses other outputs, all microbatches run
again, with the gradients of these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcWarning
from shardc.ir.executable import (
    GATHER,
    JOIN,
    KEPT,
    KNOWN,
    SUM,
    TERM,
    Executable,
    Half,
    Port,
    outputs_text,
)
from shardc.ir.graph import Role
from shardc.ir.layout import Layout

Run = Callable[[Half, list[Any]], Sequence[Any]]
Map = Callable[..., Any]  # applies a function of tensors to values, such as one tensor per rank
# Returns the value of a parameter, buffer, coordinate or key that a graph takes, for a microbatch.
Argument = Callable[[Port, int], Any]
# Results of a step by (kind, index or name): ("output", 0), ("buffer", name), ("grad", name of a parameter or input).
Results = dict[tuple[str, Any], Any]


def result_key(role: Role) -> tuple[str, Any]:
    """Returns the key of an output, a buffer's new value or a gradient in `Results`."""
    return role.kind, role.index if role.kind == "output" else role.name


@dataclass
class Loops:
    """Runs the graphs of a program on the inputs of one call, microbatch after microbatch.

    Args:
        program: the program.
        run: (graph, its arguments) -> its results.
        argument: (port, microbatch) -> the argument of a graph, if it is neither an input nor a result of a graph.
        inputs: inputs of the call, of all microbatches, by name.
        map_ranks: applies a function of tensors to values; a value is a tensor, or in a simulation one per rank.
    """

    program: Executable
    run: Run
    argument: Argument
    inputs: Mapping[str, Any]
    map_ranks: Map

    def __post_init__(self) -> None:
        self.sums: dict[str, Any] = {}  # name of a term of the microbatches -> sum so far; a list of terms for a gather
        self.shared: dict[Any, Any] = {}  # values that later graphs take: by name, and by name and microbatch
        self.parts: dict[tuple[str, Any], list[Any]] = {}  # as `Results`, of each microbatch so far
        self._added: set[str] = set()  # sums that are in memory of their own, which may be written

    def run_step(self, training: bool, tangents: Mapping[int, Any]) -> Results:
        """Runs all graphs of a step in order, and returns its outputs and, in training, its gradients.

        Args:
            training: run forward and backward of each microbatch; otherwise the forward alone, without gradients.
            tangents: output index -> gradient for the whole batch.
        """
        saved: dict[str, Any] = {}  # what a forward saves for the graph behind it, its backward
        for half, microbatch in self.program.runs(training):
            feed = [self._value(port, microbatch, saved, tangents) for port in half.takes]
            saved = {}  # a graph frees what it takes
            for role, x in zip(half.gives, self.run(half, feed), strict=True):
                if role.kind == "saved":
                    saved[role.name] = x
                else:
                    self._store(role, x, microbatch)
        return self._joined()

    def _store(self, role: Role, x: Any, microbatch: int) -> None:
        """Stores ``x``, a result of a graph for ``microbatch``, by its ``role``: adds it to a sum, keeps it for
        later graphs, or appends it to ``parts``.
        """
        if role.kind == TERM:
            self._add(role.name, x)
        # A known value is the same in all microbatches; a kept one is of this microbatch.
        elif role.kind in (KNOWN, KEPT):
            self.shared[role.name if role.kind == KNOWN else (role.name, microbatch)] = x
        else:
            self.parts.setdefault(result_key(role), []).append(x)

    def _value(self, port: Port, microbatch: int, saved: Mapping[str, Any], tangents: Mapping[int, Any]) -> Any:
        """Returns the argument ``port`` of a graph for ``microbatch``. It comes from ``saved`` (saved by the graph
        before), the inputs, ``tangents`` (output index -> gradient), sums, or results of earlier graphs (KEPT: of this
        microbatch, KNOWN: the same in all).
        """
        role = port.role
        if port.name in saved:
            return saved[port.name]
        if role.kind == "input":
            return self._part("inputs", role.name, self.inputs.get(role.name, port.example), microbatch)
        if role.kind == "tangent":
            return self._part("outputs", role.index, tangents[role.index], microbatch)
        if role.kind == SUM:  # after the last microbatch; only one graph takes it
            total = self.sums.pop(role.name)
            return self.gathered(total) if self.program.reduce[role.name] == GATHER else total
        if role.kind in (KNOWN, KEPT):
            return self.shared[role.name if role.kind == KNOWN else (role.name, microbatch)]
        return self.argument(port, microbatch)

    def gathered(self, terms: list[Any]) -> Any:
        """Concatenates ``terms``, one value per microbatch, along dim 0."""
        return self.map_ranks(lambda *parts: torch.cat(parts), *terms)

    def _add(self, name: str, term: Any) -> None:
        """Adds ``term``, the result of one microbatch, to the sum ``name``, in the way of its reduction (sum, max,
        ...). If that is a gather, terms are collected in a list.

        It adds in place if the sum has its own memory.
        """
        if self.program.reduce[name] == GATHER:
            self.sums.setdefault(name, []).append(term)
        elif name not in self.sums:
            self.sums[name] = term  # the graph's own result: not written, as other results may share its memory
        elif self.program.reduce[name] == "sum" and name in self._added:
            self.map_ranks(Tensor.add_, self.sums[name], term)
        else:
            self.sums[name] = self.map_ranks(JOIN[self.program.reduce[name]], self.sums[name], term)
            self._added.add(name)

    def _part(self, kind: str, key: object, x: Any, microbatch: int) -> Any:
        """Returns the part of ``x`` that a microbatch uses; all of it if it is not split. ``x`` is an input (kind
        "inputs", key its name) or the gradient of an output (kind "outputs", key its index).
        """
        layout = self.program.in_time.get(kind, {}).get(key)  # only of what the axis of microbatches splits
        if layout is None or x is None:
            return x
        return self.map_ranks(lambda whole: part_of(whole, layout, microbatch), x)

    def _joined(self) -> Results:
        """Joins the outputs and gradients of the microbatches to those of the whole step, and returns them. Clears what
        is stored.
        """
        outputs, inputs = self.program.in_time["outputs"], self.program.in_time["inputs"]
        layouts = {("output", index): layout for index, layout in outputs.items()}
        layouts |= {("grad", name): layout for name, layout in inputs.items()}
        parts, self.parts, self.sums, self.shared = self.parts, {}, {}, {}
        return {key: self._join(values, layouts.get(key)) for key, values in parts.items()}

    def _join(self, values: list[Any], layout: Layout | None) -> Any:
        """Concatenates ``values``, an output or gradient of each microbatch, along the dim that ``layout`` splits into
        microbatches. Without a layout, or for values None, returns the last value.
        """
        if layout is None or values[0] is None:
            return values[-1]
        return self.map_ranks(lambda *parts: join_parts(parts, layout), *values)


class Microstep:
    """One call of a program in microbatches: holds its outputs, and the gradients for a backward that may follow.

    Args:
        program: the program.
        run_step: as `Loops.run_step`, for the inputs of the call, of a program given as the first argument.
        grad: whether a backward may follow. The call computes the gradients of the program's loss then.
        map_ranks: as in `Loops`.
        everywhere: turns a tensor into a value (see `Loops.map_ranks`): in a simulation, a copy per rank.
    """

    def __init__(
        self,
        program: Executable,
        run_step: Callable[[Executable, bool, Mapping[int, Any]], Results],
        grad: bool,
        map_ranks: Map,
        everywhere: Callable[[Tensor], Any] = lambda x: x,
    ) -> None:
        self.program, self.run_step, self.trains = program, run_step, grad and program.trains
        self.map_ranks = map_ranks
        self._grads: Results | None = None  # gradients of the loss; None if forward computed none
        # Gradients of a loss are computed at once, for tangent 1: a backward scales them by its tangent.
        if self.trains and program.loss is not None:
            ports = (port for half in program.step() for port in half.takes)  # also of loops before the forward
            like = next(port.example for port in ports if port.role.kind == "tangent")
            # In a simulation, `everywhere` copies it to each rank.
            tangent = everywhere(torch.ones(like.shape, dtype=like.dtype, device=like.device))
            self._outputs = run_step(program, True, {program.loss: tangent})
            self._grads = _take_gradients(self._outputs)
        else:
            # If loops before the forward depend on gradients, a variant of the program without gradients infers.
            variant = program.using(frozenset()) if program.opens_backward else program
            self._outputs = run_step(variant, False, {})

    def output(self, role: Role) -> Any:
        """Returns the output, or the new value of a buffer, that ``role`` names. None if it is not a tensor."""
        return self._outputs.get(result_key(role))

    def has_gradients(self, used: Iterable[int]) -> bool:
        """Returns whether forward has already computed the gradients that a backward of the outputs with indices
        ``used`` needs. That is so if only the loss is used and its gradients are kept.
        """
        return self._grads is not None and set(used) == {self.program.loss}

    def grads(self, tangents: Mapping[int, Any], keeps: bool = True) -> Results:
        """Returns the gradients of parameters and inputs, by ("grad", name), for given ``tangents`` (output index ->
        gradient). Runs the microbatches again if forward has not kept what is needed.

        Args:
            keeps: whether another backward may follow; if not, each gradient is freed when it is scaled.
        """
        used, program = frozenset(tangents), self.program
        if not self.has_gradients(used) or self._grads is None:
            if self._grads is not None:
                _warn_of_outputs(used - {program.loss})
            return _take_gradients(self.run_step(program.using(used), True, tangents))
        # The gradients were computed for tangent 1 of the loss, the one output that is used.
        (factor,) = tangents.values()

        def scaled(grad: Tensor, by: Tensor) -> Tensor:
            # Not in place: gradients may share memory, with each other and with tensors of the user.
            return grad * by.reshape(()).to(grad.device)

        grads = {}
        for key in list(self._grads):
            grad = self._grads[key] if keeps else self._grads.pop(key)
            grads[key] = None if grad is None else self.map_ranks(scaled, grad, factor)
        return grads


def _take_gradients(results: Results) -> Results:
    """Removes the gradients from ``results``, and returns them."""
    return {key: results.pop(key) for key in list(results) if key[0] == "grad"}


def _warn_of_outputs(indices: frozenset[int | None]) -> None:
    """Warns that a backward uses outputs other than the loss, by their indices: the microbatches must
    then run again.
    """
    warnings.warn(
        ShardcWarning(
            f"a backward uses {outputs_text(int(x) for x in indices if x is not None)} of a module with microbatches, "
            "which ran again for it: a call computes the gradients of its loss only; return one loss that contains all "
            "terms"
        ),
        stacklevel=3,
    )


def part_of(x: Tensor, layout: Layout, microbatch: int) -> Tensor:
    """Returns the rows of ``microbatch`` (its number) from ``x``, a shard that has all microbatches. The dim of rows is
    ``[above, microbatches, below]``, as `_microbatch_dim` returns it; ``above`` and ``below`` stay, in this order.

    Args:
        layout: layout of one microbatch's shard, in which the axis of microbatches splits a dim.
    """
    dim, above, below = _microbatch_dim(layout)
    parts = x.unflatten(dim, (above, layout.mesh.microbatches, below))
    return parts.select(dim + 1, microbatch).flatten(dim, dim + 1).contiguous()


def join_parts(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """Joins ``parts``, the shard of each microbatch, to the shard of the whole batch. Inverts `part_of`."""
    dim, above, below = _microbatch_dim(layout)
    return torch.stack([part.unflatten(dim, (above, below)) for part in parts], dim + 1).flatten(dim, dim + 2)


def _microbatch_dim(layout: Layout) -> tuple[int, int, int]:
    """Returns how the axis of microbatches splits a local tensor: (dim, above, below). In that dim, the tensor can be
    viewed as ``[above, microbatches, below]``.

    A layout writes a dim's index in digits, slowest first, each local (axis None) or split by a mesh axis. The other
    ranks' digits are not in a local tensor: ``above`` and ``below`` count the local ones before and after that of time.
    """
    time = layout.mesh.time
    dim = layout.dim_of(time)
    assert dim is not None, f"{layout} is not split over {time}"
    digits = layout.dims[dim]
    at = next(at for at, digit in enumerate(digits) if digit.axis == time)
    above, below = ([d.radix for d in part if d.axis is None] for part in (digits[:at], digits[at + 1 :]))
    return dim, prod(above), prod(below)
