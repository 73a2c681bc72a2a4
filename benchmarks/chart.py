"""The ruler's results as a bar chart."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import LIMIT, OURS, Result

COLOURS = {LIMIT: "#9aa0a6", OURS: "#d1495b"}
PEER = "#3b6ea5"


def draw(results: Sequence[Result], path: str) -> None:
    """Writes a PNG: a panel for each size and family, a bar for each row's median, a dot at its fastest step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys((r.size, r.family) for r in results))
    ran = {group: [r for r in results if (r.size, r.family) == group and not r.error] for group in groups}
    heights = [max(len(rows), 1) + 1 for rows in ran.values()]
    figure = Figure(figsize=(8, 0.32 * sum(heights) + 0.5 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (size, family) in zip(panels, groups, strict=True):
        rows = ran[size, family][::-1]
        names = [r.name for r in rows]
        bars = panel.barh(names, [r.median * 1e3 for r in rows], color=[COLOURS.get(r.kind, PEER) for r in rows])
        panel.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
        panel.plot([r.minimum * 1e3 for r in rows], names, "o", color="black", markersize=3)
        panel.set_title(f"{size}, {family}: ms a step (bar: median, dot: fastest)", fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.1)
    figure.savefig(path, dpi=150)
