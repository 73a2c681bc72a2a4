"""A schedule as JSON data and as a Chrome trace, and the comparison of two saved schedules (for CI)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any

from tabulate import tabulate

from shardc.cost.step_sequence import MOVE, WAIT, Sequence
from shardc.errors import InputError
from shardc.ir.schedules import COMPUTATIONS, Timeline
from shardc.report.predicted_memory import OWNERS
from shardc.report.prediction import Prediction

LARGEST = 10  # tensors at the peak that are written
TOTALS = ("axis", "kind", "phase", "entry")


def write(path: str | Path, text: str) -> None:
    """Write ``text`` to the file ``path``; creates its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def milliseconds(seconds: float) -> str:
    """Return ``seconds`` in milliseconds, as text."""
    return f"{seconds * 1e3:.3f}"


def gigabytes(size: float) -> str:
    """Return ``size`` bytes in units of 10^9 bytes, as text."""
    return f"{size / 1e9:.3f}" if size >= 1e6 else f"{size / 1e9:.6f}"


def shorten(text: str, width: int) -> str:
    """Return ``text`` cut to ``width`` characters, ending in dots if it is longer."""
    return text if len(text) <= width else text[: width - 3] + "..."


def plain(rows: Seq[Seq[str]], head: Seq[str]) -> str:
    """Return ``rows`` as a text table without lines. All columns are aligned at the left."""
    return tabulate(rows, head, tablefmt="plain", disable_numparse=True)


def record(schedule: Prediction) -> dict[str, object]:
    """Return all numbers of a schedule as JSON data, a dict, in seconds and bytes."""
    return {
        "mesh": dict(schedule.mesh.shape),
        "hardware": schedule.hardware.name,
        "order": schedule.order,
        **({"notes": list(schedule.notes)} if schedule.notes else {}),
        "seconds": schedule.seconds,
        "optimizer_seconds": schedule.optimizer_seconds,
        **({"tokens": schedule.tokens} if schedule.tokens else {}),
        "compute_seconds": schedule.compute_seconds,
        "exposed": schedule.exposed,
        "wire": schedule.wire,
        "flops": schedule.flops,
        "useful_flops": schedule.useful_flops,
        "mfu": schedule.mfu,
        "memory": {
            "peak": schedule.peak,
            "peak_op": schedule.memory.peak_op,
            "by_owner": schedule.memory.by_owner(),
            "capacity": schedule.hardware.memory,
            "held": [vars(x) for x in sorted(schedule.memory.tensors_at_peak, key=lambda x: -x.bytes)[:LARGEST]],
            **({"host": dict(schedule.memory.host)} if schedule.memory.host else {}),
        },
        "totals": {
            by: {key: vars(total) for key, total in schedule.totals(by).items()} for by in (*TOTALS, "module", "tensor")
        },
        "collectives": [{**vars(c), "cause": vars(c.cause)} for c in schedule.collectives],
        **({"moves": [{**vars(c), "cause": vars(c.cause)} for c in schedule.moves]} if schedule.moves else {}),
    }


