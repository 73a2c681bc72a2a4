"""Renders a schedule as a self-contained HTML page: `record` is its data, ``page.html`` its code."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

from shardc.cost.step_sequence import Sequence
from shardc.ir import graph as ir
from shardc.ir.text import op_line, placeholder_text
from shardc.report.memory import OWNERS
from shardc.report.prediction import Collective, Prediction

TOTALS = ("axis", "kind", "phase", "entry", "module", "tensor")


def page(schedule: Prediction) -> str:
    """Return the page; it is byte-identical for the same program."""
    data = json.dumps(record(schedule), separators=(",", ":"))
    # Only these three characters can end a script element or begin a comment in it.
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    text = resources.files("shardc.report").joinpath("page.html").read_text()
    return text.replace("@TITLE@", escape(schedule.title)).replace("@DATA@", data)


def record(schedule: Prediction) -> dict[str, Any]:
    """Return the data of the page, in microseconds and bytes; ops are numbered by their position in the step."""
    words: dict[str, int] = {}
    places = _Places(schedule.step)
    by_position = zip(schedule.step.starts, schedule.transfers, strict=True)
    return {
        "title": schedule.title,
        "us": _us(schedule.seconds),
        "compute": _us(schedule.compute_seconds),
        "exposed": _us(schedule.exposed),
        "wire": schedule.wire,
        "mfu": schedule.mfu,
        "ops": [_op(schedule, at, words) for at in range(len(schedule.step.ops))],
        "words": list(words),
        "kernels": [
            {
                "name": run.kernel.name, "ops": run.kernel.ops, "flops": run.kernel.flops, "bytes": run.kernel.bytes,
                "start": _us(run.start), "end": _us(run.end),
            }
            for run in schedule.runs
        ],
        "collectives": [_collective(c, at, places) for at, c in by_position],
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
    """Return (seconds, bytes by owner) at each time at which memory changes: the largest sample, then the last."""
    out: list[tuple[float, tuple[int, ...]]] = []
    moment: list[tuple[int, ...]] = []
    now = 0.0

    def close() -> None:
        most = max(moment, key=sum)
        out.extend((now, sizes) for sizes in dict.fromkeys((most, moment[-1])))

    for sample in schedule.memory.samples:
        seconds = schedule.clock[sample.at] if sample.at < len(schedule.clock) else schedule.seconds
        if moment and seconds != now:
            close()
            moment.clear()
        now = seconds
        moment.append(sample.sizes)
    if moment:
        close()
        if now < schedule.seconds:
            out.append((schedule.seconds, moment[-1]))
    return out


class _Places:
    """Positions of a step's ops by name; a parameter that is gathered twice has two positions."""

    def __init__(self, step: Sequence) -> None:
        self._at: dict[str, list[int]] = {}
        for at, op in enumerate(step.ops):
            self._at.setdefault(ir.info(op.node).name, []).append(at)

    def near(self, name: str, at: int) -> list[int]:
        """Return the position of op ``name`` next after ``at``, else the last before it, in a list; or []."""
        positions = self._at.get(name, [])
        return positions[min(bisect_left(positions, at), len(positions) - 1) :][:1]


def _op(schedule: Prediction, at: int, words: dict[str, int]) -> list[Any]:
    op = schedule.step.ops[at]
    record, graph = ir.info(op.node), op.node.graph.owning_module
    assert graph is not None
    text = placeholder_text(record, "") if op.node.op == "placeholder" else op_line(graph, op.node)
    word_ids = [
        words.setdefault(x, len(words)) for x in (record.origin.module, record.origin.source, record.origin.reason)
    ]
    return [text, op.kind, op.phase, *word_ids, op.reads, _us(schedule.clock[at])]


def _collective(c: Collective, at: int, places: _Places) -> Mapping[str, Any]:
    """Return the row of the collective at position ``at``, with the positions of the ops that cause it."""
    causes = [*c.cause.tensors, c.cause.consumer]
    positions = dict.fromkeys(place for name in causes for place in places.near(name, at) if place != at)
    return {
        "op": at, "kind": c.kind, "axis": c.axis, "ranks": c.ranks, "dtype": c.dtype, "bytes": c.bytes, "wire": c.wire,
        "phase": c.phase, "start": _us(c.start), "end": _us(c.end), "exposed": _us(c.exposed), "hidden_by": c.hidden_by,
        "algorithm": c.algorithm, "link": c.link, "tensor": c.cause.tensor, "tensors": c.cause.tensors,
        "module": c.cause.module, "source": c.cause.source, "entry": c.cause.entry, "reason": c.cause.reason,
        "from": list(positions),
    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 4)
