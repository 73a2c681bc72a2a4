"""Draws a schedule with matplotlib: compute and the collectives of each axis over time, and memory by owner below."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import Any

from shardc.errors import InputError
from shardc.report.memory import OWNERS
from shardc.report.page import curve
from shardc.report.prediction import Prediction

# The same colours as in page.html.
KINDS = {
    "compute": "#74a9d8", "all_gather": "#2f9e44", "reduce_scatter": "#e8590c", "all_reduce": "#ae3ec9",
    "all_to_all": "#0c8599", "permute_ranks": "#a6761d", "broadcast": "#5c7cfa", "to_device": "#66a80f",
    "to_host": "#c2255c",
}  # fmt: skip
OWNER_COLOURS = dict(
    zip(OWNERS, ("#4c6ef5", "#7950f2", "#868e96", "#f59f00", "#12b886", "#e64980", "#fd7e14", "#adb5bd"), strict=True)
)
EXPOSED = "#e03131"


def save(picture: Any, path: str | Path) -> None:
    """Write a matplotlib figure, and create its folder; the suffix of ``path`` selects the format (png, svg, pdf).

    Raises:
        InputError: matplotlib does not support the suffix.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        picture.savefig(path, dpi=120)
    except ValueError as error:
        raise InputError(f"plot {path}: {error}", fix="end it in .png, .svg or .pdf") from None


def figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure that opens no window and changes no global state.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a plot needs matplotlib, which is not installed", fix="pip install 'shardc[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def draw(schedule: Prediction) -> Any:
    """Draw the schedule and return the matplotlib figure."""
    axes = list(dict.fromkeys(c.axis for c in schedule.transfers))
    lanes = ["compute", *axes]
    unit, name = time_unit(schedule.seconds)
    drawn = figure(12, 3.6 + 0.4 * len(lanes))
    time, memory = drawn.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [0.4 * len(lanes) + 0.4, 2.4]})
    drawn.suptitle(_title(schedule), fontsize=10)

    def bars(lane: int, kind: str, spans: Iterable[tuple[float, float]]) -> None:
        low, high = (0.26, 0.12) if kind == "exposed" else (-0.38, 0.76)
        bars_ = [(start * unit, (end - start) * unit) for start, end in spans]
        if bars_:
            # With an edge, and not snapped to pixels, a span much shorter than a pixel is still visible.
            time.broken_barh(bars_, (lane + low, high), color=KINDS.get(kind, EXPOSED), linewidth=0.3, snap=False)

    bars(0, "compute", ((run.start, run.end) for run in schedule.runs))
    for lane, axis in enumerate(axes, 1):
        transfers = [c for c in schedule.transfers if c.axis == axis]
        for kind in dict.fromkeys(c.kind for c in transfers):
            bars(lane, kind, ((c.start, c.end) for c in transfers if c.kind == kind))
        bars(lane, "exposed", ((c.end - c.exposed, c.end) for c in transfers if c.exposed))
    time.set_yticks(range(len(lanes)), lanes)
    time.set_ylim(len(lanes) - 0.5, -0.5)
    shown = dict.fromkeys(c.kind for c in schedule.transfers)
    _legend(time, {"compute": KINDS["compute"], **{kind: KINDS[kind] for kind in shown}, "exposed": EXPOSED})

    points = curve(schedule)
    size, shown_size = size_unit(schedule.memory.peak.total)
    at = [seconds * unit for seconds, _ in points]
    sizes = [[sizes[owner] / size for _, sizes in points] for owner in range(len(OWNERS))]
    used = [n for n in range(len(OWNERS)) if any(sizes[n])]
    memory.stackplot(
        at, [sizes[n] for n in used], step="post", colors=[OWNER_COLOURS[OWNERS[n]] for n in used], linewidth=0
    )
    if schedule.hardware.memory < 1.5 * schedule.memory.peak.total:
        memory.axhline(schedule.hardware.memory / size, color=EXPOSED, linewidth=1)
    memory.set_ylabel(f"{shown_size} a rank")
    memory.set_xlabel(name)
    memory.set_xlim(0, schedule.seconds * unit or 1)
    _legend(memory, {OWNERS[n]: OWNER_COLOURS[OWNERS[n]] for n in reversed(used)})
    return drawn


def time_unit(seconds: float) -> tuple[float, str]:
    """Return (factor from seconds, name) of the unit in which a duration is drawn."""
    return (1e3, "ms") if seconds < 10 else (1.0, "s")


def size_unit(size: float) -> tuple[float, str]:
    """Return (divisor of bytes, name) of the unit in which a size is drawn."""
    return (1e9, "GB") if size >= 1e8 else (1e6, "MB")


def _title(schedule: Prediction) -> str:
    unit, name = time_unit(schedule.seconds)
    size, shown = size_unit(schedule.memory.peak.total)
    return (
        f"{fill(schedule.title, 150)}\n"
        f"step {schedule.seconds * unit:.3f} {name}, exposed {schedule.exposed * unit:.3f} {name}, "
        f"MFU at most {schedule.mfu:.1%}, peak memory {schedule.memory.peak.total / size:.3f} {shown}"
    )


def _legend(axes: Any, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.02), fontsize=8, frameon=False)
