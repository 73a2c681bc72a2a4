"""A compiled step (`Executable`): its local graphs, their arguments and results, and the order of their collectives.

A *half* is one local graph of a step: its forward or backward, an inference, or the reduction of gradients that earlier
backwards left unreduced (``no_sync``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from shardc._compat import cache_method, pytree
from shardc.ir import graph as ir
from shardc.ir.arena import PLAN, MemoryPlan
from shardc.ir.certificate import Certificate, certify
from shardc.ir.deferred import Deferred
from shardc.ir.graph import Role
from shardc.ir.guards import Guards
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.repeat import Segment
from shardc.ir.returned import Returned
from shardc.ir.schedules import Kind, Schedule, play
from shardc.ir.stage_runs import Key, Message, StageRuns, received


def outputs_text(used: Iterable[int]) -> str:
    """Return the indices of the outputs that a backward computes gradients of, as text.

    >>> outputs_text([2, 0])
    'outputs 0, 2'
    """
    return f"outputs {', '.join(map(str, sorted(used)))}"


FORWARD, BACKWARD, INFERENCE, REDUCTION = "forward", "backward", "inference", "reduction"
# With microbatches: the forward (or inference) of the first, if it also gathers parameters for all; the backward of the
# last, which also closes the step; and what closes a call without gradients.
FIRST_FORWARD, FIRST_INFERENCE, LAST_BACKWARD, CLOSING = "first forward", "first inference", "last backward", "closing"
FIRST = {FORWARD: FIRST_FORWARD, INFERENCE: FIRST_INFERENCE}

# Kinds of role of what graphs of microbatches give each other: a microbatch's term of a sum, the sum of all terms, a
# value that is the same in all microbatches, a microbatch's own value that a later loop reads.
TERM, SUM, KNOWN, KEPT = "term", "sum", "known", "kept"
TRANSFER = "transfer"  # a microbatch's value that one pipeline stage sends to another
GATHER = "gather"  # in place of a reduce op: terms are concatenated along dim 0
JOIN: dict[str, Callable[..., Tensor]] = {  # reduce op -> op that joins two terms
    "sum": torch.ops.aten.add.Tensor,
    "max": torch.ops.aten.maximum.default,
    "min": torch.ops.aten.minimum.default,
    "product": torch.ops.aten.mul.Tensor,
}


def opening(at: int) -> tuple[str, str]:
    """Return the phases of loop number ``at`` before the forward: (for each microbatch, once after all of them)."""
    return f"opening {at + 1}", f"opened {at + 1}"


def phases(forward: str, openings: int, gathers_once: bool) -> tuple[str, ...]:
    """Return the names of the phases of a step with microbatches, in order: of the ``openings`` loops before the
    forward, of the forward, and of the backward or the closing.

    Args:
        forward: FORWARD of a training step, INFERENCE of one without gradients.
        openings, gathers_once: as in `Executable`.
    """
    before = [phase for at in range(openings) for phase in opening(at)]
    first = [FIRST[forward]] if gathers_once else []
    return *before, *first, forward, *((BACKWARD, LAST_BACKWARD) if forward == FORWARD else (CLOSING,))


# Of a stage of a pipeline: gathers of parameters for all microbatches, and what follows the sums in a training step.
GATHERS, GRADIENTS = "gathers", "gradients"
# A backward in two: what leads to the gradients that earlier stages take, and the rest.
INPUT_GRADIENTS, WEIGHT_GRADIENTS = "backward of inputs", "backward of weights"
# Computation of a schedule -> the phase that it runs.
BACKWARDS = {
    Kind.BACKWARD: BACKWARD, Kind.BACKWARD_INPUT: INPUT_GRADIENTS, Kind.BACKWARD_WEIGHT: WEIGHT_GRADIENTS,
}  # fmt: skip
_LIKE_BACKWARD = (LAST_BACKWARD, GRADIENTS, INPUT_GRADIENTS, WEIGHT_GRADIENTS)


@dataclass(frozen=True)
class AtStage:
    """The name of a phase of one pipeline stage, such as "forward of stage 1"."""

    phase: str
    stage: int

    def __str__(self) -> str:
        return f"{self.phase} of stage {self.stage}"


# The phase of a half; for the backward of a loss that uses some outputs only, the indices of these outputs.
Phase = str | frozenset[int] | AtStage


def without_stage(phase: Phase) -> Phase:
    """Return ``phase`` without its pipeline stage: "forward" for "forward of stage 1"."""
    return phase.phase if isinstance(phase, AtStage) else phase


@dataclass(frozen=True)
class Port:
    """An argument of a forward or backward graph.

    Args:
        role: the parameter, buffer, input or saved value that it is.
        name: name of the placeholder.
        example: a fake tensor, or a number.
    """

    role: Role
    name: str
    example: Any


@dataclass(frozen=True, eq=False)
class Half:
    """One local graph of a step, such as its forward, its backward, an inference, or a reduction of gradient sums.

    Args:
        phase: FORWARD, BACKWARD or another name of a phase, with its stage in a pipeline (`AtStage`); or the outputs
            that a backward is for.
        gm: the graph, scheduled and with its memory planned.
        mesh: the mesh of its collectives' groups.
    """

    phase: Phase
    gm: fx.GraphModule
    mesh: Mesh

    @property
    def name(self) -> str:
        """Return the phase as text, such as "forward" or "backward of outputs 0, 2"."""
        return f"{BACKWARD} of {outputs_text(self.phase)}" if isinstance(self.phase, frozenset) else str(self.phase)

    @property
    def stage(self) -> int | None:
        """Return the pipeline stage of the graph; None without a pipeline, or if all stages run it."""
        return self.phase.stage if isinstance(self.phase, AtStage) else None

    @property
    def kind(self) -> str:
        """Return the phase as text, without its stage; BACKWARD for all phases of a backward and its closing."""
        phase = without_stage(self.phase)
        return phase if isinstance(phase, str) and phase not in _LIKE_BACKWARD else BACKWARD

    @property
    def is_forward(self) -> bool:
        """Return whether the graph is the model's forward, on a batch or microbatch. Graphs that run before it, to
        compute sums over all microbatches that it needs, are not.
        """
        return self.kind in (FORWARD, FIRST_FORWARD, INFERENCE, FIRST_INFERENCE)

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    @cached_property
    def takes(self) -> tuple[Port, ...]:
        """Return a `Port` for each argument, in order."""
        return tuple(Port(ir.role(node), node.name, node.meta["val"]) for node in ir.placeholders(self.graph))

    @cached_property
    def gives(self) -> tuple[Role, ...]:
        """Return the `Role` of each output (model output, gradient, buffer, saved value), in order."""
        return tuple(role for role, _ in ir.outputs(self.graph))

    @cached_property
    def reads(self) -> Mapping[str, Role]:
        """Return argument name -> `Role` of the parameter, buffer or input behind the argument. The argument is that
        tensor itself, or was gathered, moved or cast from it.
        """
        roles = ir.output_node(self.graph).meta.get(ir.READS, {})
        return {port.name: roles[port.name] for port in self.takes if port.name in roles}

    @property
    def plan(self) -> MemoryPlan:
        """Return the memory plan of the graph's collectives."""
        plan: MemoryPlan = ir.output_node(self.graph).meta.get(PLAN, MemoryPlan())
        return plan


