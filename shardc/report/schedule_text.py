"""A schedule as text: the answer first (step, tokens/s, MFU, memory), then tables of at most 120 columns."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from shardc.cost.compute import layers_of
from shardc.ir import graph as ir
from shardc.report.export import shorten
from shardc.report.predicted_memory import PeakTensor
from shardc.report.prediction import HOST, Collective, Prediction, Total, grouped
from shardc.report.units import duration, operations, percent, size

WIDTH = 120  # columns of a table
LARGEST = 10  # rows of the table of tensors at the peak
_LEAST = 12  # characters that a column keeps where a table is too wide
PHASES = ("forward", "backward", "recompute")


def line(schedule: Prediction) -> str:
    """Return the schedule as one line: mesh, hardware, step time, memory, and whether it fits."""
    fits = "fits" if schedule.fits() else "does not fit"
    peak = size(schedule.peak)
    return (
        f"<Schedule {schedule.mesh} on {schedule.hardware.name}: {duration(schedule.seconds)} a step, {peak}, {fits}>"
    )


def table(schedule: Prediction, rows: int | None) -> str:
    """Return the prediction as text: first step time, tokens/s, MFU and memory, then tables (phases, kernels,
    collectives, plan entries, axes and kinds, memory at the peak).

    Args:
        rows: largest number of rows of the table of collectives; None for no limit.
    """
    return document(schedule, answer(schedule), of_rank(schedule, rows))


def document(schedule: Prediction, first: Seq[str], parts: Iterable[str]) -> str:
    """Return a report as text: a title, the lines ``first``, the notes of the prediction, and the ``parts`` that are
    not empty, each behind an empty line.
    """
    title = f"{f'{schedule.model}, ' if schedule.model else ''}mesh {schedule.mesh} on {schedule.hardware.name}"
    head = "\n".join([f"{title}, {schedule.order} order", *first, *schedule.notes])
    return "\n\n".join([head, *filter(None, parts)]) + "\n"


def of_rank(schedule: Prediction, rows: int | None) -> list[str]:
    """Return the tables of one rank; ``rows`` as for `table`."""
    return [
        _phases(schedule),
        _kernels(schedule),
        *_transfers(schedule, rows),
        *(_totals(by, schedule.totals(by)) for by in ("axis", "kind")),
        _owners(schedule),
        _tensors(schedule),
    ]


def answer(schedule: Prediction) -> list[str]:
    """Return the most important lines of a report: step time, tokens/s and MFU where they are known, memory."""
    return [*lines(schedule), memory_line(schedule, f"in {schedule.memory.peak_op}")]


def lines(schedule: Prediction) -> list[str]:
    """Return the lines of text about step time, tokens/s and MFU."""
    ranks, hardware = schedule.mesh.ranks, schedule.hardware
    step = f"{duration(schedule.seconds)} = compute {duration(schedule.compute_seconds)}"
    out = [("step", f"{step} + exposed communication {duration(schedule.exposed)}")]
    if schedule.tokens:
        rate = schedule.tokens_per_second
        of = f"{schedule.tokens:,} tokens a step on {ranks} rank{'s' * (ranks > 1)}"
        out.append(("tokens/s", f"{rate:,.0f} in all, {rate / ranks:,.0f} a rank; {of}"))
    peak = hardware.peak(schedule.dtype)
    if schedule.useful_flops and peak:
        dtype = ir.DTYPE_NAMES.get(schedule.dtype, str(schedule.dtype))
        out.append(("MFU", f"at most {percent(schedule.mfu)} of {operations(peak)}FLOP/s in {dtype}"))
    return [f"{name:<8}  {text}" for name, text in out]


def memory_line(schedule: Prediction, where: str) -> str:
    """Return the line of text about memory: bytes at the peak and in total, and whether they fit. ``where`` says where
    the peak is.
    """
    room = schedule.hardware.memory - schedule.peak
    fits = f"fits, {size(room)} free" if schedule.fits() else f"does not fit: {size(-room)} too much"
    return f"memory    {size(schedule.peak)} of {size(schedule.hardware.memory)} at the peak, {where}: {fits}"


def _phases(schedule: Prediction) -> str:
    """Return the table of phases as text: the kernels and collectives of forward, backward and recompute, and the
    optimizer.
    """
    runs, transfers = grouped(schedule.runs, schedule.phase_of), grouped(schedule.transfers, lambda c: c.phase)
    body = []
    for phase in PHASES:
        kernels, moved = runs.get(phase, []), transfers.get(phase, [])
        if kernels or moved:
            seconds = duration(sum(run.seconds for run in kernels))
            body.append((phase, str(len(kernels)), seconds, *_cells(Total.of(moved))))
    optimizer = "optimizer, not in the step", "1", duration(schedule.optimizer_seconds), "-", "-", "-", "-"
    head = ("phase", "kernels", "compute", "collectives", "sent", "on the wire", "exposed")
    return aligned([*body, optimizer], head, left=("phase",))


def _kernels(schedule: Prediction) -> str:
    """Return the table of kernels by kind, with the rates that the prediction assumes and their shares of the peaks."""
    groups = grouped(schedule.runs, lambda run: run.kernel.kind)
    body = []
    for name, of in sorted(groups.items(), key=lambda item: (-sum(run.seconds for run in item[1]), item[0])):
        seconds = sum(run.seconds for run in of)
        flops, moved = sum(run.kernel.flops for run in of), sum(run.kernel.bytes for run in of)
        peak = flops / seconds / schedule.hardware.peak(of[0].kernel.dtype) if seconds else 0.0
        streamed = moved / seconds / schedule.hardware.memory_bandwidth if seconds else 0.0
        body.append((
            name, str(len(of)), duration(seconds),
            percent(seconds / schedule.compute_seconds) if schedule.compute_seconds else "-",
            f"{operations(flops / seconds)}FLOP/s" if flops and seconds else "-", percent(peak) if flops else "-",
            f"{size(moved / seconds)}/s" if seconds else "-", percent(streamed),
        ))  # fmt: skip
    head = ("kernels", "count", "time", "of compute", "computes", "of peak", "reads and writes", "of peak")
    return aligned(body, head, left=("kernels",)) if body else ""


def _cells(total: Total) -> tuple[str, str, str, str]:
    """Return the sums over some collectives as text: their number, bytes sent, time on the wire and exposed time."""
    return str(total.count), size(total.wire), duration(total.seconds), duration(total.exposed)


def _cause(c: Collective) -> str:
    """Return the cause of a collective as text: the plan entry that asks for it, or else the op that needs it; "-" if
    unknown.
    """
    return c.cause.entry or layers_of(c.cause.reason) or "-"


def _transfers(schedule: Prediction, rows: int | None) -> list[str]:
    """Return two tables as text: of the collectives, and of their causes. The first names a cause by its number in the
    second. [] if nothing is communicated.

    Args:
        rows: largest number of rows of the table of collectives; None for no limit.
    """
    causes = {cause: Total.of(of) for cause, of in grouped(schedule.transfers, _cause).items()}
    ranked = sorted(causes, key=lambda cause: (-causes[cause].exposed, cause))
    number = {cause: str(at) for at, cause in enumerate(ranked, 1)}

    def row_key(c: Collective) -> tuple[object, ...]:
        """Return the key of the row of a collective. Equal collectives of repeated layers have the same key."""
        return c.kind, c.axis, c.dtype, c.wire, c.phase, schedule.stage_of(c), layers_of(c.cause.tensor), _cause(c)

    groups = [(of[0], Total.of(of)) for of in grouped(schedule.transfers, row_key).values()]
    ordered = sorted(groups, key=lambda group: (-group[1].exposed, -group[1].wire))
    body = []
    for c, total in ordered if rows is None else ordered[:rows]:
        over = c.axis if c.axis == HOST else f"{c.axis} ({c.ranks})"
        tensor = layers_of(c.cause.tensor) if total.count > 1 else c.cause.tensor
        stage = schedule.stage_of(c)
        phase = c.phase if stage is None else f"{c.phase}, stage {stage}"
        body.append((c.kind, over, c.dtype, *_cells(total), phase, tensor, number[_cause(c)]))
    if not body:
        return []
    head = ("collective", "over (ranks)", "dtype", "count", "sent", "time", "exposed", "phase", "tensor", "why")
    text = aligned(body, head, left=("collective", "over (ranks)", "dtype", "phase", "tensor"), cut=("tensor",))
    if len(ordered) > len(body):
        text += f"\n... and {len(ordered) - len(body)} more rows; --rows 0 prints all"
    entries = [(number[cause], *_cells(causes[cause]), cause) for cause in ranked]
    last = "plan entry, or the op that needs it"
    return [text, aligned(entries, ("why", "count", "sent", "time", "exposed", last), left=(last,), cut=(last,))]


def _totals(by: str, totals: dict[str, Total]) -> str:
    """Return the table of ``totals`` as text, with a row for each axis or each kind of collective, as ``by`` says; ""
    without totals.
    """
    body = [(key, *_cells(total)) for key, total in totals.items()]
    return aligned(body, (by, "count", "sent", "time", "exposed"), left=(by,)) if body else ""


def _owners(schedule: Prediction) -> str:
    """Return the table of memory at the peak by owner, and of memory on the host, if there is any."""
    peak = schedule.memory.peak.total
    rows = [
        (owner, size(nbytes), percent(nbytes / peak)) for owner, nbytes in schedule.memory.by_owner().items() if nbytes
    ]
    on_host = [(f"{owner}, on the host", size(nbytes), "-") for owner, nbytes in schedule.memory.host]
    return aligned(
        [*rows, ("total", size(peak), percent(1)), *on_host], ("at the peak", "memory", "share"), left=("at the peak",)
    )


def _tensors(schedule: Prediction) -> str:
    """Return the table of the largest tensors at the memory peak as text. Equal tensors of repeated layers share one
    row.
    """
    body = [
        (size(sum(x.bytes for x in of)), str(len(of)), size(of[0].bytes), of[0].owner, *_tensor_cells(of))
        for of in largest(schedule.memory.tensors_at_peak)
    ]
    head = ("at the peak", "count", "each", "owner", "tensor", "module", "source")
    return aligned(body, head, left=("owner", "tensor", "module", "source"), cut=("tensor", "module", "source"))


def largest(tensors: Seq[PeakTensor]) -> list[list[PeakTensor]]:
    """Return the largest of ``tensors`` (`LARGEST` of them), as lists: tensors that differ only in the number of a
    repeated layer form one list.
    """

    def key(x: PeakTensor) -> tuple[object, ...]:
        return x.owner, x.bytes, layers_of(x.name), layers_of(x.module), x.source

    groups = grouped(tensors, key).values()
    return sorted(groups, key=lambda of: (-sum(x.bytes for x in of), of[0].name))[:LARGEST]


def _tensor_cells(of: list[PeakTensor]) -> tuple[str, str, str]:
    """Return (name, module, source line) of the tensors in ``of``, which are equal but for the number of a repeated
    layer. The path of the source line is cut to the file and its folder.
    """
    first = of[0]
    name, module = (layers_of(text) if len(of) > 1 else text for text in (first.name, first.module))
    return name, module or "-", in_folder(first.source)


def in_folder(source: str) -> str:
    """Return a source line whose path is cut to the folder and name of the file; "-" for none."""
    return "/".join(source.split("/")[-2:]) or "-"


def aligned(rows: Seq[Seq[str]], head: Seq[str], left: Seq[str], cut: Seq[str] = ()) -> str:
    """Return ``rows`` as a text table without lines, of at most `WIDTH` columns of characters.

    Args:
        rows: the cells of each row.
        head: the names of the columns.
        left: the columns that are aligned left; all others hold numbers, and are aligned right.
        cut: the columns whose cells are shortened if the table is too wide, the first of them first.
    """
    cells = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for at in map(head.index, cut):
        excess = max(sum(widths) + 2 * (len(widths) - 1) - WIDTH, 0)
        widths[at] = min(widths[at], max(widths[at] - excess, _LEAST, len(head[at])))
    sides = ["<" if name in left else ">" for name in head]
    lines = (
        "  ".join(f"{shorten(cell, width):{side}{width}}" for cell, width, side in zip(row, widths, sides, strict=True))
        for row in cells
    )
    return "\n".join(text.rstrip() for text in lines)
