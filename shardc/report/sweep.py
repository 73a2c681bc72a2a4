"""A sweep, and its picture: a step's time and a rank's memory over the count of ranks, one line a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardc.report.picture import figure, size_unit, time_unit


@dataclass(frozen=True)
class Row:
    """One mesh and plan; or what keeps them from being.

    Args:
        seconds, exposed: of a step.
        memory: bytes of a rank at the peak.
        fits: in the hardware's memory.
        mfu: model flops utilisation at most.
        wire: bytes that each rank sends in a step.
    """

    ranks: int
    mesh: str
    plan: str
    seconds: float = 0.0
    exposed: float = 0.0
    memory: int = 0
    fits: bool = False
    mfu: float = 0.0
    wire: int = 0
    error: str = ""


def draw(rows: Sequence[Row]) -> Any:
    """The picture as a matplotlib figure: of each plan the fastest mesh by ranks, named; hollow if it does not fit."""
    drawn = figure(9, 7)
    times, memory = drawn.subplots(2, 1, sharex=True)
    unit, second = time_unit(max(row.seconds for row in rows))
    size, byte = size_unit(max(row.memory for row in rows))
    for number, plan in enumerate(dict.fromkeys(row.plan for row in rows)):
        best: dict[int, Row] = {}
        for row in rows:
            if row.plan == plan and (row.ranks not in best or row.seconds < best[row.ranks].seconds):
                best[row.ranks] = row
        line = [best[ranks] for ranks in sorted(best)]
        for axes, values in ((times, [r.seconds * unit for r in line]), (memory, [r.memory / size for r in line])):
            ranks, colour = [r.ranks for r in line], f"C{number}"
            axes.plot(ranks, values, color=colour, label=plan)
            faces = [colour if r.fits else "white" for r in line]
            axes.scatter(ranks, values, c=faces, edgecolors=colour, zorder=3)
        for row in line:
            place = row.ranks, row.seconds * unit
            near = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
            times.annotate(row.mesh, place, fontsize=7, color=f"C{number}", **near)
    for axes, title in ((times, f"step, {second}"), (memory, f"memory at the peak, {byte} a rank")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.margins(x=0.1, y=0.15)
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks("{x:g}")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
    counts = sorted({row.ranks for row in rows})
    memory.set_xticks(counts, [str(n) for n in counts])
    memory.set_xlabel("ranks (hollow: does not fit)")
    times.legend(fontsize="small")
    return drawn