@dataclass(frozen=True, eq=False)
class Compiled:
    """A lowered forward or backward graph: code for each of its segments, which run in order.

    Args:
        half: the graph before lowering.
        segments: its consecutive parts.
        codes: the function of each segment; equal segments share one. It takes a list of local tensors, which it
            empties, and returns a list of results.
        plan: memory plan of the results of collectives, with lifetimes in lines of ``source_code`` if there is any.
        source_code: Inductor's source of all distinct segments; "" without Inductor.
    """

    half: Half
    segments: tuple[Segment, ...]
    codes: tuple[Callable[[list[Any]], Sequence[Any]], ...]
    plan: MemoryPlan
    source_code: str = ""

    def __call__(self, inputs: list[Any], enter: Callable[[Segment], None] = lambda _: None) -> Sequence[Any]:
        """Run the graph on ``inputs``, which is emptied; return its outputs. If there are several segments, call
        ``enter`` before each.
        """
        if len(self.segments) == 1:
            return self.codes[0](inputs)
        values = self._constants | dict(zip(self.takes, inputs, strict=True))
        inputs.clear()
        for segment, code in zip(self.segments, self.codes, strict=True):
            enter(segment)
            operands = [values.pop(name) if name in segment.done else values[name] for name in segment.takes]
            values.update(zip(segment.gives, code(operands), strict=True))
        return [values[x] if isinstance(x, str) else x for x in self.gives]

    @cached_property
    def takes(self) -> tuple[str, ...]:
        """Return the names of the graph's placeholders."""
        return tuple(port.name for port in self.half.takes)

    @cached_property
    def gives(self) -> tuple[object, ...]:
        """Return each output in order: the name of the value, or a constant."""
        return tuple(x.name if isinstance(x, fx.Node) else x for _, x in ir.outputs(self.half.graph))

    @cached_property
    def _constants(self) -> dict[str, Tensor]:
        """Return the constant tensors of the graph by name."""
        nodes = self.half.graph.find_nodes(op="get_attr")
        return {node.name: attrgetter(str(node.target))(self.half.gm) for node in nodes}


