"""`Timed`: what a record says of a step in microbatches, and checks that its graphs fit together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from shardc.errors import PrecompiledError
from shardc.ir.executable import (
    BACKWARD,
    FORWARD,
    INFERENCE,
    KEPT,
    KNOWN,
    LAST_BACKWARD,
    SUM,
    TERM,
    Executable,
    Half,
    opening,
    phases,
)
from shardc.validate import Range

Index = Annotated[int, Range(0, 1 << 50)]


@dataclass(frozen=True)
class Timed:
    """The attributes of an `Executable` with microbatches that its plan and graphs do not say.

    Args:
        outputs: (index, layout as text, with the axis of time) of each output that is split over the microbatches.
    """

    outputs: tuple[tuple[Index, str], ...]
    reduce: Mapping[str, Literal["sum", "max", "min", "product", "gather"]]
    openings: Annotated[int, Range(0, 100)]
    gathers_once: bool
    opens_backward: bool
    loss: Index | None
    tangents: tuple[tuple[Index, torch.dtype], ...]

    @classmethod
    def of(cls, program: Executable) -> Timed | None:
        """Return what a record says of ``program``; None if it has no microbatches."""
        if program.microbatches == 1:
            return None
        reduce: Mapping[str, str] = dict(program.reduce)
        return cls(
            tuple((index, str(layout)) for index, layout in program.in_time["outputs"].items()),
            reduce,  # type: ignore[arg-type]
            program.openings, program.gathers_once, program.opens_backward, program.loss,
            tuple(program.tangents.items()),
        )  # fmt: skip


def complete(names: Collection[str], timed: Timed | None, evaluates: bool) -> bool:
    """Return whether ``names`` are the graphs of a training step, of an inference, or of both.

    Args:
        evaluates: a training step needs those of an inference beside it, unless `Timed.opens_backward`.
    """
    halves = set(names)
    if timed is None:
        training, inference = {FORWARD, BACKWARD}, {INFERENCE}
    else:
        training, inference = (set(phases(kind, timed.openings, timed.gathers_once)) for kind in (FORWARD, INFERENCE))
        halves |= {opening(at)[0] for at in range(timed.openings)}  # not there if nothing depends on microbatches
        if LAST_BACKWARD in halves:  # which is all of it if the batch is too small to be split
            halves.add(BACKWARD)
        if timed.opens_backward:
            return halves == training
    return halves in (inference, training | inference) or halves == training and not evaluates


def check_steps(program: Executable, evaluates: bool) -> None:
    """Raises PrecompiledError if graphs of a loaded program with microbatches take what no earlier one gives.

    Args:
        evaluates: whether it has the graphs of an inference.
    """
    tangents = set(program.tangents)
    outputs = {role.index for role in program.outputs if role.kind == "output"}
    if program.trains != bool(tangents) or not {*program.differentiates} <= tangents <= outputs:
        raise PrecompiledError(f"the loss is output {program.loss}, and outputs {sorted(tangents)} have gradients")
    if program.trains:
        _check_step(program.step(), program)
    if evaluates:
        _check_step(program.step(training=False), program)


def _check_step(step: tuple[Half, ...], program: Executable) -> None:
    """Raises PrecompiledError if a graph of ``step`` takes what no earlier one gives."""
    given: set[tuple[str, str | int]] = {("tangent", index) for index in program.differentiates}
    parts = {name: program.in_time["inputs"].get(name, layout).local_shape for name, layout in program.inputs}
    once = {step[-1].phase, *(opening(at)[1] for at in range(program.openings))}
    reads_gradients = False
    for half in step:
        for port in half.takes:
            role = port.role
            key = role.kind, role.index if role.kind == "tangent" else role.name
            if role.kind == "saved":
                key = "saved", port.name
            if role.kind == SUM and half.phase in once:
                key = TERM, role.name
            if role.kind in ("saved", "tangent", SUM, KNOWN, KEPT) and key not in given:
                raise PrecompiledError(f"{half.name} takes %{port.name}, which no graph before it gives")
            if role.kind == "input" and isinstance(port.example, Tensor) and port.example.shape != parts[role.name]:
                raise PrecompiledError(f"{half.name} takes {list(port.example.shape)} of input {role.name!r}")
            reads_gradients |= role.kind == "tangent" and half.phase not in (BACKWARD, LAST_BACKWARD)
        for role in half.gives:
            if role.kind == TERM and role.name not in program.reduce:
                raise PrecompiledError(f"{half.name} gives terms of {role.name!r}, which is no sum")
            given.add((role.kind, role.name))
        if half.phase in once:  # takes all terms of its sums
            given -= {(TERM, port.role.name) for port in half.takes if port.role.kind == SUM}
    if reads_gradients != program.opens_backward:
        raise PrecompiledError("what the record says of gradients before the forward is not so")
    if program.loss is not None and step[-1].phase == LAST_BACKWARD:
        taken = [port.role.index for port in step[-1].takes if port.role.kind == "tangent"]
        if taken != [program.loss]:
            raise PrecompiledError(
                f"the last backward takes gradients of outputs {taken}, and the loss is {program.loss}"
            )
