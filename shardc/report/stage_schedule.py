"""`PipelineSchedule`: the predicted step of a program with pipeline stages, which can be shown as text, HTML, JSON,
trace or picture.

A rank's memory follows the order in which it runs its list (`shardc.report.played_stages` has the times).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

from shardc.cost.compute import buffers, kernels
from shardc.cost.step_sequence import Sequence, of_runs
from shardc.ir.executable import Executable
from shardc.ir.schedules import Timeline
from shardc.report import export, page, schedule_text, stage_timeline
from shardc.report.beside import Step
from shardc.report.findings import Finding
from shardc.report.played_stages import NAMES, Parts, Played, RankCost, StageCost
from shardc.report.predicted_memory import Memory, memory_of
from shardc.report.predicted_schedule import Schedule
from shardc.report.prediction import Collective, Prediction
from shardc.report.units import duration, percent, size


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Schedule):
    """The predicted step of a program with pipeline stages.

    Kernels, collectives and memory are those of ``rank``, the rank that is busy longest, over all microbatches.
    ``seconds`` is the duration of the step over all ranks, and ``peak`` the bytes of the rank that needs most.

    Args:
        axis: the mesh axis of the stages.
        timeline: the times of all ranks.
        stages, ranks: the costs of each stage and of each rank.
        rank: the coordinate along ``axis`` of the rank that is shown.
        call: seconds of a run of all forwards before the step; 0 if there is none.
        runs_at: (seconds at its start, stage) of each graph that the rank runs; stage None is of no single one.
        by_stage: per stage, (prediction for one microbatch, number of runs in a step of each of its graphs).
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
        """Return the seconds that the shown rank waits for collectives, host copies and messages between stages."""
        return super().exposed + self.timeline.exposed[self.rank]

    @cached_property
    def by_node(self) -> dict[str, list[Collective]]:
        """Return node name in the global graph -> the collectives that come from it, in all stages. Their times are as
        if each stage ran its microbatches one after another.
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
        """Return the pipeline stage that a collective belongs to; None if the rank has one stage only."""
        if len(self.ranks[self.rank].stages) == 1:
            return None
        return [stage for begin, stage in self.runs_at if begin <= transfer.start][-1]

    def table(self, rows: int | None = 40) -> str:
        """Return the predicted step as text: its time, bubble and memory, a drawn line of time for each rank, tables
        of stages and ranks, and the tables of one rank.

        Args:
            rows: largest number of rows of the table of collectives, by exposed time; None for no limit.
        """
        return _table(self, rows)

    def to_json(self) -> str:
        numbers = {"axis": self.axis, "rank": self.rank, "schedule": self.timeline.schedule.name, "call": self.call}
        parts = {"stages": [asdict(x) for x in self.stages], "ranks": [asdict(x) for x in self.ranks]}
        rows = [[(str(x), start, end) for x, start, end in row] for row in self.timeline.spans]
        shown = {**numbers, "bubble": self.timeline.bubble, **parts, "actions": rows}
        return json.dumps({**export.record(self), "pipeline": shown}, indent=1) + "\n"

    def to_trace(self) -> str:
        """Return a Chrome trace as JSON: the computation of all ranks, and the kernels and collectives of the
        schedule's ``rank``.
        """
        return json.dumps(export.pipeline_trace(self, self.timeline, self.rank, self.axis)) + "\n"

    def to_html(self, findings: Iterable[Finding] = (), beside: Prediction | Step | None = None) -> str:
        """Return the step as an HTML page like that of `Schedule.to_html`, with the timeline of the pipeline on top."""
        return page.page(self, findings, stage_timeline.svg(self.timeline), beside)

    def plot(self, path: str | Path) -> None:
        """Write a picture of the timeline of all ranks (png, svg or pdf, by the suffix of ``path``)."""
        page.save(stage_timeline.draw(self.timeline), path)


def _table(schedule: PipelineSchedule, rows: int | None) -> str:
    """Return the predicted step with pipeline stages as text: duration, bubble and memory, a drawn timeline, tables of
    stages and ranks, and the tables of the shown rank.
    """
    step = stage_timeline.answer(schedule.timeline, schedule.call)
    _, *others = schedule_text.lines(schedule)  # without that of the step
    most = max(schedule.ranks, key=lambda rank: (rank.peak, -rank.rank))
    memory = schedule_text.memory_line(schedule, f"of rank {most.rank}, in {most.peak_op}")
    count = len(schedule.timeline.schedule.lists)
    parts = [
        "\n".join(stage_timeline.rows(schedule.timeline, schedule_text.WIDTH)),
        _stages(schedule),
        _ranks(schedule),
        f"rank {schedule.rank} of {schedule.axis} ({count}), the busiest, in all microbatches:",
        *schedule_text.of_rank(schedule, rows),
    ]
    return schedule_text.document(schedule, [*step, *others, memory], parts)


def _stages(schedule: PipelineSchedule) -> str:
    """Return the table of pipeline stages as text: seconds of one microbatch, of what runs once and of messages, and
    bytes saved. Consecutive stages with equal numbers share a row.
    """
    shown = [name for name in dict.fromkeys(NAMES.values()) if any(name in stage.seconds for stage in schedule.stages)]

    def cells(x: StageCost) -> tuple[str, ...]:
        seconds = (*(x.seconds.get(name, 0.0) for name in shown), x.up, x.down, x.before, x.behind)
        return *map(duration, seconds), size(x.saved)

    groups = [(row, [x.stage for x in of]) for row, of in groupby(schedule.stages, cells)]
    body = [(str(of[0]) if len(of) == 1 else f"{of[0]} to {of[-1]}", *row) for row, of in groups]
    head = ("stage", *shown, "sends up", "sends down", "before", "behind", "saves")
    return schedule_text.aligned(body, head, left=("stage",))


def _ranks(schedule: PipelineSchedule) -> str:
    """Return the table of a pipeline's ranks as text: for each, its shares of the step's time and its memory."""
    seconds = schedule.timeline.seconds or 1.0
    body = []
    for x in schedule.ranks:
        saved = " + ".join(dict.fromkeys(size(schedule.stages[stage].saved) for stage in x.stages))
        first, *others = map(str, x.stages)
        stages = ", ".join([first, "...", others[-1]] if len(others) > 2 else [first, *others])
        body.append((
            str(x.rank), stages, percent(x.busy / seconds), percent(x.collectives / seconds),
            percent(x.exposed / seconds), size(x.parameters), f"{x.in_flight} x {saved}", size(x.peak),
            size(schedule.hardware.memory - x.peak),
        ))  # fmt: skip
    head = (
        "rank", "stages", "busy", "collectives", "for messages", "parameters", "in flight x saved", "peak", "free"
    )  # fmt: skip
    return schedule_text.aligned(body, head, left=("rank", "stages"))


def predict(program: Executable, parts: Parts) -> PipelineSchedule:
    """Return the predicted step of a program with pipeline stages. ``parts`` has what the prediction needs besides the
    program.
    """
    played = Played(program, parts, program.trains)
    # Without a loss, the call runs forward alone, and the backward runs all again.
    call = Played(program, parts, False).timeline.seconds if program.trains and program.loss is None else 0.0
    sequences = [of_runs(played.of_rank(rank), program.levels) for rank in range(program.stage_ranks)]
    shown = max(range(program.stage_ranks), key=lambda rank: (played.timeline.busy[rank], -rank))
    memories = [_memory(step, parts.optimizer_copies) for step in sequences]
    begins = dict(zip(sequences[shown].begins, played.times[shown], strict=True))
    schedule = parts.build(sequences[shown], begins)
    shared = {x.name: getattr(schedule, x.name) for x in fields(schedule)}
    stages_run = [half.stage for half, _ in played.of_rank(shown)]
    notes = () if not call else (
        "the model returns no loss, so forward runs in the call, and again in the backward: "
        f"the step has {duration(call)} for that, which is not drawn",
    )  # fmt: skip
    return PipelineSchedule(
        **{**shared, "seconds": played.timeline.seconds + call, "notes": (*schedule.notes, *notes)},
        axis=parts.axis, timeline=played.timeline, stages=tuple(played.costs()), rank=shown, call=call,
        ranks=tuple(played.rank_cost(rank, memory) for rank, memory in enumerate(memories)),
        runs_at=tuple(zip(played.times[shown], stages_run, strict=True)), by_stage=tuple(played.stages),
    )  # fmt: skip


def _memory(step: Sequence, optimizer_copies: float) -> Memory:
    """Return the memory of a rank that runs the ops ``step``. ``optimizer_copies`` is the size of the optimizer state
    as a multiple of the parameters.
    """
    outputs = buffers(step)
    return memory_of(step, outputs, kernels(step, outputs), optimizer_copies)