@dataclass(frozen=True)
class Run:
    """One run of the graph ``half``, for the microbatch with number ``microbatch``."""

    half: Half
    microbatch: int = 0


def saved_key(half: Half, name: str, microbatch: int) -> Key:
    """Return the key of a value that one graph of a stage saves for another: stage, argument's name and microbatch."""
    return "saved", (half.stage, name), microbatch


def _last_uses(actions: Sequence[Run | Message], rank: int) -> list[frozenset[Key]]:
    """Return, for each of the actions of a rank, the keys of the values that may be dropped after it.

    These are saved activations, transferred values and sums that it reads and no later action reads, or that are
    received or computed anew before.
    """
    seen: set[Key] = set()
    out: list[frozenset[Key]] = []
    for action in reversed(actions):
        if isinstance(action, Run):
            seen -= {(TRANSFER, role.name, action.microbatch) for role in action.half.gives if role.kind == TRANSFER}
            half, at = action.half, action.microbatch
            keys = {saved_key(half, port.name, at) for port in half.takes}
            keys |= {(TRANSFER, port.role.name, at) for port in half.takes if port.role.kind == TRANSFER}
            keys |= {(SUM, port.role.name, 0) for port in half.takes if port.role.kind == SUM}
        else:
            seen -= {key for key in action.keys if action.target == rank and key[0] == TRANSFER}
            keys = {key for key in action.keys if action.source == rank and key[0] in (TRANSFER, SUM)}
        out.append(frozenset(keys - seen))
        seen |= keys
    return out[::-1]


