"""A schedule as a self-contained HTML page (`page`, with ``page.html`` and ``page.js``) and as a matplotlib figure
(`draw`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from shardc.errors import InputError
from shardc.ir import graph as ir
from shardc.ir.text import op_line, placeholder_text
from shardc.report.beside import Step, step_of
from shardc.report.findings import Finding, merged
from shardc.report.predicted_memory import OWNERS
from shardc.report.prediction import Collective, Prediction, grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOTALS = ("axis", "kind", "phase", "entry", "module", "tensor")


def page(
    schedule: Prediction, findings: Iterable[Finding] = (), drawn: str = "", beside: Prediction | Step | None = None
) -> str:
    """Return a schedule as the text of an HTML page; it is byte-identical for the same program.

    Args:
        findings: of `lint`, for a table.
        drawn: an SVG element for the top of the page; "" for none.
        beside: a second step, on the same axis of time.
    """
    under = step_of(beside, schedule) if isinstance(beside, Prediction) else beside
    data = json.dumps(record(schedule, findings, under), separators=(",", ":"))
    # Only these three characters can end a script element or begin a comment in it.
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    text, script = (resources.files("shardc.report").joinpath(name).read_text() for name in ("page.html", "page.js"))
    above = f"<section><h2>Pipeline</h2>\n{drawn}</section>\n" if drawn else ""
    parts = {"TITLE": escape(schedule.title), "DRAWN": above, "SCRIPT": script, "DATA": data}
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def record(schedule: Prediction, findings: Iterable[Finding] = (), beside: Step | None = None) -> dict[str, object]:
    """Return the data of the page, in microseconds and bytes; ops are numbered by their position in the step."""
    words: dict[str, int] = {}
    # A parameter that is gathered twice has two positions.
    positions = grouped(range(len(schedule.step.ops)), lambda at: ir.info(schedule.step.ops[at].node).name)
    by_position = zip(schedule.step.starts, schedule.transfers, strict=True)
    return {
        "title": schedule.title,
        "beside": None if beside is None else beside.record(),
        "us": _us(schedule.seconds),
        "compute": _us(schedule.compute_seconds),
        "exposed": _us(schedule.exposed),
        "wire": schedule.wire,
        "mfu": schedule.mfu,
        "tokens": schedule.tokens_per_second,
        "peak": schedule.peak,
        "ops": [_op(schedule, at, words) for at in range(len(schedule.step.ops))],
        "words": list(words),
        "kernels": [
            {
                "name": run.kernel.name, "ops": run.kernel.ops, "flops": run.kernel.flops, "bytes": run.kernel.bytes,
                "start": _us(run.start), "end": _us(run.end), "phase": schedule.phase_of(run), "kind": run.kernel.kind,
            }
            for run in schedule.runs
        ],
        "findings": [
            {
                "severity": f.severity, "us": _us(f.seconds), "bytes": f.bytes, "subject": f.subject,
                "message": f.message, "change": f.change, "source": f.source,
            }
            for f in merged(findings)
        ],
        "collectives": [_collective(c, at, positions) for at, c in by_position],
        "totals": {
            by: [
                {"key": key, "count": t.count, "wire": t.wire, "us": _us(t.seconds), "exposed": _us(t.exposed)}
                for key, t in schedule.totals(by).items()
            ]
            for by in TOTALS
        },
        "memory": {
            "owners": OWNERS,
            "capacity": schedule.hardware.memory,
            "peak": schedule.memory.peak.total,
            "at_peak": schedule.memory.peak.sizes,
            "samples": [(_us(seconds), *sizes) for seconds, sizes in curve(schedule)],
        },
    }  # fmt: skip


def curve(schedule: Prediction) -> list[tuple[float, tuple[int, ...]]]:
    """Return (seconds, bytes by owner) for each time at which memory changes. For several changes at one time, return
    the largest and the last state.
    """
    out: list[tuple[float, tuple[int, ...]]] = []
    for seconds, samples in groupby(schedule.memory.samples, lambda sample: schedule.reached(sample.at)):
        sizes = [sample.sizes for sample in samples]
        out += [(seconds, shown) for shown in dict.fromkeys((max(sizes, key=sum), sizes[-1]))]
    if out and out[-1][0] < schedule.seconds:
        out.append((schedule.seconds, out[-1][1]))
    return out


def _op(schedule: Prediction, at: int, words: dict[str, int]) -> list[object]:
    """Return the JSON list of the op at index ``at``: text, kind, phase, the numbers of module, source and reason in
    ``words``, the indices of the ops whose results it reads, and its microseconds.
    """
    op = schedule.step.ops[at]
    record, graph = ir.info(op.node), op.node.graph.owning_module
    assert graph is not None
    text = placeholder_text(record, "") if op.node.op == "placeholder" else op_line(graph, op.node)
    word_ids = [
        words.setdefault(x, len(words)) for x in (record.origin.module, record.origin.source, record.origin.reason)
    ]
    return [text, op.kind, op.phase, *word_ids, op.reads, _us(schedule.clock[at])]


def _nearest(positions: list[int], at: int) -> int:
    """Return the first of ``positions``, which ascend, at or behind position ``at``; the last if all are before it."""
    return positions[min(bisect_left(positions, at), len(positions) - 1)]


def _collective(c: Collective, at: int, positions: Mapping[str, list[int]]) -> Mapping[str, object]:
    """Return the row of a collective for the page's table: column -> value. ``from`` lists the positions of the ops
    that cause it.

    Args:
        at: the collective's position in the step.
        positions: name of an op -> its positions in the step.
    """
    names = [name for name in (*c.cause.tensors, c.cause.consumer) if name in positions]
    causes = dict.fromkeys(_nearest(positions[name], at) for name in names)
    return {
        "op": at, "kind": c.kind, "axis": c.axis, "ranks": c.ranks, "dtype": c.dtype, "bytes": c.bytes, "wire": c.wire,
        "phase": c.phase, "start": _us(c.start), "end": _us(c.end), "exposed": _us(c.exposed), "hidden_by": c.hidden_by,
        "algorithm": c.algorithm, "link": c.link, "tensor": c.cause.tensor, "tensors": c.cause.tensors,
        "module": c.cause.module, "source": c.cause.source, "entry": c.cause.entry, "reason": c.cause.reason,
        "from": [cause for cause in causes if cause != at],
    }  # fmt: skip


def _us(seconds: float) -> float:
    """Return ``seconds`` in microseconds, rounded."""
    return round(seconds * 1e6, 4)


# The same colours as in page.js.
KINDS = {
    "forward": "#74a9d8", "backward": "#4a6fa5", "recompute": "#b08968",
    "all_gather": "#2f9e44", "reduce_scatter": "#e8590c", "all_reduce": "#ae3ec9",
    "all_to_all": "#0c8599", "permute_ranks": "#a6761d", "broadcast": "#5c7cfa", "to_device": "#66a80f",
    "to_host": "#c2255c",
}  # fmt: skip
OWNER_COLOURS = dict(
    zip(OWNERS, ("#4c6ef5", "#7950f2", "#868e96", "#f59f00", "#12b886", "#e64980", "#fd7e14", "#adb5bd"), strict=True)
)
EXPOSED = "#e03131"


def save(picture: Figure, path: str | Path) -> None:
    """Write a matplotlib figure to ``path``, whose suffix selects the format (png, svg, pdf); creates its folder.

    Raises:
        InputError: matplotlib does not support the suffix.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        picture.savefig(path, dpi=120)
    except ValueError as error:
        raise InputError(f"plot {path}: {error}", fix="end it in .png, .svg or .pdf") from None


