"""`Timed`: the part of a saved program's record that is about microbatches; and checks that the program's graphs fit
together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from shardc.errors import PrecompiledError
from shardc.ir import executable as step
from shardc.ir.executable import AtStage, Executable, Half, Phase, Run, opening, phases, saved_key, without_stage
from shardc.ir.graph import Role
from shardc.ir.stage_runs import Key, Message
from shardc.validate import Range

Index = Annotated[int, Range(0, 1 << 50)]
OF_STAGE = (
    step.FORWARD, step.FIRST_FORWARD, *step.BACKWARDS.values(), step.LAST_BACKWARD, step.GRADIENTS, step.INFERENCE,
    step.FIRST_INFERENCE, step.CLOSING, step.GATHERS,
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """The attributes of a program in microbatches that are saved with it, since they do not follow from its plan and
    graphs.

    Fields without a description are the attributes of that name.

    Args:
        outputs: (index, layout as text, with the axis of microbatches) of each output that it splits.
        stage_of: parameter -> the first stage of a pipeline that uses it; empty without stages.
    """

    outputs: tuple[tuple[Index, str], ...]
    reduce: Mapping[str, Literal["sum", "max", "min", "product", "gather"]]
    openings: Annotated[int, Range(0, 100)]
    gathers_once: bool
    opens_backward: bool
    loss: Index | None
    tangents: tuple[tuple[Index, torch.dtype], ...]
    stage_of: Mapping[str, Index]

    @classmethod
    def of(cls, program: Executable) -> Timed | None:
        """Return the `Timed` of ``program``; None if it has no microbatches."""
        if program.microbatches == 1:
            return None
        reduce: Mapping[str, str] = dict(program.reduce)
        return cls(
            tuple((index, str(layout)) for index, layout in program.in_time["outputs"].items()),
            reduce,  # type: ignore[arg-type]
            program.openings, program.gathers_once, program.opens_backward, program.loss,
            tuple(program.tangents.items()), dict(program.stage_of),
        )  # fmt: skip


def phase_named(name: str) -> Phase:
    """Return the phase whose text is ``name``: the inverse of ``str(phase)``."""
    match = re.fullmatch(r"(.*) of stage (\d{1,9})", name)
    return name if match is None else AtStage(match[1], int(match[2]))


def complete(names: Collection[str], timed: Timed | None, evaluates: bool) -> bool:
    """Return whether ``names`` are the graphs of a training step, of an inference, or of both. With ``evaluates``,
    those of a training step alone are not enough.

    Args:
        evaluates: whether a training step must come with the graphs of an inference, unless `Timed.opens_backward`.
    """
    halves: set[Phase] = {phase_named(name) for name in names}
    if timed is not None and timed.stage_of:
        return _complete_stages(halves, timed, evaluates)
    if timed is None:
        training, inference = {step.FORWARD, step.BACKWARD}, {step.INFERENCE}
    else:
        training, inference = (
            set(phases(kind, timed.openings, timed.gathers_once)) for kind in (step.FORWARD, step.INFERENCE)
        )
        halves |= {opening(at)[0] for at in range(timed.openings)}  # not there if nothing depends on microbatches
        if step.LAST_BACKWARD in halves:  # which is all of it if the batch is too small to be split
            halves.add(step.BACKWARD)
        if timed.opens_backward:
            return halves == training
    return halves in (inference, training | inference) or halves == training and not evaluates


def _complete_stages(halves: set[Phase], timed: Timed, evaluates: bool) -> bool:
    """Return whether ``halves`` has the graphs that a program with pipeline stages needs, and no unknown ones: forward
    or inference of every stage (with ``evaluates``, inference), and what runs once after each loop before the forward.
    """
    stages = range(1 + max(timed.stage_of.values()))
    bodies, ends = zip(*map(opening, range(timed.openings)), strict=True) if timed.openings else ((), ())
    possible = {*bodies, *ends, *(AtStage(phase, at) for phase in (*OF_STAGE, *bodies) for at in stages)}
    trains, infers = ({AtStage(phase, at) for at in stages} <= halves for phase in (step.FORWARD, step.INFERENCE))
    is_enough = infers or trains and (timed.opens_backward or not evaluates)
    return is_enough and {*ends} <= halves <= possible


def check_steps(program: Executable, evaluates: bool) -> None:
    """Checks a loaded program with microbatches: its loss and gradients belong to its outputs, and graphs and messages
    read only what earlier ones give. Raises PrecompiledError if not.

    Args:
        evaluates: whether it has the graphs of an inference.
    """
    tangents = set(program.tangents)
    outputs = {role.index for role in program.outputs if role.kind == "output"}
    if program.trains != bool(tangents) or not {*program.differentiates} <= tangents <= outputs:
        raise PrecompiledError(f"the loss is output {program.loss}, and outputs {sorted(tangents)} have gradients")
    summed = {port.role.name for half in program.step() for port in half.takes if port.role.kind == step.SUM}
    if program.trains and (lost := program.reduce.keys() - summed):
        raise PrecompiledError(f"no graph takes the sum of {min(lost)!r}")
    for training in [True] * program.trains + [False] * evaluates:
        for rank in range(program.stage_ranks):
            _check_actions(program.actions(rank, training), program, rank)
        if not program.stage_ranks:
            _check_actions([Run(*run) for run in program.runs(training)], program)


def _check_actions(actions: Sequence[Run | Message], program: Executable, rank: int = 0) -> None:
    """Raises PrecompiledError if one of the ``actions`` of ``rank`` (runs of graphs, messages) reads or sends a value
    that the rank does not have by then.
    """
    available: set[Key] = {("tangent", index, 0) for index in program.differentiates}
    parts = {name: program.in_time["inputs"].get(name, layout).local_shape for name, layout in program.inputs}
    openings = [opening(at) for at in range(program.openings)]
    # The phases behind a loop over all microbatches: only these may take its sums.
    once = {step.LAST_BACKWARD, step.CLOSING, step.GRADIENTS, *(phase for _, phase in openings)}
    reads_gradients = False
    for action in actions:
        if isinstance(action, Message):
            if action.source != rank:
                available |= {*action.keys}
            elif lost := [key for key in action.keys if key[0] in (step.TRANSFER, step.SUM) and key not in available]:
                raise PrecompiledError(f"stage {action.source} sends %{lost[0][1]}, which no graph before it gives")
            continue
        half, at = action.half, action.microbatch
        phase = without_stage(half.phase)
        for port in half.takes:
            role, key = port.role, _key(half, port.role, port.name, at)
            is_early = role.kind == step.SUM and phase not in once
            is_passed_on = role.kind in ("saved", "tangent", step.SUM, step.KNOWN, step.KEPT, step.TRANSFER)
            if is_passed_on and (key not in available or is_early):
                raise PrecompiledError(f"{half.name} takes %{port.name}, which no graph before it gives")
            if role.kind == "input" and isinstance(port.example, Tensor) and port.example.shape != parts[role.name]:
                raise PrecompiledError(f"{half.name} takes {list(port.example.shape)} of input {role.name!r}")
            reads_gradients |= role.kind == "tangent" and any(phase in names for names in openings)
        if not program.stage_ranks:  # it takes all terms of its sums
            available -= {_key(half, port.role, port.name, at) for port in half.takes if port.role.kind == step.SUM}
        for role in half.gives:
            if role.kind == step.TERM and role.name not in program.reduce:
                raise PrecompiledError(f"{half.name} gives terms of {role.name!r}, which is no sum")
            available.add(_key(half, role, role.name, at))
    if reads_gradients != program.opens_backward:
        raise PrecompiledError("what the record says of gradients before the forward is not so")
    _check_last(actions[-1], program.loss)


def _check_last(last: Run | Message, loss: int | None) -> None:
    """Raises PrecompiledError if the ``last`` action is a backward that takes the gradients of other outputs than the
    loss, the output with the index ``loss``.
    """
    if loss is not None and isinstance(last, Run) and last.half.phase == step.LAST_BACKWARD:
        differentiated = [port.role.index for port in last.half.takes if port.role.kind == "tangent"]
        if differentiated != [loss]:
            raise PrecompiledError(
                f"the last backward takes gradients of outputs {differentiated}, and the loss is {loss}"
            )


def _key(half: Half, role: Role, name: str, microbatch: int) -> Key:
    """Return the key under which graphs pass on a value that ``half`` takes or returns as ``name`` with ``role``. All
    terms of a sum have the key of the sum.
    """
    if role.kind == "saved":
        return saved_key(half, name, microbatch)
    if role.kind in (step.KEPT, step.TRANSFER):
        return role.kind, role.name, microbatch
    return step.SUM if role.kind == step.TERM else role.kind, role.index if role.kind == "tangent" else role.name, 0