def trace(schedule: Prediction) -> dict[str, object]:
    """Return a predicted step as the JSON data of a Chrome trace, in microseconds. Track 0 is compute, and each axis
    has a track with its collectives.

    An arrow goes from each collective to the op that waits for it. Track 0 shows when the rank waits.
    """
    axes = list(dict.fromkeys(c.axis for c in schedule.transfers))
    events: list[dict[str, object]] = [_metadata("process_name", 0, schedule.title)]
    for tid, name in enumerate(["compute", *axes]):
        events += [_metadata("thread_name", tid, name), _metadata("thread_sort_index", tid, tid, "sort_index")]
    for run in schedule.runs:
        k = run.kernel
        args = {"module": k.module, "source": k.source, "flops": k.flops, "bytes": k.bytes}
        events.append(_span_event(k.name, 0, run.start, run.end, args))
    waits = {start: at for at, start in reversed(waits_of(schedule.step))}  # the first of each
    for number, (at, c) in enumerate(zip(schedule.step.starts, schedule.transfers, strict=True)):
        args = {"wire": c.wire, "exposed_us": c.exposed * 1e6, **vars(c.cause)}
        name, tid = f"{c.kind} {c.cause.tensor}", 1 + axes.index(c.axis)
        events.append(_span_event(name, tid, c.start, c.end, args))
        still = max(c.end - c.exposed, schedule.clock[waits[at]] if at in waits else 0.0)
        if c.exposed and still < c.end:
            events.append({**_span_event(f"wait for {name}", 0, still, c.end, args), "cat": "wait"})
        elif at in waits:
            still = schedule.clock[waits[at]]
        else:
            continue
        arrow = {"name": "wait", "cat": "wait", "id": number, "pid": 0}
        events += [
            {**arrow, "ph": "s", "tid": tid, "ts": c.start * 1e6}, {**arrow, "ph": "f", "tid": 0, "ts": still * 1e6}
        ]  # fmt: skip
    for sample in schedule.memory.samples:
        sizes = dict(zip(OWNERS, sample.sizes, strict=True))
        events.append({"name": "memory", "ph": "C", "pid": 0, "ts": schedule.reached(sample.at) * 1e6, "args": sizes})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def pipeline_trace(schedule: Prediction, timeline: Timeline, rank: int, axis: str) -> dict[str, object]:
    """Return the Chrome trace of a step with pipeline stages: first the kernels of one rank, then a process per rank
    with its computations.

    The process of a rank also has its waits for messages.

    Args:
        schedule: the step of the rank whose kernels are shown.
        timeline: the times of all ranks.
        rank, axis: coordinate along ``axis`` of the rank whose kernels are shown.
    """
    out = trace(schedule)
    events: Any = out["traceEvents"]
    events[0] = _metadata("process_name", 0, f"{axis} {rank}: {schedule.title}")
    for at, row in enumerate(timeline.spans):
        spans = [(str(x), start, end) for x, start, end in row if x.kind in COMPUTATIONS]
        spans += [("once", start, end) for start, end in timeline.once[at]]
        spans += [("waits for a transfer", start, end) for start, end in timeline.waits[at]]
        ours = [_metadata("process_name", 0, f"{axis} {at}"), _metadata("thread_name", 0, "stages")]
        ours += [_span_event(name, 0, start, end, {}) for name, start, end in sorted(spans, key=lambda span: span[1])]
        events += [{**event, "pid": 1 + at} for event in ours]
    return out


def waits_of(step: Sequence) -> list[tuple[int, int]]:
    """Return the waits of collectives in order, as (position of the wait, position of the start of its collective)."""
    start_of = {at: at for at in step.starts}  # op -> the start whose result it is, for views and waits, too
    out = []
    for at, op in enumerate(step.ops):
        if op.kind in (MOVE, WAIT) and (starts := [start_of[read] for read in op.reads if read in start_of]):
            start_of[at] = starts[0]
            if op.kind == WAIT:
                out.append((at, starts[0]))
    return out


def _metadata(what: str, tid: int, name: str | int, key: str = "name") -> dict[str, object]:
    """Return a Chrome metadata event, a dict, that sets property ``what`` of the process, or of track ``tid``, to
    ``name``.
    """
    return {"name": what, "ph": "M", "pid": 0, "tid": tid, "args": {key: name}}


def _span_event(name: str, tid: int, start: float, end: float, args: Mapping[str, object]) -> dict[str, object]:
    """Return the Chrome event, a dict, of a span on track ``tid``; ``start`` and ``end`` are in seconds."""
    return {"name": name, "ph": "X", "pid": 0, "tid": tid, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args}


