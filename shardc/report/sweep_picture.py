"""A sweep as a picture: a step's time and a rank's memory over the count of ranks, one line a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from shardc.errors import InputError


class Row(Protocol):
    """What is drawn of one mesh and plan."""

    @property
    def ranks(self) -> int: ...

    @property
    def plan(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    @property
    def memory(self) -> int: ...

    @property
    def fits(self) -> bool: ...


def save(rows: Sequence[Row], path: str | Path) -> None:
    """Writes the picture; the ending of ``path`` says as what (png, svg, pdf).

    Raises:
        InputError: matplotlib is not installed, or it knows no such ending.
    """
    figure = draw(rows)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise InputError(f"plot {path}: {error}", fix="end it in .png, .svg or .pdf") from None


def draw(rows: Sequence[Row]) -> Any:
    """The picture as a matplotlib figure: of each plan and count of ranks the fastest mesh, hollow if it does not fit.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a plot needs matplotlib, which is not installed", fix="pip install 'shardc[plot]'") from None
    figure = Figure(figsize=(9, 7), layout="constrained")
    times, memory = figure.subplots(2, 1, sharex=True)
    for number, plan in enumerate(dict.fromkeys(row.plan for row in rows)):
        best: dict[int, Row] = {}
        for row in rows:
            if row.plan == plan and (row.ranks not in best or row.seconds < best[row.ranks].seconds):
                best[row.ranks] = row
        line = [best[ranks] for ranks in sorted(best)]
        for axes, values in ((times, [r.seconds for r in line]), (memory, [r.memory / 1e9 for r in line])):
            ranks, colour = [r.ranks for r in line], f"C{number}"
            axes.plot(ranks, values, color=colour, label=plan)
            faces = [colour if r.fits else "white" for r in line]
            axes.scatter(ranks, values, c=faces, edgecolors=colour, zorder=3)
    for axes, title in ((times, "step, s"), (memory, "memory at the peak, GB a rank")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
    ticks = sorted({row.ranks for row in rows})
    memory.set_xticks(ticks, [str(n) for n in ticks])
    memory.set_xlabel("ranks (hollow: does not fit)")
    times.legend(fontsize="small")
    return figure
