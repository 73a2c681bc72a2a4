"""`Schedule`: the predicted schedule of a step, which can be shown as text, HTML, JSON, trace or picture. `build`
predicts it from the step's ops.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import fx

from shardc.cost.causes import Explainer
from shardc.cost.compute import Kernel, buffers, kernels
from shardc.cost.hardware import Hardware, price, route
from shardc.cost.step_sequence import START, Sequence
from shardc.custom_ops.expert_ops import RUN, RUN_GRADIENT
from shardc.errors import PlanError
from shardc.ir import comm_volume
from shardc.ir import graph as ir
from shardc.ir.arena import Packing, rows_of
from shardc.ir.comm import SEND_ROWS, is_ring, move_kind
from shardc.ir.gc_control import uncollected
from shardc.ir.mesh import Mesh
from shardc.report import export, page, schedule_text
from shardc.report.beside import Step
from shardc.report.findings import Finding
from shardc.report.predicted_memory import memory_of
from shardc.report.prediction import HOST, ORDERS, Collective, Prediction, Run, Span, Timeline, Transfer, simulate

if TYPE_CHECKING:
    from shardc.report.formulas import Cost, Costs


class Schedule(Prediction):
    """The predicted training step (forward and backward, without the optimizer) of one rank."""

    def cost(self, axis: str) -> Cost:
        """Return the cost of the collectives over ``axis`` as sympy formulas (``Program.costs()`` has all axes).

        Raises:
            PlanError: nothing moves over it, or there is no formula (`shardc.report.derive`).
        """
        return self.costs.cost(axis)

    @cached_property
    def costs(self) -> Costs:
        """Return the cost formulas of the program (`shardc.program.Program.costs`)."""
        return self.symbols()

    def __repr__(self) -> str:
        return schedule_text.line(self)

    def table(self, rows: int | None = 40) -> str:
        """Return step time, tokens/s, MFU and memory, then tables of the step's time, communication and memory, as
        text of at most 120 columns.

        Args:
            rows: largest number of rows of the table of collectives, by exposed time; None for no limit.
        """
        return schedule_text.table(self, rows)

    def to_json(self) -> str:
        """Return all numbers as JSON text; it is byte-identical for the same program."""
        return json.dumps(export.record(self), indent=1) + "\n"

    def to_trace(self) -> str:
        """Return a Chrome trace as JSON (for Perfetto). It has a track for compute, one per mesh axis, memory by owner,
        and arrows from collectives to waits.
        """
        return json.dumps(export.trace(self)) + "\n"

    def to_html(self, findings: Iterable[Finding] = (), beside: Prediction | Step | None = None) -> str:
        """Return a self-contained HTML page: timeline, memory by owner, sortable tables, the graph with links.

        Args:
            findings: of ``program.lint()``, for a table of them.
            beside: another schedule, drawn under this one on the same axis of time, with a table of what differs.
        """
        return page.page(self, findings, "", beside)

    def plot(self, path: str | Path) -> None:
        """Write a picture of the timeline and of memory by owner (png, svg or pdf, by the suffix of ``path``).

        Raises:
            InputError: matplotlib is not installed, or does not support the suffix.
        """
        page.save(page.draw(self), path)


@uncollected()
def build(
    step: Sequence,
    mesh: Mesh,
    hardware: Hardware,
    *,
    order: str,
    causes: Mapping[str, str],
    entries: tuple[str, ...],
    useful_flops: float,
    optimizer_copies: float,
    skew: float,
    tokens: int,
    notes: tuple[str, ...],
    symbols: Callable[[], Costs],
    model: str,
    plan: str,
    begins: Mapping[int, float],
) -> Schedule:
    """Return the predicted schedule of one rank's step.

    Args:
        step: the ops of the step.
        mesh, hardware: the target of the prediction.
        order: "graph" (as the graph is ordered) or "earliest" (as early as dependences allow).
        causes: parameter -> the plan entries of its compute layout.
        entries: all plan entries, for collectives of which only the axes tell the entry.
        useful_flops: operations of the model's dense ops per rank, without redundant ones.
        optimizer_copies: size of the optimizer's state as a multiple of the parameters (AdamW: 2).
        skew: rows of the most loaded expert rank, as a multiple of the mean.
        tokens: tokens of the global batch.
        notes: remarks for people.
        symbols: returns the cost formulas of the program.
        model, plan: model and plan as text, for titles.
        begins: position of an op -> seconds before which it does not run.

    Raises:
        MeshError: ``mesh`` is larger than the hardware's description.
        PlanError: ``order`` is unknown.
    """
    hardware.check(mesh)
    if order not in ORDERS:
        raise PlanError(f"unknown order {order!r}", fix=f"use one of {', '.join(ORDERS)}")
    outputs = buffers(step)
    work = {at: _with_skew(kernel, step.ops[at].node, skew) for at, kernel in kernels(step, outputs).items()}
    transfers = {at: _transfer(op.node, mesh, hardware, skew) for at, op in enumerate(step.ops) if op.kind == START}
    times = simulate(step, work, transfers, hardware, order, begins)
    runs = tuple(Run(work[at], span.start, span.end) for at, span in times.kernels.items())
    by_dtype: dict[torch.dtype, int] = {}
    for run in runs:
        by_dtype[run.kernel.dtype] = by_dtype.get(run.kernel.dtype, 0) + run.kernel.flops
    return Schedule(
        mesh, hardware, order, _collectives(step, transfers, times, runs, Explainer(step, causes, entries)), runs,
        memory_of(step, outputs, work, optimizer_copies), times.clock, times.seconds, useful_flops,
        max(by_dtype, key=lambda dtype: by_dtype[dtype], default=torch.float32), step, tokens, notes,
        symbols, model, plan,
    )  # fmt: skip


def _with_skew(kernel: Kernel, node: fx.Node, skew: float) -> Kernel:
    """Return ``kernel`` with its operations and bytes times ``skew`` (load of the busiest rank) if it runs experts,
    else unchanged.
    """
    if node.target not in (RUN, RUN_GRADIENT):
        return kernel
    return replace(kernel, flops=round(kernel.flops * skew), bytes=round(kernel.bytes * skew))


def expert_room_note(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Return a note on the memory reserved for more expert tokens than an even load has, as a tuple of one text; () if
    none is reserved.
    """
    room = used = 0
    for node in nodes:
        if node.target is RUN:
            rows, expected = ir.value(node.args[1]).shape[0], node.args[5]
            for value in ir.info(node).tensors[1:]:
                room, used = room + value.nbytes, used + value.nbytes * min(int(expected), rows) // rows
    if room == used:
        return ()
    return (f"rows of experts that are saved have room for {room:,} B; at an even load they fill {used:,} B",)


