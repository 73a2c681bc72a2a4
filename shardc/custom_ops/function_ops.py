"""Ops that run functions: ``cond``, ``scan`` and ``while_loop`` as ops of a graph. Such an op refers to its functions
by the name of a registered `Function`.

A `Function` is the op's graphs, of aten ops on tensors, registered under a hash of its content. What it reads is an
operand of the op. A graph in it may have such ops again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from shardc._compat import is_fake
from shardc.custom_ops.expert_functions import graph_from_json, graph_to_json
from shardc.custom_ops.op_library import OpLibrary
from shardc.errors import InputError, RuleError, TextError


@dataclass(frozen=True, eq=False)
class Function:
    """The graphs that an op such as ``cond`` or ``scan`` runs. ``counts`` says how the op's operands are divided into
    arguments of the graphs.

    Args:
        kind: name of the op, a key of `KINDS`.
        graphs: ``cond``: of (operands without the predicate) -> results, one if it is true and one if not; ``scan``: of
            (carries, a slice of each sequence, the rest) -> (carries, a slice of each result); ``while_loop``: of
            (carries, the rest) -> a predicate, and of the same -> carries; ``loop_gradient``: those of its loop, and of
            (gradients of the carries that have some, sums of those of the rest, carries, the rest) -> the first two
            before that step; ``flex``: see `shardc.custom_ops.flex_ops`.
        counts: number of operands that are carries, and of those that are sequences; of ``loop_gradient``,
            number of gradients, and of carries; of ``flex``, number of tensors that each graph captures.
        flops: floating-point operations of one step, or of the larger of two branches.
        options: of ``flex``, (name, value) of each of torch's options for its kernel.
    """

    kind: str
    graphs: tuple[fx.Graph, ...]
    counts: tuple[int, int] = (0, 0)
    flops: int = 0
    options: tuple[tuple[str, bool | int | str], ...] = ()

    @cached_property
    def name(self) -> str:
        """Return a name with a hash of the content: equal functions have the same name in every process."""
        return f"{self.kind}.{hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:32]}"

    @cached_property
    def calls(self) -> tuple[Callable[..., Sequence[Tensor]], ...]:
        """Return the graphs as Python functions."""
        return tuple(fx.GraphModule({}, graph).forward for graph in self.graphs)

    def to_json(self) -> dict[str, object]:
        """Return the function as dicts, lists, strings and numbers, for `from_json`."""
        graphs = [list(graph_to_json(graph)) for graph in self.graphs]
        options = {"options": [list(option) for option in self.options]} if self.options else {}
        return {"kind": self.kind, "graphs": graphs, "counts": list(self.counts), "flops": self.flops} | options

    @classmethod
    def from_json(cls, data: Any, allowed: Callable[[Any], bool]) -> Function:
        """Make a `Function` from what `to_json` returned. TextError for any other data, or if it calls an op for which
        ``allowed(op)`` is false.
        """
        try:
            graphs = tuple(graph_from_json(graph, allowed) for graph in data["graphs"])
            kind, (carries, sequences) = data["kind"], map(int, data["counts"])
            if len(graphs) != len(KINDS[kind]):
                raise ValueError(f"{kind} has {len(graphs)} graphs")
            options = tuple((str(name), _option(value)) for name, value in data.get("options", ()))
            return cls(kind, graphs, (carries, sequences), int(data["flops"]), options)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise TextError(f"this is no function of an op: {error}") from error


def _option(value: object) -> bool | int | str:
    """Return ``value`` if it can be an option of a kernel; TypeError for other types."""
    if not isinstance(value, bool | int | str):
        raise TypeError(f"no option of a kernel: {value!r}")
    return value


KINDS = {
    "cond": ("true", "false"), "scan": ("step",), "while_loop": ("condition", "step"),
    "loop_gradient": ("condition", "step", "gradient"),
    "flex": ("score", "mask"),  # of `shardc.custom_ops.flex_ops`
}  # fmt: skip
_functions: dict[str, Function] = {}


def named(graph: fx.Graph) -> None:
    """Renames the nodes of ``graph`` in place to ``v0``, ``v1`` and so on. Equal functions then have equal graphs,
    wherever they are called.
    """
    for at, node in enumerate(graph.nodes):
        node._rename(f"v{at}") if node.op != "output" else None
        node.target = node.name if node.op == "placeholder" else node.target


def register(function: Function) -> Function:
    """Register ``function`` under its name and return it. If an equal function has that name already, return that
    one.
    """
    return _functions.setdefault(function.name, function)


def function_of(name: str) -> Function:
    """Return the `Function` registered under ``name``. RuleError if this process has neither captured nor loaded it."""
    if name not in _functions:
        raise RuleError(f"no function is known by the name {name!r}", fix="capture, or load, the model that has it")
    return _functions[name]


def functions_in(*graphs: fx.Graph) -> Iterator[str]:
    """Yield the names of the functions that ops in ``graphs`` run. Functions that another function runs are yielded
    before that one.
    """
    for node in chain.from_iterable(graph.nodes for graph in graphs):
        for argument in node.args:
            if isinstance(argument, str) and argument in _functions:
                yield from functions_in(*_functions[argument].graphs)
                yield argument


# --- the ops


def _cond(operands: list[Tensor], body: str) -> list[Tensor]:
    """Run one of two branches on the operands, chosen by the first operand (the predicate); return its results."""
    predicate, *rest = operands
    true, false = function_of(body).calls
    chosen = true if is_fake(predicate) or predicate else false
    return _unaliased(chosen(*rest), operands)


def _scan(operands: list[Tensor], body: str, reverse: bool = False, steps: Tensor | None = None) -> list[Tensor]:
    """Run a scan. Return a list: the carries after the last step, then the results of all steps, stacked along dim 0.

    Args:
        reverse: whether the last slices come first.
        steps: number of slices, the first ones, that there are steps for, int64 [1]; None for all. Results of others
            are zero.
    """
    function = function_of(body)
    (step,), (carries, sequences) = function.calls, function.counts
    carried, xs, rest = operands[:carries], operands[carries : carries + sequences], operands[carries + sequences :]
    if is_fake(operands[0]):  # a step gives the shapes of all
        results = step(*carried, *(x[0] for x in xs), *rest)
        stacked = [y.new_empty((len(xs[0]), *y.shape)) for y in results[carries:]]
        return _unaliased([*results[:carries], *stacked], operands)
    size = len(xs[0])
    count = size if steps is None else int(steps)
    stacked = []
    for at in (range(count)[::-1] if reverse else range(count)) or [0]:
        results = step(*carried, *(x[at] for x in xs), *rest)
        stacked = stacked or [y.new_zeros((size, *y.shape)) for y in results[carries:]]
        if count:
            carried = list(results[:carries])
            for every, y in zip(stacked, results[carries:], strict=True):
                every[at] = y
    return _unaliased([*carried, *stacked], operands)


def _while_loop(operands: list[Tensor], body: str) -> list[Tensor]:
    """Run the steps of a while loop as long as its predicate is true; return the last carries. On fake tensors no step
    is run.
    """
    function = function_of(body)
    (condition, step), (carries, _) = function.calls, function.counts
    carried, rest = operands[:carries], operands[carries:]
    if is_fake(operands[0]):
        return [x.clone() for x in carried]
    while _predicate(condition(*carried, *rest)):
        carried = list(step(*carried, *rest))
    return _unaliased(carried, operands)


def _predicate(result: Any) -> bool:
    """Return the bool that a predicate's result holds: a tensor, or a sequence with one tensor."""
    return bool(result[0] if isinstance(result, (tuple, list)) else result)


