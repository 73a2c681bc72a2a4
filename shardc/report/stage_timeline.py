"""The timeline of a pipeline step as text (`rows`) and as a matplotlib figure (`draw`): a row for each rank."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from shardc.ir.schedules import COMPUTATIONS, Action, Kind, Timeline
from shardc.report.page import EXPOSED, figure, legend, time_unit
from shardc.report.units import duration, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward for inputs",
    Kind.BACKWARD_WEIGHT: "backward for weights",
}
_COLOURS = {
    Kind.FORWARD: "#74a9d8",
    Kind.BACKWARD: "#f2a65a",
    Kind.BACKWARD_INPUT: "#7fc08a",
    Kind.BACKWARD_WEIGHT: "#c9a0dc",
}
_WAITS, _MOVES, _ONCE = ".", "~", "="
_ONCE_NAME, _ONCE_COLOUR = "runs once", "#8d99ae"


def rows(timeline: Timeline, width: int = 120) -> list[str]:
    """Return a pipeline's timeline as lines of text: a line for each rank, an axis of time, and a key.

    In a row, a letter stands where a computation starts, and its microbatch follows.

    Args:
        width: columns of the rows, 20 or more; what is shorter than a column is left out.
    """
    schedule = timeline.schedule
    labels = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = max(map(len, labels)) + 2
    columns = max(width - margin, 1)
    lines = [_row(timeline, rank, columns) for rank in range(schedule.ranks)]
    end = duration(timeline.seconds)
    axis = f"0{end:>{columns - 1}}"
    drawn = "".join(lines)
    kinds = dict.fromkeys(action.kind for row in timeline.spans for action, _, _ in row)
    key = [f"{kind.value} {name}" for kind, name in _NAMES.items() if kind in kinds]
    if schedule.stages > schedule.ranks:
        key.append("small letters: not the rank's first stage")
    key.append("digits: microbatch")
    signs = ((_ONCE, _ONCE_NAME), (_WAITS, "waits"), (_MOVES, "waits for a transfer"))
    key += [f"{sign} {name}" for sign, name in signs if sign in drawn]
    return [
        *(f"{label:<{margin}}{line}".rstrip() for label, line in zip(labels, lines, strict=True)),
        f"{'':{margin}}{axis}",
        "",
        fill("; ".join(key), max(width, 40)),
    ]


def answer(timeline: Timeline, call: float = 0.0) -> list[str]:
    """Return the most important lines of a pipeline's report: duration of the step, its bubble, exposed transfers.

    Args:
        call: seconds of the step before the timeline starts.
    """
    schedule = timeline.schedule
    sizes = ", ".join(
        f"{number} {noun}{'' if number == 1 else 's'}"
        for number, noun in ((schedule.ranks, "rank"), (schedule.stages, "stage"))
    )
    exposed = sum(timeline.exposed) / schedule.ranks
    count = schedule.microbatches
    out = {
        "step": f"{duration(timeline.seconds + call)}: schedule {schedule.name}, {sizes}, "
        f"{count} microbatch{'' if count == 1 else 'es'}",
        "bubble": f"{percent(timeline.bubble)} of the ranks' time",
        "exposed": f"transfers of {duration(exposed)} per rank, "
        f"{percent(exposed / timeline.seconds if timeline.seconds else 0)} of the step",
    }
    return [f"{name:<8}  {line}" for name, line in out.items()]


def _row(timeline: Timeline, rank: int, columns: int) -> str:
    """Return the time of a rank in a step drawn as a line of ``columns`` characters: its computations by kind and
    microbatch, and its waits.
    """
    spans = [(_label(timeline, x), "-", start, end) for x, start, end in timeline.spans[rank] if x.kind in COMPUTATIONS]
    spans += [("", _ONCE, *span) for span in timeline.once[rank]]
    spans += [("", _MOVES, *span) for span in timeline.waits[rank]]
    row = [_WAITS] * columns
    scale = columns / timeline.seconds if timeline.seconds else 0.0
    for label, filler, start, end in spans:
        first, last = round(start * scale), round(end * scale)
        shown = label if len(label) <= last - first else label[:1]
        row[first:last] = f"{shown:{filler}<{last - first}}"[: last - first]
    return "".join(row)


def _label(timeline: Timeline, action: Action) -> str:
    """Return the letter of a computation and its microbatch, such as ``F3``; a small letter if its stage is not the
    first of its rank's stages.
    """
    letter, later = action.kind.value, _earlier_stages(timeline, action.stage)
    return f"{letter.lower() if later else letter}{action.microbatch}"


def _earlier_stages(timeline: Timeline, stage: int) -> int:
    """Return how many stages in front of ``stage`` are on its rank."""
    rank_of = timeline.schedule.rank_of
    return rank_of[:stage].count(rank_of[stage])


def draw(timeline: Timeline) -> Figure:
    """Return a matplotlib figure of a timeline: a bar for each computation, white for bubbles.

    A bar has the number of its microbatch where it fits. Bars of a rank's later stages are paler. A line below the bars
    is a wait for a transfer.
    """
    schedule = timeline.schedule
    unit, name = time_unit(timeline.seconds)
    width, height = 12.0, 1.6 + 0.4 * schedule.ranks
    drawn = figure(width, height)
    from matplotlib.colors import to_rgb

    axes = drawn.subplots()
    drawn.suptitle("\n".join(answer(timeline)), fontsize=9, x=0.01, ha="left", family="monospace")
    per_rank = schedule.stages // schedule.ranks
    points = (width - 2.5) * 72 / (timeline.seconds or 1)  # of a second, about
    label_points = 5 * len(str(schedule.microbatches - 1))

    def colour_of(action: Action) -> tuple[float, ...]:
        """Return the colour of a computation, paler for a later stage of its rank."""
        pale = 0.6 * _earlier_stages(timeline, action.stage) / per_rank
        return tuple(part + (1 - part) * pale for part in to_rgb(_COLOURS[action.kind]))

    for rank, row in enumerate(timeline.spans):
        once = [(start * unit, (end - start) * unit) for start, end in timeline.once[rank]]
        bars: dict[tuple[float, ...], list[tuple[float, float]]] = {to_rgb(_ONCE_COLOUR): once}
        for action, start, end in row:
            if action.kind in COMPUTATIONS:
                bars.setdefault(colour_of(action), []).append((start * unit, (end - start) * unit))
                if (end - start) * points > label_points:
                    middle = (start + end) / 2 * unit
                    axes.text(middle, rank, str(action.microbatch), ha="center", va="center", fontsize=7)
        for colour, spans in bars.items():
            axes.broken_barh(spans, (rank - 0.38, 0.76), facecolor=colour, edgecolor="white", linewidth=0.4)
        exposed = [(start * unit, (end - start) * unit) for start, end in timeline.waits[rank]]
        axes.broken_barh(exposed, (rank + 0.26, 0.12), color=EXPOSED, linewidth=0.3, snap=False)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.set_ylim(schedule.ranks - 0.5, -0.5)
    axes.set_xlim(0, timeline.seconds * unit or 1)
    axes.set_xlabel(name)
    kinds = {action.kind for row in timeline.spans for action, _, _ in row}
    shown = {_NAMES[kind]: colour for kind, colour in _COLOURS.items() if kind in kinds}
    if any(timeline.once):
        shown[_ONCE_NAME] = _ONCE_COLOUR
    if per_rank > 1:
        shown["paler: not the rank's first stage"] = "#d9d9d9"
    if any(timeline.waits):
        shown["waits for a transfer"] = EXPOSED
    legend(axes, shown)
    return drawn


def svg(timeline: Timeline) -> str:
    """Return a timeline as an SVG element for a page: a row for each rank, with a title on each bar."""
    schedule, waits = timeline.schedule, timeline.waits
    width, height, margin = 1000.0, 20, 60
    scale = (width - margin) / (timeline.seconds or 1)
    parts = []

    def bar(rank: int, start: float, end: float, colour: str, title: str, foot: bool = False) -> None:
        x, y, high = margin + start * scale, rank * height + (15 if foot else 2), 3 if foot else height - 4
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{(end - start) * scale:.2f}" height="{high}" fill="{colour}">'
            f"<title>{title}, {duration(end - start)}</title></rect>"
        )

    for rank, row in enumerate(timeline.spans):
        parts.append(f'<text x="0" y="{rank * height + 14}" fill="currentColor">rank {rank}</text>')
        for start, end in timeline.once[rank]:
            bar(rank, start, end, _ONCE_COLOUR, _ONCE_NAME)
        for action, start, end in row:
            if action.kind in COMPUTATIONS:
                title = f"{_NAMES[action.kind]} of stage {action.stage}, microbatch {action.microbatch}"
                bar(rank, start, end, _COLOURS[action.kind], title)
        for start, end in waits[rank]:
            bar(rank, start, end, EXPOSED, "waits for a transfer", foot=True)
    size = f"{width:.0f} {schedule.ranks * height}"
    style = "width:100%;font:12px system-ui;stroke:none"
    return f'<svg viewBox="0 0 {size}" style="{style}" role="img" aria-label="pipeline">{"".join(parts)}</svg>'
