"""`Played`: a pipeline's actions on all ranks with their predicted times, and the costs of its stages and ranks.

Each stage is predicted alone, for one microbatch, as any program: seconds of its forward and backward, and of what runs
once, in front of them and behind. `clock` plays the lists of all ranks with these seconds. Messages take the bytes of
their values over the link of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from shardc.cost.compute import Buffer, buffers
from shardc.cost.hardware import Hardware, price, route
from shardc.cost.step_sequence import Sequence, of_runs
from shardc.ir import graph as ir
from shardc.ir.executable import (
    BACKWARD,
    FIRST_FORWARD,
    FIRST_INFERENCE,
    FORWARD,
    INFERENCE,
    INPUT_GRADIENTS,
    LAST_BACKWARD,
    TRANSFER,
    WEIGHT_GRADIENTS,
    AtStage,
    Executable,
    Half,
    Run,
    opening,
)
from shardc.ir.graph import Value
from shardc.ir.mesh import Mesh
from shardc.ir.schedules import COMPUTATIONS, SENDS, Action, Kind, Timeline, clock, in_flight
from shardc.ir.stage_runs import Message, StageRuns
from shardc.report.predicted_memory import Memory
from shardc.report.predicted_schedule import Schedule

KINDS = {
    FORWARD: Kind.FORWARD,
    INFERENCE: Kind.FORWARD,
    FIRST_FORWARD: Kind.FORWARD,
    FIRST_INFERENCE: Kind.FORWARD,
    BACKWARD: Kind.BACKWARD,
    INPUT_GRADIENTS: Kind.BACKWARD_INPUT,
    WEIGHT_GRADIENTS: Kind.BACKWARD_WEIGHT,
    LAST_BACKWARD: Kind.BACKWARD,  # or the part of it for weights
}
# Names of the graphs of one stage in a report; the first and the last also run what runs once.
NAMES = {
    FIRST_FORWARD: "first", FIRST_INFERENCE: "first", FORWARD: "forward", INFERENCE: "forward", BACKWARD: "backward",
    INPUT_GRADIENTS: "for inputs", WEIGHT_GRADIENTS: "for weights", LAST_BACKWARD: "last",
}  # fmt: skip


@dataclass(frozen=True)
class StageCost:
    """The predicted costs of one pipeline stage on one rank that has it: seconds of its graphs and messages, and saved
    bytes.

    Args:
        stage, rank: its number, and its coordinate along the axis.
        seconds: name of a graph (`NAMES`) -> its seconds for one microbatch. "first" is a forward that also gathers
            parameters for all microbatches, "last" a backward, or its part for weights, that also closes the step.
        before, behind: seconds of what runs once, in front of the first microbatch (such as gathers for all) and
            behind the last.
        saved: bytes that a microbatch keeps between its forward and the end of its backward.
        up, down: seconds of the message of a microbatch to the next stage, and to the one before; 0 for none.
    """

    stage: int
    rank: int
    seconds: Mapping[str, float]
    before: float
    behind: float
    saved: int
    up: float
    down: float


@dataclass(frozen=True)
class RankCost:
    """Time and memory of one rank of a pipeline in a step.

    Args:
        rank: its coordinate along the axis.
        stages: its stages.
        busy: seconds in which it runs something.
        exposed: seconds in which it waits for a message that is on its way.
        collectives: seconds in which it waits for collectives and host copies, which count as busy.
        parameters: bytes of its parameters.
        in_flight: largest number of microbatches between forward and backward at once, over all of its stages.
        peak: bytes at the peak.
        peak_op: the op at the peak.
    """

    rank: int
    stages: tuple[int, ...]
    busy: float
    exposed: float
    collectives: float
    parameters: int
    in_flight: int
    peak: int
    peak_op: str


@dataclass(frozen=True)
class Parts:
    """Arguments for predicting a program with pipeline stages, besides the program: the mesh, the hardware, and
    functions that prepare graphs and predict their schedules.

    Args:
        mesh: the mesh of all stages.
        axis: its axis of the stages.
        hardware: the target of the prediction.
        build: (ops, position of an op -> seconds before which it does not run) -> predicted schedule.
        graph: maps a graph of the program to the one that is predicted.
        optimizer_copies: size of the optimizer's state as a multiple of the parameters.
    """

    mesh: Mesh
    axis: str
    hardware: Hardware
    build: Callable[[Sequence, Mapping[int, float]], Schedule]
    graph: Callable[[Half], Half]
    optimizer_copies: float


class _Runs(NamedTuple):
    """The runs of graphs of one rank: before, within and behind the computations of its schedule."""

    before: list[Run]
    within: list[Run]
    behind: list[Run]


class Played:
    """The schedule of a pipeline with predicted times: for each rank, its list of computations and messages.

    Attributes:
        stages: per stage, (prediction for one microbatch, number of runs in a step of each of its graphs).
        seconds: graph -> its seconds.
        timeline: start and end of all actions in the lists.
        times: for each rank, the seconds at which each of its graphs begins.
    """

    def __init__(self, program: Executable, parts: Parts, training: bool) -> None:
        self.program, self.parts, self.training = program, parts, training
        self.flow: StageRuns = program.stage_runs(training)
        self.actions = [program.actions(rank, training) for rank in range(program.stage_ranks)]
        self.seconds: dict[Half, float] = {}
        self.exposed: dict[Half, float] = {}
        self.saved: list[int] = []
        self.stages: list[tuple[Schedule, tuple[int, ...]]] = []
        for stage, rank in enumerate(self.flow.schedule.rank_of):
            self._predict_stage(stage, rank)
        self._play()

    def of_rank(self, rank: int) -> list[tuple[Half, int]]:
        """Return (graph, number of the microbatch) for each run of a graph on a rank, in order."""
        return [(self.parts.graph(x.half), x.microbatch) for x in self.actions[rank] if isinstance(x, Run)]

    def _predict_stage(self, stage: int, rank: int) -> None:
        """Predict the graphs of ``stage`` on ``rank`` in the order of one microbatch. Stores their seconds, exposed
        communication and saved bytes.
        """
        runs = [x.half for x in self.actions[rank] if isinstance(x, Run) and x.half.stage in (None, stage)]
        halves = list(dict.fromkeys(runs))
        step = of_runs([(self.parts.graph(half), 0) for half in halves], self.program.levels)
        schedule = self.parts.build(step, {})
        starts = [schedule.reached(at) for at in (*step.begins, len(step.ops))]
        self.seconds |= {half: end - start for half, (start, end) in zip(halves, pairwise(starts), strict=True)}
        for at, transfer in zip(step.starts, schedule.transfers, strict=True):
            half = halves[sum(begin <= at for begin in step.begins) - 1]
            self.exposed[half] = self.exposed.get(half, 0.0) + transfer.exposed
        self.saved.append(_saved(step, halves))
        self.stages.append((schedule, tuple(runs.count(half) for half in halves)))

    def _message(self, examples: Iterable[Value]) -> float:
        """Return the seconds of a message between stages that carries values like ``examples``; 0 if there are no
        values.
        """
        sent = sum(x.nbytes for x in examples)
        if not sent:
            return 0.0
        hardware, where = self.parts.hardware, route(self.parts.mesh, (self.parts.axis,), self.parts.hardware.node)
        return price(hardware, "permute_ranks", where, sent).seconds + hardware.start_seconds(1)

    def _transfer(self, source: int, target: int, flow: StageRuns | None = None) -> float:
        """Return the seconds of a microbatch's message from stage ``source`` to its neighbour ``target``. ``flow`` says
        what crosses the boundary; by default, that of the step.
        """
        boundary = (flow or self.flow).boundaries[min(source, target)]
        return self._message((boundary.up if source < target else boundary.down).values())

    def _after_openings(self, begins: list[float]) -> list[float]:
        """Return the seconds at which each rank has finished the loops before the forward: computations that all stages
        run first, such as a sum over microbatches that forwards need. Rank i begins them at ``begins[i]``.
        """
        for number, flow in enumerate(self.flow.openings):
            if flow is not None:
                halves = {half.stage: half for half in self.seconds if _phase(half) == opening(number)[0]}
                seconds = {
                    Action(Kind.FORWARD, stage, at): self.seconds[half]
                    for stage, half in halves.items()
                    if stage is not None
                    for at in range(flow.schedule.microbatches)
                }
                played = clock(flow.schedule, lambda *_: 0.0, partial(self._transfer, flow=flow), begins, seconds)
                begins = self._after_messages(_ends(played, begins), flow.behind)
        return begins

    def _play(self) -> None:
        """Compute and store the times of all ranks: of their lists of computations, and of what each rank runs before
        and after its list.
        """
        flow, runs = self.flow, [self._runs(rank) for rank in range(self.program.stage_ranks)]
        looped = {opening(at)[0] for at, loop in enumerate(flow.openings) if loop is not None}
        before = [self._total(of.before) for of in runs]
        unlooped = [self._total(x for x in of.before if _phase(x.half) not in looped) for of in runs]
        ready = self._after_messages([0.0] * len(runs), flow.before)
        begins = self._after_openings([start + once for start, once in zip(ready, unlooped, strict=True)])
        seconds = {
            action: sum(self.seconds[half] for half in halves)
            for rank, of in enumerate(runs)
            for action, halves in self._graphs_by_action(rank, of.within)
        }
        # A stage may have no graph for a part of its backward.
        played = clock(flow.schedule, lambda kind, stage: 0.0, self._transfer, begins, seconds)
        ends = self._after_messages(_ends(played, begins), flow.behind)
        closed = [end + self._total(of.behind) for end, of in zip(ends, runs, strict=True)]
        step = max(self._after_messages(closed, flow.last), default=0.0)
        once = tuple(
            tuple(span for span in ((begin - first, begin), (end, done)) if span[0] < span[1])
            for begin, first, end, done in zip(begins, before, ends, closed, strict=True)
        )
        self.timeline = Timeline(flow.schedule, played.spans, step, once)
        self.times: list[list[float]] = []
        for rank, of in enumerate(runs):
            starts = {action: start for action, start, _ in played.spans[rank]}
            groups = [(begins[rank] - before[rank], [x.half for x in of.before])]
            groups += [(starts[action], halves) for action, halves in self._graphs_by_action(rank, of.within)]
            groups.append((ends[rank], [x.half for x in of.behind]))
            self.times.append([at for start, halves in groups for at in self._begins_in_turn(start, halves)])

    def _graphs_by_action(self, rank: int, runs: Iterable[Run]) -> Iterator[tuple[Action, list[Half]]]:
        """Yield (computation in the schedule's list of the rank, graphs that the rank runs for it), in the order of
        ``runs``.

        The graphs are those that run once in front of the computation, such as gathers of a later stage, then its own.
        """
        listed = {action for action in self.flow.schedule.lists[rank] if action.kind in COMPUTATIONS}
        halves: list[Half] = []
        for x in runs:
            halves.append(x.half)
            if x.half.stage is not None and _is_listed(x.half):
                action = Action(KINDS[_phase(x.half)], x.half.stage, x.microbatch)
                yield action if action in listed else replace(action, kind=Kind.BACKWARD_WEIGHT), halves
                halves = []

    def _runs(self, rank: int) -> _Runs:
        """Return the rank's runs of graphs: those before, within and behind the computations of its schedule."""
        runs = [x for x in self.actions[rank] if isinstance(x, Run)]
        inside = [at for at, x in enumerate(runs) if x.half.stage is not None and _is_listed(x.half)]
        first, end = (inside[0], inside[-1] + 1) if inside else (len(runs), len(runs))
        return _Runs(runs[:first], runs[first:end], runs[end:])

    def _total(self, runs: Iterable[Run]) -> float:
        """Return the seconds of ``runs`` together."""
        return sum(self.seconds[x.half] for x in runs)

    def _begins_in_turn(self, start: float, halves: Iterable[Half]) -> Iterator[float]:
        """Yield the seconds at which each of ``halves`` (graphs) begins if they run one after another from
        ``start``.
        """
        for half in halves:
            yield start
            start += self.seconds[half]

    def _after_messages(self, now: list[float], messages: Callable[[int], Iterator[Message]]) -> list[float]:
        """Return the seconds at which each rank has received what the others send it. ``messages`` yields the messages
        of a rank; rank i sends its own at ``now[i]``.
        """
        free: dict[tuple[int, int], float] = {}
        done = list(now)
        for rank, start in enumerate(now):
            for message in messages(rank):
                if message.source == rank:
                    link = message.source, message.target
                    free[link] = max(free.get(link, 0.0), start) + self._message(message.examples)
                    done[message.target] = max(done[message.target], free[link])
        return done

    def costs(self) -> Iterator[StageCost]:
        """Yield the predicted costs of each pipeline stage, as a `StageCost`."""
        count = len(self.flow.schedule.rank_of)
        for stage, rank in enumerate(self.flow.schedule.rank_of):
            runs = self._runs(rank)
            seconds = {
                NAMES[_phase(half)]: x for half, x in self.seconds.items() if half.stage == stage and _is_listed(half)
            }
            yield StageCost(
                stage, rank, seconds,
                self._total(x for x in runs.before if x.half.stage in (None, stage)),
                self._total(x for x in runs.behind if x.half.stage in (None, stage)), self.saved[stage],
                self._transfer(stage, stage + 1) if stage + 1 < count else 0.0,
                self._transfer(stage, stage - 1) if stage else 0.0,
            )  # fmt: skip

    def rank_cost(self, rank: int, memory: Memory) -> RankCost:
        """Return the `RankCost` of a rank: its busy and exposed seconds, microbatches in flight, and bytes from
        ``memory``.
        """
        schedule, timeline = self.flow.schedule, self.timeline
        flight = max((sum(x.values()) for x in in_flight(schedule.lists[rank])), default=0)
        waits = sum(self.exposed.get(x.half, 0.0) for x in self.actions[rank] if isinstance(x, Run))
        return RankCost(
            rank, tuple(self.flow.stages(rank)), timeline.busy[rank], timeline.exposed[rank], waits,
            memory.by_owner()["parameters"], flight if self.training else 0, memory.peak.total, memory.peak_op,
        )  # fmt: skip


def _ends(timeline: Timeline, begins: list[float]) -> list[float]:
    """Return the seconds at which each rank ends its last action in ``timeline``, or ``begins`` it if it has none.
    Sends do not count: a rank goes on while its message is on the way.
    """
    rows = [[end for action, _, end in row if action.kind not in SENDS] for row in timeline.spans]
    return [row[-1] if row else begin for row, begin in zip(rows, begins, strict=True)]


def _is_listed(half: Half) -> bool:
    """Return whether a graph of a pipeline stage has an action of its own in a schedule's lists (forward or backward
    of a microbatch).
    """
    return _phase(half) in KINDS


def _phase(half: Half) -> str:
    """Return the phase that the graph ``half`` runs, such as "forward", without its pipeline stage."""
    return half.phase.phase if isinstance(half.phase, AtStage) else str(half.phase)


def _saved(step: Sequence, halves: list[Half]) -> int:
    """Return the bytes that a microbatch keeps from its forward for its backward. Unsharded parameters do not count."""
    first = next((at for at, half in enumerate(halves) if _phase(half) == FORWARD), None)
    if first is None or first + 1 == len(halves):
        return 0
    begin, end = step.begins[first], step.begins[first + 1]
    live: dict[int, Buffer] = {}
    for at, results in enumerate(buffers(step)[:end]):
        op = step.ops[at]
        role = ir.info(op.node).role if op.node.op == "placeholder" else None
        if at >= begin and not op.gathered and (op.node.op != "placeholder" or role and role.kind == TRANSFER):
            live |= {id(b): b for b in results if b is not None and b.allocated >= begin and b.last >= end}
    return sum(buffer.size for buffer in live.values())