def _unaliased(results: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """Return ``results``, each contiguous and in memory that it shares with no operand and no other result (copied if
    needed).
    """
    memory = {x.untyped_storage()._cdata for x in operands}
    out: list[Tensor] = []
    for x in results:
        x = x.contiguous()
        out.append(x.clone() if x.untyped_storage()._cdata in memory else x)
        memory.add(out[-1].untyped_storage()._cdata)
    return out


def _loop_gradient(operands: list[Tensor], body: str) -> list[Tensor]:
    """Run a while loop forward, then the gradients of its steps in reverse order. Return the gradients of its first
    carries, then those of its other operands.
    """
    function = function_of(body)
    (condition, step, gradient), (count, carries) = function.calls, function.counts
    grads, carried, rest = operands[:count], operands[count : count + carries], operands[count + carries :]
    results = [*grads, *(torch.zeros_like(x) for x in rest if x.is_floating_point())]
    steps: list[list[Tensor]] = []
    while not is_fake(operands[0]) and _predicate(condition(*carried, *rest)):
        steps.append(carried)
        carried = list(step(*carried, *rest))
    for carried in reversed(steps):
        results = list(gradient(*results, *carried, *rest))
    return _unaliased(results, operands)


def _no_gradient(grads: list[Tensor], like: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    """Stands in a graph for the gradient of a while_loop that cannot be computed, because a loop or branch is inside of
    the while_loop or around it. Raises InputError when it runs.

    On fake tensors it returns tensors like ``like``, so that the backward can be traced.
    """
    if is_fake(like[0]):
        return [torch.empty_like(x) for x in like]
    raise InputError(
        "a while_loop in whose step, or around which, there is a loop or branch has no gradient",
        fix="write a scan over a fixed number of steps, or call the loop under torch.no_grad()",
    )


_library = OpLibrary("shardc_function")
NO_GRADIENT = _library.define("no_gradient(Tensor[] grads, Tensor[] like, Tensor[] results) -> Tensor[]", _no_gradient)
OPS = {
    "cond": _library.define("cond(Tensor[] operands, str body) -> Tensor[]", _cond),
    "scan": _library.define(
        "scan(Tensor[] operands, str body, bool reverse=False, Tensor? steps=None) -> Tensor[]", _scan
    ),
    "while_loop": _library.define("while_loop(Tensor[] operands, str body) -> Tensor[]", _while_loop),
    "loop_gradient": _library.define("loop_gradient(Tensor[] operands, str body) -> Tensor[]", _loop_gradient),
}