def _transfer(node: fx.Node, mesh: Mesh, hardware: Hardware, skew: float) -> Transfer:
    """Return the `Transfer` of a collective or host copy ``node``. ``skew`` multiplies the rows of experts that it
    sends.
    """
    if (copy := move_kind(node)) is not None:
        value = ir.value(node)
        name = ir.DTYPE_NAMES.get(value.dtype, str(value.dtype))
        return Transfer(copy, (HOST,), 1, name, value.nbytes, value.nbytes, hardware.move(value.nbytes), 0.0)
    kind = comm_volume.collective_kind(node)
    axes, ranks = comm_volume.group_of(node, mesh)
    assert kind is not None, f"{node} is no collective"
    values = [ir.value(x) for x in comm_volume.sent_tensors(node)]
    rows = rows_of(node, ranks)
    wire = round(comm_volume.wire_bytes(node, kind, ranks) * (skew if node.target is SEND_ROWS else 1))
    messages = 0 if is_ring(kind, ranks) else Packing.of(rows).messages(len(rows)) * (ranks - 1)
    return Transfer(
        kind, axes, ranks, ir.DTYPE_NAMES.get(values[0].dtype, str(values[0].dtype)), sum(v.nbytes for v in values),
        wire, price(hardware, kind, route(mesh, axes, hardware.node), wire), hardware.start_seconds(messages),
    )  # fmt: skip


def _collectives(
    step: Sequence,
    transfers: Mapping[int, Transfer],
    times: Timeline,
    runs: tuple[Run, ...],
    explain: Explainer,
) -> tuple[Collective, ...]:
    """Return the collectives and host copies of a step with their predicted times and causes.

    Args:
        transfers: position of a start -> its transfer.
        times: the simulated times.
        runs: the kernels in order.
        explain: finds the causes.
    """
    starts = [run.start for run in runs]
    return tuple(
        Collective(
            ir.info(step.ops[at].node).name, x.kind, ",".join(x.axes), x.ranks, x.dtype, x.bytes, x.wire,
            step.ops[at].phase, times.collectives[at].start, times.collectives[at].end, times.collectives[at].exposed,
            _longest_overlap(times.collectives[at], runs, starts), explain.cause(at), x.price.algorithm, x.price.link,
        )
        for at, x in transfers.items()
    )  # fmt: skip


def _longest_overlap(span: Span, runs: tuple[Run, ...], starts: list[float]) -> str:
    """Return the module whose kernels overlap the transfer ``span`` longest; "" if none do. ``starts`` has the start
    times of ``runs``, the kernels.
    """
    overlap: dict[str, float] = {}
    at = max(bisect_right(starts, span.start) - 1, 0)
    while at < len(runs) and runs[at].start < span.end:
        shared = min(runs[at].end, span.end) - max(runs[at].start, span.start)
        if shared > 0:
            overlap[runs[at].kernel.module] = overlap.get(runs[at].kernel.module, 0.0) + shared
        at += 1
    return max(overlap, key=lambda module: overlap[module], default="")