def figure(width: float, height: float) -> Figure:
    """Return an empty matplotlib figure (inches), which opens no window and changes no global state.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a plot needs matplotlib, which is not installed", fix="pip install 'shardc[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def draw(schedule: Prediction) -> Figure:
    """Return a matplotlib figure: compute and the collectives of each axis over time, memory by owner below."""
    axes = list(dict.fromkeys(c.axis for c in schedule.transfers))
    lanes = ["compute", *axes]
    unit, name = time_unit(schedule.seconds)
    drawn = figure(12, 3.6 + 0.4 * len(lanes))
    time, memory = drawn.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [0.4 * len(lanes) + 0.4, 2.4]})
    drawn.suptitle(_title(schedule), fontsize=10)

    def bars(lane: int, kind: str, spans: Iterable[tuple[float, float]]) -> None:
        """Draw ``spans`` (start, end) in seconds in one lane, in the colour of ``kind``."""
        low, high = (0.26, 0.12) if kind == "exposed" else (-0.38, 0.76)
        bars_ = [(start * unit, (end - start) * unit) for start, end in spans]
        if bars_:
            # With an edge, and not snapped to pixels, a span much shorter than a pixel is still visible.
            time.broken_barh(bars_, (lane + low, high), color=KINDS.get(kind, EXPOSED), linewidth=0.3, snap=False)

    phases = grouped(schedule.runs, schedule.phase_of)
    for phase, runs in phases.items():
        bars(0, phase, ((run.start, run.end) for run in runs))
    for lane, axis in enumerate(axes, 1):
        transfers = [c for c in schedule.transfers if c.axis == axis]
        for kind in dict.fromkeys(c.kind for c in transfers):
            bars(lane, kind, ((c.start, c.end) for c in transfers if c.kind == kind))
        bars(lane, "exposed", ((c.end - c.exposed, c.end) for c in transfers if c.exposed))
    time.set_yticks(range(len(lanes)), lanes)
    time.set_ylim(len(lanes) - 0.5, -0.5)
    shown = dict.fromkeys((*phases, *(c.kind for c in schedule.transfers)))
    legend(time, {**{kind: KINDS[kind] for kind in shown}, "exposed": EXPOSED})

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
    legend(memory, {OWNERS[n]: OWNER_COLOURS[OWNERS[n]] for n in reversed(used)})
    return drawn


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit in which to show a duration: (number of units in a second, name), such as ``(1000.0, "ms")``."""
    return (1e3, "ms") if seconds < 10 else (1.0, "s")


def size_unit(size: float) -> tuple[float, str]:
    """Return the unit in which to show a size: (bytes in a unit, name), such as ``(1e9, "GB")``."""
    return (1e9, "GB") if size >= 1e8 else (1e6, "MB")


def _title(schedule: Prediction) -> str:
    """Return the title of a figure: the schedule's title, step time and memory."""
    unit, name = time_unit(schedule.seconds)
    size, shown = size_unit(schedule.memory.peak.total)
    return (
        f"{fill(schedule.title, 150)}\n"
        f"step {schedule.seconds * unit:.3f} {name}, exposed {schedule.exposed * unit:.3f} {name}, "
        f"MFU at most {schedule.mfu:.1%}, peak memory {schedule.memory.peak.total / size:.3f} {shown}"
    )


def legend(axes: Axes, colours: dict[str, str]) -> None:
    """Add a legend to matplotlib's ``axes``. ``colours`` maps each name in it to its colour."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.02), fontsize=8, frameon=False)
