"""`PipelineSchedule`: the predicted step of a program with pipeline stages.

Each stage is predicted alone, for one microbatch, as any program: seconds of its forward and backward, and of what runs
once, in front of them and behind. `clock` plays the lists of all ranks with these seconds. Messages take the bytes of
their values over the link of the axis. A rank's memory follows the order in which it runs its list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from shardc.cost.compute import Buffer, buffers, kernels
from shardc.cost.hardware import Hardware, price, route
from shardc.cost.step_sequence import Sequence, of_runs
from shardc.ir import graph as ir
from shardc.ir.executable import (
    BACKWARD,
    FORWARD,
    INFERENCE,
    INPUT_GRADIENTS,
    TRANSFER,
    WEIGHT_GRADIENTS,
    AtStage,
    Executable,
    Half,
    Run,
)
from shardc.ir.mesh import Mesh
from shardc.ir.schedules import Kind, Timeline, clock, in_flight
from shardc.ir.stage_runs import Message, StageRuns
from shardc.report import export, page, pipeline, schedule_text
from shardc.report.predicted_schedule import Schedule
from shardc.report.prediction import Collective, Memory, memory_of

KINDS = {
    FORWARD: Kind.FORWARD,
    INFERENCE: Kind.FORWARD,
    BACKWARD: Kind.BACKWARD,
    INPUT_GRADIENTS: Kind.BACKWARD_INPUT,
    WEIGHT_GRADIENTS: Kind.BACKWARD_WEIGHT,
}


@dataclass(frozen=True)
class StageCost:
    """The predicted costs of one stage of a pipeline, on each of its ranks.

    Args:
        stage, rank: its number, and its coordinate along the axis.
        seconds: short name of a computation ("F", "B", "I", "W") -> its seconds for one microbatch.
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
    """What one rank of a pipeline does in a step, and needs.

    Args:
        rank: its coordinate along the axis.
        stages: its stages.
        busy: seconds in which it runs something.
        exposed: seconds in which it waits for a message that is on its way.
        collectives: seconds in which it waits for collectives and host copies, which count as busy.
        parameters: bytes of its parameters.
        in_flight: the most microbatches whose forward has run and whose backward has not, over all of its stages.
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


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Schedule):
    """The predicted step of a program with pipeline stages.

    What a `Schedule` has of one rank, such as its kernels, collectives and memory, is of ``rank``, the one that is busy
    longest, in all microbatches. ``seconds`` are of the step of all ranks, and ``peak`` is of the rank that needs most.

    Args:
        axis: the mesh axis of the stages.
        timeline: the times of all ranks.
        stages, ranks: the costs of each stage and of each rank.
        rank: the coordinate along ``axis`` of the rank that is shown.
        call: seconds of a run of all forwards that the step has in front; 0 if there is none.
        runs_at: (seconds, stage) of each graph that the rank runs.
        by_stage: of each stage, its prediction for one microbatch, and how often each of its graphs runs in a step.
    """

    axis: str
    timeline: Timeline = field(repr=False)
    stages: tuple[StageCost, ...]
    ranks: tuple[RankCost, ...]
    rank: int
    call: float
    runs_at: tuple[tuple[float, int | None], ...] = field(repr=False)
    by_stage: tuple[tuple[Schedule, tuple[int, ...]], ...] = field(repr=False)

    __repr__ = Schedule.__repr__

    @property
    def peak(self) -> int:
        return max(rank.peak for rank in self.ranks)

    @property
    def exposed(self) -> float:
        """Return the seconds that the rank waits for collectives, host copies and messages that are on their way."""
        return super().exposed + self.timeline.exposed[self.rank]

    @cached_property
    def by_node(self) -> dict[str, list[Collective]]:
        """Return node name in the global graph -> its collectives in all stages, as if each ran its microbatches in
        turn.
        """
        out: dict[str, list[Collective]] = {}
        for schedule, counts in self.by_stage:
            for at, transfer in zip(schedule.step.starts, schedule.transfers, strict=True):
                run = sum(begin <= at for begin in schedule.step.begins) - 1
                moments = [transfer.start + number * schedule.seconds for number in range(counts[run])]
                rows = [replace(transfer, start=start, end=start + transfer.seconds) for start in moments]
                out.setdefault(transfer.name.rpartition(".")[0], []).extend(rows)
        return out

    def stage_of(self, transfer: Collective) -> int | None:
        """Return the stage of a collective; None if the rank has one stage only."""
        if len(self.ranks[self.rank].stages) == 1:
            return None
        return [stage for begin, stage in self.runs_at if begin <= transfer.start][-1]

    def table(self, rows: int | None = 40) -> str:
        """Return the step, its bubble and memory, the drawn rows of all ranks, the tables of stages and ranks, and
        those of one rank.

        Args:
            rows: largest number of rows of the table of collectives, by exposed time; None for no limit.
        """
        return schedule_text.pipeline_table(self, rows)

    def to_json(self) -> str:
        numbers = {"axis": self.axis, "rank": self.rank, "schedule": self.timeline.schedule.name, "call": self.call}
        parts = {"stages": [asdict(x) for x in self.stages], "ranks": [asdict(x) for x in self.ranks]}
        rows = [[(str(x), start, end) for x, start, end in row] for row in self.timeline.spans]
        shown = {**numbers, "bubble": self.timeline.bubble, **parts, "actions": rows}
        return json.dumps({**export.record(self), "pipeline": shown}, indent=1) + "\n"

    def to_trace(self) -> str:
        """Return a Chrome trace as JSON: what all ranks compute, and kernels and collectives of the rank shown."""
        return json.dumps(export.pipeline_trace(self, self.timeline, self.rank, self.axis)) + "\n"

    def to_html(self) -> str:
        """Return a page as `Schedule.to_html`, with the pipeline on top."""
        return page.page(self, pipeline.svg(self.timeline))

    def plot(self, path: str | Path) -> None:
        """Write a picture of the timeline of all ranks (png, svg or pdf, by the suffix of ``path``)."""
        page.save(pipeline.draw(self.timeline), path)


@dataclass(frozen=True)
class Parts:
    """What a prediction of a program with stages takes beside the program.

    Args:
        mesh: the mesh of all stages.
        axis: its axis of the stages.
        hardware: the target of the prediction.
        build: predicts ops, given with the seconds before which some of them do not run.
        graph: maps a graph of the program to the one that is predicted.
        optimizer_copies: size of the optimizer's state as a multiple of the parameters.
    """

    mesh: Mesh
    axis: str
    hardware: Hardware
    build: Callable[[Sequence, Mapping[int, float]], Schedule]
    graph: Callable[[Half], Half]
    optimizer_copies: float


def predict(program: Executable, parts: Parts) -> PipelineSchedule:
    """Return the predicted step of a program with stages."""
    played = _Played(program, parts, program.trains)
    # Without a loss, the call runs forward alone, and the backward runs all again.
    call = _Played(program, parts, False).timeline.seconds if program.trains and program.loss is None else 0.0
    sequences = [of_runs(played.of_rank(rank), program.levels) for rank in range(program.stage_ranks)]
    shown = max(range(program.stage_ranks), key=lambda rank: (played.timeline.busy[rank], -rank))
    memories = [_memory(step, parts.optimizer_copies) for step in sequences]
    begins = dict(zip(sequences[shown].begins, played.times[shown], strict=True))
    schedule = parts.build(sequences[shown], begins)
    shared = {x.name: getattr(schedule, x.name) for x in fields(schedule)}
    stages_run = [half.stage for half, _ in played.of_rank(shown)]
    notes = () if not call else (
        "the model returns no loss, so forward runs in the call, and again in the backward: "
        f"the step has {call:.4g} s for that, which are not drawn",
    )  # fmt: skip
    return PipelineSchedule(
        **{**shared, "seconds": played.timeline.seconds + call, "notes": (*schedule.notes, *notes)},
        axis=parts.axis, timeline=played.timeline, stages=tuple(played.costs()), rank=shown, call=call,
        ranks=tuple(played.rank_cost(rank, memory) for rank, memory in enumerate(memories)),
        runs_at=tuple(zip(played.times[shown], stages_run, strict=True)), by_stage=tuple(played.stages),
    )  # fmt: skip


def _memory(step: Sequence, optimizer_copies: float) -> Memory:
    """Return the memory of a rank."""
    outputs = buffers(step)
    return memory_of(step, outputs, kernels(step, outputs), optimizer_copies)


class _Played:
    """The lists of all ranks with their times.

    Attributes:
        stages: of each stage, its prediction for one microbatch, and how often each of its graphs runs in a step.
        seconds: graph -> its seconds.
        timeline: the times of the lists.
        times: for each rank, when each of its runs begins.
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
        """Return the graphs that a rank runs, in order, each with the number of its microbatch."""
        return [(self.parts.graph(x.half), x.microbatch) for x in self.actions[rank] if isinstance(x, Run)]

    def _predict_stage(self, stage: int, rank: int) -> None:
        """Predict the graphs of a stage, in the order in which they run for one microbatch."""
        runs = [x.half for x in self.actions[rank] if isinstance(x, Run) and x.half.stage in (None, stage)]
        halves = list(dict.fromkeys(runs))
        step = of_runs([(self.parts.graph(half), 0) for half in halves], self.program.levels)
        schedule = self.parts.build(step, {})
        ends = [*(schedule.clock[at] if at < len(step.ops) else schedule.seconds for at in step.begins[1:])]
        start = 0.0
        for half, end in zip(halves, [*ends, schedule.seconds], strict=True):
            self.seconds[half], start = end - start, end
        for at, transfer in zip(step.starts, schedule.transfers, strict=True):
            half = halves[sum(begin <= at for begin in step.begins) - 1]
            self.exposed[half] = self.exposed.get(half, 0.0) + transfer.exposed
        self.saved.append(_saved(step, halves))
        self.stages.append((schedule, tuple(runs.count(half) for half in halves)))

    def _of(self, kind: Kind, stage: int) -> float:
        """Return the seconds of a computation of a stage; 0 if it computes nothing."""
        names = [name for name, named in KINDS.items() if named == kind]
        halves = (half for half in self.seconds if half.stage == stage and _name(half) in names)
        return next((self.seconds[half] for half in halves), 0.0)

    def _message(self, examples: Iterable[object]) -> float:
        """Return the seconds of a message with values like ``examples``; 0 if there are none."""
        sent = sum(x.numel() * x.dtype.itemsize for x in examples)  # type: ignore[attr-defined]
        if not sent:
            return 0.0
        hardware, where = self.parts.hardware, route(self.parts.mesh, (self.parts.axis,), self.parts.hardware.node)
        return price(hardware, "permute_ranks", where, sent).seconds + hardware.start_seconds(1)

    def _transfer(self, source: int, target: int) -> float:
        """Return the seconds of the message of one microbatch from a stage to another."""
        boundary = self.flow.boundaries[min(source, target)]
        return self._message((boundary.up if source < target else boundary.down).values())

    def _play(self) -> None:
        """Time all lists, with what is in front of them and behind."""
        flow, lists = self.flow, [self._in_parts(rank) for rank in range(self.program.stage_ranks)]
        before = [sum(self.seconds[x.half] for x in first) for first, _, _ in lists]
        begins = [
            start + once for start, once in zip(self._exchanged([0.0] * len(lists), flow.before), before, strict=True)
        ]
        played = clock(flow.schedule, self._of, self._transfer, begins)
        ends = self._exchanged([row[-1][2] if row else begins[at] for at, row in enumerate(_own(played))], flow.behind)
        closed = [end + sum(self.seconds[x.half] for x in last) for end, (_, _, last) in zip(ends, lists, strict=True)]
        step = max(self._exchanged(closed, flow.last), default=0.0)
        once = tuple(
            tuple(span for span in ((begin - first, begin), (end, done)) if span[0] < span[1])
            for begin, first, end, done in zip(begins, before, ends, closed, strict=True)
        )
        self.timeline = Timeline(flow.schedule, played.spans, step, once)
        self.times: list[list[float]] = []
        for rank, (first, middle, last) in enumerate(lists):
            starts = {(action.kind, action.stage, action.microbatch): start for action, start, _ in played.spans[rank]}
            times = [
                *self._one_after_another(begins[rank] - before[rank], first),
                *(starts[KINDS[_name(x.half)], x.half.stage or 0, x.microbatch] for x in middle),
                *self._one_after_another(ends[rank], last),
            ]
            self.times.append(times)

    def _in_parts(self, rank: int) -> tuple[list[Run], list[Run], list[Run]]:
        """Return the runs of a rank in front of its list, in it, and behind it."""
        runs = [x for x in self.actions[rank] if isinstance(x, Run)]
        inside = [at for at, x in enumerate(runs) if _name(x.half) in KINDS and x.half.stage is not None]
        first, end = (inside[0], inside[-1] + 1) if inside else (len(runs), len(runs))
        return runs[:first], runs[first:end], runs[end:]

    def _one_after_another(self, start: float, runs: Iterable[Run]) -> Iterator[float]:
        """Yield when each of ``runs`` begins, the first at ``start``."""
        for x in runs:
            yield start
            start += self.seconds[x.half]

    def _exchanged(self, now: list[float], messages: Callable[[int], Iterator[Message]]) -> list[float]:
        """Return when each rank has the messages that it gets, if it sends its own at ``now``."""
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
        """Yield the costs of each stage."""
        count = len(self.flow.schedule.rank_of)
        for stage, rank in enumerate(self.flow.schedule.rank_of):
            first, _, last = self._in_parts(rank)
            kinds = [kind for kind in dict.fromkeys(KINDS.values()) if self._of(kind, stage)]
            yield StageCost(
                stage, rank, {kind.value: self._of(kind, stage) for kind in kinds},
                sum(self.seconds[x.half] for x in first if x.half.stage in (None, stage)),
                sum(self.seconds[x.half] for x in last if x.half.stage in (None, stage)), self.saved[stage],
                self._transfer(stage, stage + 1) if stage + 1 < count else 0.0,
                self._transfer(stage, stage - 1) if stage else 0.0,
            )  # fmt: skip

    def rank_cost(self, rank: int, memory: Memory) -> RankCost:
        """Return the costs of a rank, given its memory."""
        schedule, timeline = self.flow.schedule, self.timeline
        flight = max((sum(x.values()) for x in in_flight(schedule.lists[rank])), default=0)
        waits = sum(self.exposed.get(x.half, 0.0) for x in self.actions[rank] if isinstance(x, Run))
        return RankCost(
            rank, tuple(self.flow.stages(rank)), timeline.busy[rank], timeline.exposed[rank], waits,
            memory.by_owner()["parameters"], flight if self.training else 0, memory.peak.total, memory.peak_op,
        )  # fmt: skip


def _own(timeline: Timeline) -> list[list[tuple[object, float, float]]]:
    """Return the rows of a timeline without sends, which a rank does not wait for."""
    sends = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    return [[x for x in row if x[0].kind not in sends] for row in timeline.spans]


def _name(half: Half) -> str:
    """Return the phase of a graph, without its stage."""
    return half.phase.phase if isinstance(half.phase, AtStage) else str(half.phase)


def _saved(step: Sequence, halves: list[Half]) -> int:
    """Return the bytes that a microbatch keeps from its forward for its backward, without parameters."""
    first = next((at for at, half in enumerate(halves) if _name(half) == FORWARD), None)
    if first is None or first + 1 == len(halves):
        return 0
    begin, end = step.begins[first], step.begins[first + 1]
    kept: dict[int, Buffer] = {}
    for at, results in enumerate(buffers(step)[:end]):
        op = step.ops[at]
        role = ir.info(op.node).role if op.node.op == "placeholder" else None
        if at >= begin and not op.gathered and (op.node.op != "placeholder" or role and role.kind == TRANSFER):
            kept |= {id(b): b for b in results if b is not None and b.allocated >= begin and b.last >= end}
    return sum(buffer.size for buffer in kept.values())
