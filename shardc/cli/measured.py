"""A measured step beside its prediction (`Comparison`): collectives in pairs, phases, and why overlap was lost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardc.cost.compute import layers_of
from shardc.ir.comm_volume import wire_elements
from shardc.report.beside import Bar, Step, Table
from shardc.report.export import waits_of
from shardc.report.prediction import HOST, Collective, Prediction, grouped
from shardc.report.units import duration, size
from shardc.runtime.profile import Profiled, Ran

LEAST = 0.01  # share of the step from which exposed time counts as lost overlap
_GAP = 0.002  # share of the step from which a wait is drawn as a gap of compute


@dataclass(frozen=True)
class Pair:
    """A predicted collective and the collective that ran in its place, with bytes, seconds and exposed seconds of both.

    Args:
        kind, axis, tensor, phase: kind, mesh axis, tensor and phase of the predicted collective.
        ran: the kind that ran.
        predicted_bytes: bytes that a rank sends, as predicted.
        bytes: bytes that this rank sent; None if the profiler does not report them.
        predicted_seconds, seconds: time from start to end, predicted and measured.
        predicted_exposed, exposed: seconds of the call and of waits, predicted and measured; measured is None if the
            step did not wait as often as predicted, so that waits cannot be assigned to collectives.
        call, late, wire, beside: the causes of its exposed time beyond the prediction, in seconds each: the call takes
            longer; another rank starts later; the transfer takes longer; less compute runs between its call and its
                first
            wait. A negative cause shortens the exposed time.
    """

    kind: str
    axis: str
    tensor: str
    phase: str
    ran: str
    predicted_bytes: int
    bytes: int | None
    predicted_seconds: float
    seconds: float
    predicted_exposed: float
    exposed: float | None = None
    call: float = 0.0
    late: float = 0.0
    wire: float = 0.0
    beside: float = 0.0


@dataclass(frozen=True)
class Phase:
    """The duration of the forward or backward of a step, and its exposed communication.

    Args:
        name: "forward" or "backward".
        predicted, seconds: its duration in seconds, predicted and measured.
        predicted_exposed, exposed: seconds of calls and waits of collectives, predicted and measured.
    """

    name: str
    predicted: float
    seconds: float
    predicted_exposed: float
    exposed: float


@dataclass(frozen=True)
class Comparison:
    """One step as predicted and as measured on rank 0: seconds, memory, collectives and phases.

    Args:
        plan: the plan, as text.
        pairs: the collectives, in order.
        counts: number of collectives (predicted, measured).
        seconds: step time (predicted, median of the timed steps).
        timed: time of each step on its slowest rank.
        exposed: seconds (predicted; measured in calls and waits of collectives, with the profiler on).
        memory: bytes at the peak (predicted, measured).
        phases: forward and backward.
    """

    plan: str
    pairs: tuple[Pair, ...]
    counts: tuple[int, int]
    seconds: tuple[float, float]
    timed: tuple[float, ...]
    exposed: tuple[float, float]
    memory: tuple[int, int]
    phases: tuple[Phase, ...] = ()

    def tables(self) -> list[Table]:
        """Return the tables to print: of the step, of phases, of collectives, and of lost overlap."""
        sent, counted = self.bytes
        rows = [
            ("collectives", str(self.counts[0]), str(self.counts[1]), off(*self.counts)),
            ("bytes sent", str(sent), "-" if counted is None else str(counted), off(sent, counted)),
            ("time", *map(duration, self.seconds), off(*self.seconds)),
            ("exposed", *map(duration, self.exposed), off(*self.exposed)),
            ("peak", *map(size, self.memory), off(*self.memory)),
        ]
        of_step = Table("Step", ("step", "predicted", "measured", "off by"), rows)
        pairs, measured = self.pairs, self.seconds[1]
        return [of_step, phase_table(self.phases), collective_table(pairs), lost_table(pairs, measured)]

    @property
    def bytes(self) -> tuple[int, int | None]:
        """Return (predicted, measured) bytes that the rank sent. The measured number is None if that of a collective
        was not reported.
        """
        counted = [pair.bytes for pair in self.pairs if pair.bytes is not None]
        complete = len(counted) == len(self.pairs)
        return sum(p.predicted_bytes for p in self.pairs), sum(counted) if complete else None

    @property
    def noise(self) -> float:
        """Return the uncertainty of the median in seconds: half of its notch (McGill, Tukey and Larsen, 1978). It is
        inf with fewer than two timed steps.
        """
        if len(self.timed) < 2:
            return float("inf")
        low, _, high = statistics.quantiles(self.timed, n=4)
        return 1.57 * (high - low) / len(self.timed) ** 0.5


def pairs_of(schedule: Prediction, seen: Profiled, latest: Sequence[float]) -> tuple[Pair, ...]:
    """Return a `Pair` for each collective of ``schedule``: its prediction beside the collective that ran in its place
    in the profile ``seen``. Pairs are in the order of the step.

    Args:
        seen: the profile of a step of this rank.
        latest: seconds at which the last rank starts each collective, by this rank's clock.
    """
    waits = waits_of(schedule.step)
    matches = len(waits) == len(seen.waits)  # else waits cannot be told apart
    clock = (*schedule.clock, schedule.seconds)
    positions = (at for at, c in zip(schedule.step.starts, schedule.transfers, strict=True) if c.axis != HOST)
    out = []
    for at, c, ran, last in zip(positions, schedule.collectives, seen.collectives, latest, strict=False):
        pair = _pair(c, ran)
        if matches:
            mine = [(clock[wait], *span) for (wait, start), span in zip(waits, seen.waits, strict=True) if start == at]
            due, waited, _ = mine[0] if mine else (schedule.seconds, ran.end, 0.0)
            late = max(last - ran.start, 0.0)
            pair = replace(
                pair, exposed=ran.called + sum(end - start for _, start, end in mine), late=late,
                call=ran.called - (clock[at + 1] - clock[at]), wire=ran.end - ran.start - late - (c.end - clock[at]),
                beside=due - clock[at] - (waited - ran.start),
            )  # fmt: skip
        out.append(pair)
    return tuple(out)


def _pair(c: Collective, ran: Ran) -> Pair:
    """Return the `Pair` (predicted and measured numbers) of a collective; the fields that depend on its waits are
    left at their defaults.
    """
    counted = ran.sent
    if counted is None and ran.payload is not None:
        elements, nbytes = ran.payload
        counted = wire_elements(ran.kind, c.ranks, elements) * nbytes
    return Pair(
        c.kind, c.axis, c.cause.tensor, c.phase, ran.kind, c.wire, counted, c.seconds, ran.end - ran.start, c.exposed
    )


def phases_of(schedule: Prediction, seen: Profiled) -> tuple[Phase, ...]:
    """Return a `Phase`, predicted and measured, for forward and for backward; the runs of microbatches are added up.

    Args:
        schedule: the prediction.
        seen: the profile of a step of this rank.
    """
    gaps = [*seen.waits, *((ran.start, ran.start + ran.called) for ran in seen.collectives)]
    out = []
    for name, ranges in grouped(seen.ranges, lambda span: span[0].split()[-1]).items():
        exposed = sum(c.exposed for c in schedule.transfers if c.phase == name)
        computed = sum(run.seconds for run in schedule.runs if run.kernel.phase == name)
        inside = sum(
            end - start for start, end in gaps for _, begin, close in ranges if begin <= start and end <= close
        )  # fmt: skip
        out.append(Phase(name, computed + exposed, sum(end - start for _, start, end in ranges), exposed, inside))
    return tuple(out)


def off(predicted: float, measured: float | None) -> str:
    """Return the relative error of a prediction as text; "-" if nothing was measured."""
    return f"{predicted / measured - 1:+.1%}" if measured else "-"


def phase_table(phases: Sequence[Phase]) -> Table:
    """Return the table of phases: compute and exposed communication, predicted and measured."""
    rows = []
    for p in phases:
        computes, computed = p.predicted - p.predicted_exposed, p.seconds - p.exposed
        exposed = p.predicted_exposed, p.exposed
        rows += [
            (f"{p.name}, compute", duration(computes), duration(computed), off(computes, computed)),
            (f"{p.name}, exposed", *map(duration, exposed), off(*exposed)),
        ]
    return Table("Phases", ("phase", "predicted", "measured", "off by"), rows)


def collective_table(pairs: Sequence[Pair]) -> Table:
    """Return the table of collectives, predicted and measured. Equal collectives of repeated layers share one row."""
    rows = []
    for (kind, axis, ran), of in _by_layer_pattern(pairs, lambda p: (p.kind, p.axis, p.ran)):
        sent, counted = (sum(p.predicted_bytes for p in of)), [p.bytes for p in of if p.bytes is not None]
        unequal = f", counted {size(sum(counted))}" if len(counted) == len(of) and sum(counted) != sent else ""
        exposed = [p.exposed for p in of if p.exposed is not None]
        rows.append((
            kind if kind == ran else f"{kind}, ran {ran}", axis, _tensor(of), str(len(of)), size(sent) + unequal,
            duration(sum(p.predicted_seconds for p in of)), duration(sum(p.seconds for p in of)),
            duration(sum(p.predicted_exposed for p in of)), duration(sum(exposed)) if len(exposed) == len(of) else "-",
        ))  # fmt: skip
    columns = "count", "sent", "time predicted", "measured", "exposed predicted", "measured"
    return Table("Collectives", ("collective", "axis", "tensor", *columns), rows, ("tensor", "axis"))


def _by_layer_pattern(
    pairs: Sequence[Pair], key: Callable[[Pair], tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], list[Pair]]]:
    """Yield groups of pairs as (key, pairs). The pairs of a group have equal keys, and their tensors differ only in a
    layer's number.
    """
    for (group_key, _), of in grouped(pairs, lambda p: (key(p), layers_of(p.tensor))).items():
        yield group_key, of


def _tensor(pairs: Sequence[Pair]) -> str:
    """Return the name of the tensor of ``pairs``. If they are of several repeated layers, ``*`` stands for the layer's
    number.
    """
    return pairs[0].tensor if len(pairs) == 1 else layers_of(pairs[0].tensor)


def lost_table(pairs: Sequence[Pair], seconds: float) -> Table:
    """Return the table of collectives that were exposed for longer than predicted, each with the cause that lost the
    most time.

    Args:
        seconds: duration of the step; collectives that lose less than the share `LEAST` of it are left out.
    """
    rows: list[tuple[float, tuple[str, ...]]] = []
    for (kind, axis), of in _by_layer_pattern([p for p in pairs if p.exposed is not None], lambda p: (p.kind, p.axis)):
        lost = sum((p.exposed or 0.0) - p.predicted_exposed for p in of)
        if lost < LEAST * seconds:
            continue
        causes = {
            "its call takes {} more than predicted": sum(p.call for p in of),
            "another rank starts it {} later": sum(p.late for p in of),
            "it is on its way for {} more": sum(p.wire for p in of),
            "{} less compute between call and wait": sum(p.beside for p in of),
        }
        cause = max(causes, key=lambda cause: causes[cause])
        text = cause.format(duration(causes[cause])) if causes[cause] > 0 else "-"
        rows.append((lost, (f"{kind}({axis})", _tensor(of), str(len(of)), duration(lost), text)))
    rows.sort(key=lambda row: -row[0])
    head = ("collective", "tensor", "count", "lost", "because")
    return Table("Lost overlap", head, [row for _, row in rows], ("tensor", "because"))


def step_of(schedule: Prediction, seen: Profiled, tables: Sequence[Table], title: str) -> Step:
    """Return a profiled step for the page that shows it below its prediction.

    Args:
        schedule: the prediction, which has the names of the collectives.
        seen: the profile.
        tables, title: the tables below the step, and its heading.
    """
    moved = [
        Bar(c.axis, ran.kind, f"{ran.kind} {c.cause.tensor}", ran.start, ran.end)
        for c, ran in zip(schedule.collectives, seen.collectives, strict=False)
    ]
    gaps = [*seen.waits, *((ran.start, ran.start + ran.called) for ran in seen.collectives)]
    long = sorted((start, end) for start, end in gaps if end - start > _GAP * seen.seconds)
    runs = [bar for name, begin, end in seen.ranges for bar in _between(name, begin, end, long)]
    return Step(title, seen.seconds, (*runs, *moved), tuple(tables))


def _between(name: str, begin: float, end: float, gaps: Sequence[tuple[float, float]]) -> list[Bar]:
    """Return the bars of compute between the seconds ``begin`` and ``end``. The ``gaps`` (start, end), in which calls
    and waits ran, are left out.
    """
    out = []
    for start, close in [*(gap for gap in gaps if begin <= gap[0] < end), (end, end)]:
        if start > begin:
            out.append(Bar("compute", name.split()[-1], name, begin, start))
        begin = max(begin, close)
    return out
