"""`Step`: a second step that a page draws below the first. `answer` and `rows`: the numbers in which two schedules
differ, as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from shardc.report.export import Change, compare, record
from shardc.report.prediction import Prediction
from shardc.report.schedule_text import aligned
from shardc.report.units import duration, operations, percent, size

HEAD = ("number", "before", "after", "change")
ANSWERS = {"seconds": "step", "exposed": "exposed", "memory": "memory"}  # the metrics of the first line
# Metric -> function that writes its value with a unit.
UNITS: dict[str, Callable[[float], str]] = {
    "seconds": duration, "compute_seconds": duration, "exposed": duration, "wire": size, "memory": size, "mfu": percent,
    "flops": operations,
}  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """A span of a step on the page: its lane ("compute" or an axis), kind, name, and seconds since the step's start.

    Args:
        exposed: seconds at its end in which the rank waits for it.
    """

    lane: str
    kind: str
    name: str
    start: float
    end: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Table:
    """A table of text. The first column and the columns named in ``left`` are aligned left, all other columns right."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the table as text of at most 120 columns. If it would be wider, the cells of the columns ``left`` are
        cut.
        """
        return aligned(self.rows, self.head, left=(self.head[0], *self.left), cut=self.left)


@dataclass(frozen=True)
class Step:
    """A predicted step to be drawn below another one, on the same time axis.

    Args:
        title: title of its schedule.
        seconds: its duration.
        bars: its spans.
        tables: comparisons with the other step.
    """

    title: str
    seconds: float
    bars: tuple[Bar, ...]
    tables: tuple[Table, ...]

    def record(self) -> dict[str, object]:
        """Return the step's bars and tables as data for the HTML page, with times in microseconds."""
        bars = [
            {**asdict(bar), **{name: round(getattr(bar, name) * 1e6, 4) for name in ("start", "end", "exposed")}}
            for bar in self.bars
        ]
        tables = [asdict(table) for table in self.tables]
        return {"title": self.title, "us": round(self.seconds * 1e6, 4), "bars": bars, "tables": tables}


def step_of(schedule: Prediction, against: Prediction) -> Step:
    """Return ``schedule`` as a `Step` that a page draws below the schedule ``against``, with a table of the numbers
    that differ.
    """
    runs = [Bar("compute", schedule.phase_of(run), run.kernel.name, run.start, run.end) for run in schedule.runs]
    moved = [
        Bar(c.axis, c.kind, f"{c.kind} {c.cause.tensor}", c.start, c.end, c.exposed) for c in schedule.transfers
    ]  # fmt: skip
    differ = rows(compare(record(against), record(schedule)))
    head = ("number", "above", "beside", "change")
    return Step(schedule.title, schedule.seconds, (*runs, *moved), (Table("What differs", head, differ),))


def rows(changes: Iterable[Change]) -> list[tuple[str, ...]]:
    """Return (metric, before, after, change) as text, with units, for each of ``changes`` whose numbers differ."""
    return [
        (c.metric, _written(c.metric, c.before), _written(c.metric, c.after), _relative(c))
        for c in changes
        if c.before != c.after
    ]


def answer(changes: Sequence[Change]) -> str:
    """Return step time, exposed communication and memory of two schedules (``before -> after`` each), on one line.
    ``changes`` has the metrics of both.
    """
    metrics = {c.metric: c for c in changes}
    parts = []
    for name, title in ANSWERS.items():
        c = metrics[name]
        change = f" ({_relative(c)})" if c.before != c.after else ""
        parts.append(f"{title} {_written(name, c.before)} -> {_written(name, c.after)}{change}")
    return ", ".join(parts)


def _written(metric: str, value: float) -> str:
    """Return ``value``, a number of a schedule, as text in the unit of ``metric``."""
    return UNITS.get(metric.partition(".")[0], "{:,.0f}".format)(value).strip()


def _relative(change: Change) -> str:
    """Return a metric's change as text: in percent of its value before, or "new" if that was 0."""
    return f"{change.relative:+.1%}" if change.before else "new"