METRICS = ("seconds", "compute_seconds", "exposed", "wire", "flops", "mfu", "memory")
_LIMIT = re.compile(r"\s*([\w.()/, ]+?)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Change:
    """The value of one metric (``seconds``, ``wire``, ``wire.dp``, ...) in two schedules, before and after."""

    metric: str
    before: float
    after: float

    @property
    def relative(self) -> float:
        """Return the change relative to the value before."""
        if self.before == self.after:
            return 0.0
        return (self.after - self.before) / self.before if self.before else float("inf")


@dataclass(frozen=True)
class Limit:
    """A condition that fails a comparison: ``exposed>+5%`` (it grows by more), ``mfu<0.4`` (the new value is below).

    Args:
        metric: the metric.
        above: whether values above the number fail, otherwise values below it.
        number: the limit.
        relative: whether the number is a share of the value before.
        change: whether it limits the change (it has a sign or a percent sign), otherwise the new value.
    """

    metric: str
    above: bool
    number: float
    relative: bool
    change: bool

    @staticmethod
    def parse(text: str) -> Limit:
        """Return the `Limit` (a condition on a metric of two schedules) that ``text`` states, such as
        ``exposed>+5%``.

        >>> Limit.parse("exposed>+5%")
        Limit(metric='exposed', above=True, number=0.05, relative=True, change=True)

        Raises:
            InputError: ``text`` is no such condition.
        """
        match = _LIMIT.fullmatch(text)
        if match is None:
            raise InputError(f"--fail-if {text!r} is not a condition", fix="write it as 'exposed>+5%' or 'mfu<0.4'")
        metric, sign, number, percent = match.groups()
        value = float(number) / (100 if percent else 1)
        return Limit(metric, sign == ">", value, bool(percent), bool(percent) or number[0] in "+-")

    def broken(self, change: Change) -> bool:
        """Return whether this limit is violated by ``change``, the values of its metric before and after."""
        value = change.after
        if self.change:
            value = change.relative if self.relative else change.after - change.before
        return value > self.number if self.above else value < self.number


def load(path: str) -> dict[str, Any]:
    """Return the data of a schedule that ``Schedule.to_json`` wrote to the file ``path``.

    Raises:
        InputError: the file does not exist, or is not a schedule.
    """
    try:
        record = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(record, dict) or not {"seconds", "totals", "memory", "collectives"} <= record.keys():
        raise InputError(
            f"{path} is not a saved schedule", fix="write one with python -m shardc schedule ... --json FILE"
        )
    return record


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return metric -> number of a saved schedule: totals of the step, memory by owner, then ``count``, ``wire`` and
    ``exposed`` by axis and kind.
    """
    out = {name: record["memory"]["peak"] if name == "memory" else record[name] for name in METRICS}
    out["count"] = len(record["collectives"])
    if record.get("tokens"):
        out["tokens_per_second"] = record["tokens"] / record["seconds"]
    out |= {f"memory.{owner}": size for owner, size in record["memory"]["by_owner"].items()}
    for by in ("axis", "kind"):
        for key, total in record["totals"][by].items():
            out |= {f"{name}.{key}": total[name] for name in ("count", "wire", "exposed")}
    return out


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return a `Change` for every metric of two saved schedules; a metric that one of them lacks is 0 there."""
    old, new = numbers(before), numbers(after)
    changes = [Change(name, old.get(name, 0), new.get(name, 0)) for name in dict.fromkeys((*old, *new))]
    # Sums of the same seconds in another order differ in their last bits: treat them as equal.
    return [replace(c, after=c.before) if isclose(c.before, c.after, rel_tol=1e-9) else c for c in changes]


def broken(changes: list[Change], limits: list[Limit]) -> list[tuple[Limit, Change]]:
    """Return the violated limits as (limit, change of its metric).

    Raises:
        InputError: a limit names an unknown metric.
    """
    by_name = {change.metric: change for change in changes}
    for limit in limits:
        if limit.metric not in by_name:
            raise InputError(f"--fail-if: there is no metric {limit.metric!r}", fix=f"use one of {', '.join(by_name)}")
    return [(limit, by_name[limit.metric]) for limit in limits if limit.broken(by_name[limit.metric])]