class Executable(ABC):
    """Interface of a compiled step, as the runtime, the simulation and reports use it.

    Attributes:
        mesh: the mesh that it was compiled for.
        inputs: (name, layout) of each tensor input.
        outputs: the role, with its layout, of each output, updated buffers among them.
        output_values: the value of each output that is no tensor; None for tensors.
        output_spec: pytree spec that builds a call's result from the outputs.
        returned: how each output of the model aliases on one device, by its index.
        deferred: the parameters whose gradients the backward leaves unreduced.
        key: cache key of the call and the model that it was compiled for.
        guards: attributes and globals of the model that it depends on besides the key.
        from_store: whether it was loaded from the program cache or received from another rank, without its stages.
        stored: path in the program cache; or "not stored: " and why.
        levels: parameter -> its level of gathering, as `shardc.plan` defines it.
        causes: parameter -> the plan entries that decide its compute layout.
        microbatches: number of microbatches of a step; 1 if it is not split.
        in_time: "inputs" or "outputs" -> name or index -> layout with the axis of microbatches, of those that it
            splits.
        reduce: name of a term of the microbatches -> the reduce op that joins two of them.
        openings: number of loops over the microbatches before the forward.
        opens_backward: whether these loops depend on gradients of outputs.
        gathers_once: whether the first microbatch gathers parameters for all of them.
        loss: index of the output whose gradients a call with microbatches computes; None if there is no loss.
        tangents: with microbatches, index of each output that has gradients -> dtype of its gradient.
        stage_ranks: number of coordinates along the axis of the stages of a pipeline; 0 without one.
        stage_of: parameter -> the first stage that uses it.
    """

    mesh: Mesh
    inputs: tuple[tuple[str, Layout], ...]
    outputs: tuple[Role, ...]
    output_values: tuple[object, ...]
    output_spec: pytree.TreeSpec
    returned: tuple[Returned, ...]
    deferred: Deferred
    key: Any
    guards: Guards
    from_store = False
    stored = "not stored: only what a call of a module compiles is, for fixed sizes and with all gradients reduced"
    levels: Mapping[str, int]
    causes: Mapping[str, str]
    microbatches = 1
    in_time: Mapping[str, Mapping[Any, Layout]] = MappingProxyType({})
    reduce: Mapping[str, str] = MappingProxyType({})
    openings = 0
    opens_backward = False
    gathers_once = False
    loss: int | None = None
    tangents: Mapping[int, torch.dtype] = MappingProxyType({})
    stage_ranks = 0
    stage_of: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def make(self, phase: Phase) -> fx.GraphModule | None:
        """Return the graph of a phase; None if the step has no such phase (no backward if nothing needs a gradient)."""

    @abstractmethod
    def reduction(self, sums: Sequence[tuple[str, Layout, torch.dtype]]) -> Half:
        """Return the graph that reduces over ranks the local gradient sums of earlier backwards (``no_sync``).

        Args:
            sums: parameter, layout and dtype of each local sum.
        """

    @abstractmethod
    def cause(self, collective: fx.Node) -> Any:
        """Return the `shardc.cost.causes.Cause` (plan entry and source line) of a collective."""

    @cache_method
    def find(self, phase: Phase) -> Half | None:
        """Return the `Half` (graph) of a phase, made once; None if the step has no such phase (see `make`)."""
        gm = self.make(phase)
        return None if gm is None else Half(phase, gm, self.mesh)

    def half(self, phase: Phase) -> Half:
        """Return the graph (`Half`) of a phase. This step must have that phase."""
        half = self.find(phase)
        assert half is not None, f"there is no {phase}: nothing needs a gradient"
        return half

    @property
    def differentiates(self) -> frozenset[int]:
        """Return which outputs a program with microbatches differentiates, by index: the loss or, without one, all."""
        return frozenset(self.tangents if self.loss is None else [self.loss])

    def using(self, used: frozenset[int]) -> Executable:
        """Return a variant of this program with microbatches that differentiates the outputs with indices ``used``."""
        raise AssertionError("a step without microbatches has a backward for each set of outputs")

    def step(self, training: bool = True) -> tuple[Half, ...]:
        """Return the graphs of one step. Without microbatches these are (forward, backward) in training, else
        (inference,). The step is one of training if ``training`` is set and something needs a gradient.
        """
        trains = training and self.trains
        if self.opens_backward and not trains:
            return self.using(frozenset()).step(training)
        if self.stage_ranks:
            return tuple(dict.fromkeys(half for half, _ in self.runs(training)))
        if self.microbatches == 1:
            names: tuple[str, ...] = (FORWARD, BACKWARD) if trains else (INFERENCE,)
        else:
            names = phases(FORWARD if trains else INFERENCE, self.openings, self.gathers_once)
        return tuple(half for half in map(self.find, names) if half is not None)

    def own_halves(self, evaluates: bool = True) -> tuple[Half, ...]:
        """Return each graph of this program once: those of a training step, if there is one, and (if ``evaluates``)
        those of an inference.

        Args:
            evaluates: False leaves out the graphs of an inference if there is a training step. So does
                `opens_backward`: then another program (`using`) has them.
        """
        inference = self.step(training=False) if evaluates and not self.opens_backward else ()
        return tuple(dict.fromkeys((*self.step(), *inference)))

    def runs(self, training: bool = True) -> Iterator[tuple[Half, int]]:
        """Yield (graph, microbatch) of each run of a graph in a training step (``training``) or inference, in order."""
        trains = training and self.trains
        if self.opens_backward and not trains:
            yield from self.using(frozenset()).runs(training)
            return
        if self.stage_ranks:
            for rank in range(self.stage_ranks):
                yield from ((x.half, x.microbatch) for x in self.actions(rank, training) if isinstance(x, Run))
            return
        if (count := self.microbatches) == 1:
            yield from ((half, 0) for half in self.step(training))
            return
        before = (x for number in range(self.openings) for x in self._opening_actions(number))
        yield from ((x.half, x.microbatch) for x in before if isinstance(x, Run))
        forward = FORWARD if trains else INFERENCE
        for at in range(count):
            yield self.half(FIRST[forward] if at == 0 and self.gathers_once else forward), at
            if trains and (half := self.find(LAST_BACKWARD if at == count - 1 else BACKWARD)) is not None:
                yield half, at
        if not trains:
            yield self.half(CLOSING), 0

    def _opening_actions(self, number: int, loop: StageRuns | None = None, rank: int = 0) -> Iterator[Run | Message]:
        """Yield what a rank runs, sends and receives in loop ``number`` before the forward, then the run of the loop's
        closing graph.

        Args:
            loop: the loop's `StageRuns` if its layers lie on pipeline stages; else ``rank`` does not matter.
        """
        body, once = opening(number)
        if (half := self.find(body)) is not None:
            yield from (Run(half, at) for at in range(self.microbatches))
        for action in () if loop is None else (*loop.scheduled(rank), *loop.behind(rank)):
            if isinstance(action, Message):
                yield action
            elif (half := self.find(AtStage(body, action[1]))) is not None:
                yield Run(half, action[2])
        yield Run(self.half(once))

    def order(self, training: bool) -> Schedule:
        """Return a pipeline's `Schedule` for a training step (``training``) or for a call without gradients."""
        raise AssertionError("the program has no stages")

    @cache_method
    def stage_runs(self, training: bool) -> StageRuns:
        """Return the `StageRuns`: the values that cross between the stages of a pipeline, and the order of the ranks'
        runs.

        Raises:
            VerifyError: the lists of the ranks do not fit together.
        """
        order = self.order(training)
        play(order)
        loops = [self._opening_runs(at, len(order.rank_of)) for at in range(self.openings)]
        return StageRuns.of(order, self.stage_of, self._of_stages(order), loops)

    def _opening_runs(self, number: int, stages: int) -> StageRuns | None:
        """Return the `StageRuns` of loop ``number`` before the forward. The layers of the loop lie on ``stages``
        pipeline stages. None for a loop without stages, which all ranks run completely.

        The order is that of an inference, and all ranks take its sums.
        """
        body, once = opening(number)
        loops = [(at, half.graph) for at in range(stages) if (half := self.find(AtStage(body, at))) is not None]
        if not loops:
            return None
        order = self.order(False)
        play(order)
        graphs = [
            *((at, True, graph) for at, graph in loops),
            *((at, False, self.half(once).graph) for at in range(stages)),
        ]
        return StageRuns.of(order, self.stage_of, graphs)

    def _of_stages(self, order: Schedule) -> Iterator[tuple[int, bool, fx.Graph]]:
        """Yield (stage, whether it runs for each microbatch or only once, graph) of the stages' graphs, by stage."""
        forward = FORWARD if order.trains else INFERENCE
        phase_of = {Kind.FORWARD: forward, **BACKWARDS}
        once = (GATHERS, FIRST[forward], *((LAST_BACKWARD, GRADIENTS) if order.trains else (CLOSING,)))
        for stage, rank in enumerate(order.rank_of):
            kinds = [x.kind for x in order.lists[rank] if x.stage == stage]
            repeated = dict.fromkeys(phase_of[kind] for kind in kinds if kind in phase_of)
            for phase in (*repeated, *once):
                if (half := self.find(AtStage(phase, stage))) is not None:
                    yield stage, phase in repeated, half.graph

    def actions(self, rank: int, training: bool = True) -> list[Run | Message]:
        """Return what a rank of a pipeline runs, sends and receives in one step, in order.

        Args:
            rank: its coordinate along the axis of the stages.
        """
        return self._listed(rank, training and self.trains)

    @cache_method
    def last_uses(self, rank: int, training: bool = True) -> list[frozenset[Key]]:
        """Return, for each of the `actions` of a rank, the keys of the values that may be dropped after it."""
        return _last_uses(self.actions(rank, training), rank)

    @cache_method
    def received(self, rank: int, training: bool = True) -> list[int]:
        """Return one number for each of the rank's `actions`. For the receipt of a message, it is the number of this
        rank's own messages that the other rank had received before: this rank can free those. Otherwise 0.
        """
        return received([self.actions(at, training) for at in range(self.stage_ranks)], rank)

    @cache_method
    def _listed(self, rank: int, trains: bool) -> list[Run | Message]:
        """Return the `actions` of a rank in a training step (``trains``) or a call without gradients."""
        runs = self.stage_runs(trains)
        stages = runs.stages(rank)
        forward = FORWARD if trains else INFERENCE
        phase_of = {Kind.FORWARD: forward, **BACKWARDS}
        out: list[Run | Message] = [*runs.before(rank)]
        begun: set[int] = set()
        if any(runs.openings):
            out += self._once(GATHERS, stages)
            begun |= {*stages}
        for number, loop in enumerate(runs.openings):
            out += self._opening_actions(number, loop, rank)
        if 0 not in stages and not begun:  # a rank that waits for others first
            out += self._once(GATHERS, stages)
            begun |= {*stages}
        for action in runs.scheduled(rank):
            if isinstance(action, Message):
                out.append(action)
                continue
            kind, stage, microbatch = action
            phase = phase_of[kind]
            if phase == forward and stage not in begun:
                out += self._once(GATHERS, [stage])
                begun.add(stage)
                phase = FIRST[forward] if self.find(AtStage(FIRST[forward], stage)) is not None else forward
            if (half := self.find(AtStage(phase, stage))) is not None:
                out.append(Run(half, microbatch))
        for stage in stages if trains else ():  # the last terms are added in the graph that closes the step
            if (half := self.find(AtStage(LAST_BACKWARD, stage))) is not None:
                with_terms = [AtStage(phase, stage) for phase in (BACKWARD, WEIGHT_GRADIENTS)]
                runs_of = [(at, x) for at, x in enumerate(out) if isinstance(x, Run) and x.half.phase in with_terms]
                at, run = runs_of[-1]
                out[at] = replace(run, half=half)
        return [*out, *runs.behind(rank), *self._once(GRADIENTS if trains else CLOSING, stages), *runs.last(rank)]

    def _once(self, phase: str, stages: Iterable[int]) -> list[Run]:
        """Return a run of the graph of ``phase`` for each of ``stages`` that has such a graph."""
        halves = [self.find(AtStage(phase, stage)) for stage in stages]
        return [Run(half) for half in halves if half is not None]

    @property
    def trains(self) -> bool:
        """Return whether some parameter or input needs a gradient."""
        return self.find(FORWARD) is not None

    @property
    def forward(self) -> fx.GraphModule | None:
        """Return the forward graph of training, or None if nothing needs a gradient."""
        half = self.find(FORWARD)
        return None if half is None else half.gm

    @property
    def backward(self) -> fx.GraphModule | None:
        """Return the graph that computes the gradients, or None if nothing needs one."""
        half = self.find(BACKWARD)
        return None if half is None else half.gm

    @property
    def inference(self) -> fx.GraphModule:
        """Return the graph of a call without gradients."""
        return self.half(INFERENCE).gm

    def certificate(self, training: bool = True) -> Certificate:
        """Return the certificate of a training step, or of an inference: all collectives in order, and what the stages
        of a pipeline send each other.
        """
        certificate = certificate_of(self.step(training))
        if not self.stage_ranks:
            return certificate
        lines = self.stage_runs(training and self.trains).lines()
        return replace(certificate, lines=(*certificate.lines, *lines))


def certificate_of(halves: Sequence[Half]) -> Certificate:
    """Return the `Certificate` (all collectives, in order) of graphs that run one after the other."""
    return certify(halves[0].mesh, [(half.name, half.graph) for half in halves])
