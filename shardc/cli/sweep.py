"""``sweep``: predicts a training step on meshes of many sizes, by plan, from one capture."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import shardc
from shardc.capture import CaptureOnce
from shardc.cli import target
from shardc.cli.target import Argument, Command, options_of
from shardc.cost import hardware
from shardc.cost.hardware import Hardware
from shardc.errors import InputError, ShardcError, ShardcWarning
from shardc.ir.mesh import Mesh
from shardc.plan import Plan
from shardc.report import page
from shardc.report.export import write
from shardc.report.schedule_text import aligned
from shardc.report.units import duration, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ARGUMENTS = (
    *target.MODEL,
    Argument("--ranks", required=True, help="8..16384 (doubling from the first), or 8,24,64"),
    Argument("--plans", required=True, nargs="+", metavar="PLAN", help="""as 'fsdp("dp") | llama_tp("tp")'"""),
    Argument("--set", action="append", default=[], metavar="AXIS=SIZE", help="fix the size of an axis"),
    target.HARDWARE,
    Argument("--no-fold", action="store_true", help="analyse every one of repeated blocks"),
    Argument("--plot", metavar="FILE", help="write a picture (png, svg, pdf); needs shardc[plot]"),
    Argument("--json", metavar="FILE", help="write the rows as JSON"),
)


def run(options: argparse.Namespace) -> None:
    """Print a row for each number of ranks, plan and mesh, the fastest first, then a line for each failed combination.

    Raises:
        InputError: the ranks or axes are invalid, the target does not load, or every combination fails.
        MeshError: more ranks than the hardware description covers.
        PlanError: a plan has an error.
    """
    described = hardware.find(options.hardware)
    counts, sizes = _ranks(options.ranks), _sizes(options.set)
    described.check(Mesh(ranks=max(counts)))
    loaded, loss = target.load_with_loss(options.target, options.loss)
    default = Mesh(dp=1)  # meshes are made from the plans' axes, so fsdp() without an axis needs one
    plans = [(text, target.plan_of(text, loaded, "--plans").on(default)) for text in options.plans]
    for text, plan in plans:
        if not plan.axes:
            raise InputError(f"--plans {text}: the plan has no axis")
    for axis in sizes:
        if not any(axis in plan.axes for _, plan in plans):
            raise InputError(f"--set {axis}: no plan has axis {axis!r}")
    cases = [
        (mesh, text, plan) for n in counts for text, plan in plans for mesh in _meshes(plan.axes, n, sizes, described)
    ]
    compile_options = options_of(
        loaded, options.option, described, fold=not options.no_fold, verify=False, capture=CaptureOnce()
    )
    rows = [
        _row(loaded, mesh, text, plan, loss, compile_options, described)
        for mesh, text, plan in tqdm(cases, desc="predicting", leave=False, disable=None)
    ]
    _print(rows, described)
    good = [row for row in rows if not row.error]
    if not good:
        raise InputError("no combination of mesh and plan works")
    if options.json is not None:
        write(options.json, json.dumps([asdict(row) for row in good], indent=1) + "\n")
    if options.plot is not None:
        page.save(draw(good), options.plot)


def _ranks(text: str) -> list[int]:
    """Return the numbers of ranks in ``8..16384`` (doubling) or ``8,24,64``.

    >>> _ranks("8..64"), _ranks("8,24")
    ([8, 16, 32, 64], [8, 24])
    """
    first, dots, last = text.partition("..")
    parts = [first, last] if dots else text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--ranks {text}: not numbers of ranks", fix="write them as 8..16384 or 8,24,64")
    if not dots:
        return sorted({int(part) for part in parts})
    counts = [int(first)]
    while counts[-1] * 2 <= int(last):
        counts.append(counts[-1] * 2)
    if int(last) < counts[0]:
        raise InputError(f"--ranks {text}: the last is below the first")
    return counts


def _sizes(texts: Sequence[str]) -> dict[str, int]:
    """Return axis -> size, given the values of ``--set``, such as ``tp=8``."""
    return dict(target.mesh_of(",".join(texts), "--set").shape) if texts else {}


def _meshes(axes: Sequence[str], ranks: int, fixed: dict[str, int], described: Hardware) -> Iterator[Mesh]:
    """Yield meshes of ``ranks`` ranks with the axes ``axes``. All axes but the first together fit in a node; each has
    its size in ``fixed``, or else tries powers of two. The first axis has the remaining ranks.

    Args:
        axes: axis names.
        ranks: number of ranks.
        fixed: axis -> its size, where it is given.
        described: the hardware, which has the size of a node.
    """

    def sizes(names: Sequence[str], room: int) -> Iterator[dict[str, int]]:
        """Yield sizes of the axes ``names`` with a product of at most ``room``."""
        if not names:
            yield {}
            return
        name, *rest = names
        tried = [fixed[name]] if name in fixed else [2**n for n in range(1, max(room, 1).bit_length()) if 2**n <= room]
        for count in tried:
            for others in sizes(rest, room // count):
                yield {name: count, **others}

    for inner in sizes(axes[1:], described.node):
        left, rest = divmod(ranks, prod(inner.values()))
        if not rest and fixed.get(axes[0], left) == left:
            yield Mesh({axes[0]: left, **inner})


def _row(
    loaded: target.Target,
    mesh: Mesh,
    text: str,
    plan: Plan,
    loss: Callable[..., Any] | None,
    options: shardc.Options,
    described: Hardware,
) -> Row:
    """Return the row of the table for one mesh and plan: the prediction, or the error. ``text`` is the plan as the user
    wrote it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardcWarning)  # a line for each row would hide the table
            program = shardc.compile(loaded.model, mesh, plan, loss=loss, options=options).shardc.lower(*loaded.args)
            schedule = program.schedule(described)
    except ShardcError as error:
        return Row(mesh.ranks, str(mesh), text, error=" ".join(error.what.split()))
    return Row(
        mesh.ranks, str(mesh), text, schedule.seconds, schedule.exposed, schedule.memory.peak.total, schedule.fits(),
        schedule.mfu, schedule.wire, schedule.tokens_per_second,
    )  # fmt: skip


def _print(rows: Sequence[Row], described: Hardware) -> None:
    """Print the table of predictions, then the combinations that fail."""
    good = sorted((row for row in rows if not row.error), key=lambda row: (row.ranks, row.seconds))
    body = [
        (
            str(row.ranks), row.mesh, row.plan, duration(row.seconds), duration(row.exposed),
            f"{row.exposed / row.seconds:.1%}", size(row.memory), "yes" if row.fits else "no", f"{row.mfu:.1%}",
            f"{row.tokens_per_rank:,.0f}" if row.tokens_per_second else "-",
        )
        for row in good
    ]  # fmt: skip
    head = ("ranks", "mesh", "plan", "step", "exposed", "of step", "a rank", "fits", "MFU", "tokens/s/GPU")
    if body:
        best = min(good, key=lambda row: (not row.fits, row.seconds))
        fits = "" if best.fits else ", which does not fit"
        print(f"fastest: {duration(best.seconds)} a step on {best.mesh} with {best.plan}{fits}")
        print(f"{described.name}, {size(described.memory)} a rank; one global batch, whatever the ranks\n")
        print(aligned(body, head, left=("mesh", "plan"), cut=("plan",)))
    for row in rows:
        if row.error:
            print(f"cannot be: {row.mesh}, {row.plan}: {row.error}")


@dataclass(frozen=True)
class Row:
    """The prediction for one mesh and plan, or the error that prevents it.

    Args:
        ranks: number of ranks.
        mesh, plan: mesh and plan, as text.
        seconds: step time.
        exposed: seconds of exposed communication.
        memory: bytes of a rank at the peak.
        fits: whether these are within the hardware's memory.
        mfu: upper bound of the model FLOPs utilization.
        wire: bytes that each rank sends in a step.
        tokens_per_second: of all ranks together; 0 if the inputs have no tokens.
        error: the error as one line; "" for none.
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
    tokens_per_second: float = 0.0
    error: str = ""

    @property
    def tokens_per_rank(self) -> float:
        """Return the tokens per second of each rank; 0 if the inputs have no tokens."""
        return self.tokens_per_second / self.ranks


def draw(rows: Sequence[Row]) -> Figure:
    """Return a figure of each plan's fastest mesh over the number of ranks, hollow if it does not fit in memory.

    A dashed line is ideal scaling from a plan's fewest ranks: the same work, shared by more. If the inputs have tokens,
    the second panel has tokens per second of each GPU.
    """
    has_tokens = any(row.tokens_per_second for row in rows)
    drawn = page.figure(9, 10 if has_tokens else 7)
    panels = list(drawn.subplots(3 if has_tokens else 2, 1, sharex=True))
    times, memory = panels[0], panels[-1]
    unit, second = page.time_unit(max(row.seconds for row in rows))
    scale, byte = page.size_unit(max(row.memory for row in rows))
    for number, plan in enumerate(dict.fromkeys(row.plan for row in rows)):
        line = _fastest([row for row in rows if row.plan == plan])
        drawn_values = {0: [r.seconds * unit for r in line], -1: [r.memory / scale for r in line]}
        ideals = {0: [line[0].seconds * unit * line[0].ranks / row.ranks for row in line]}
        if has_tokens:
            drawn_values[1] = [r.tokens_per_rank for r in line]
            ideals[1] = [line[0].tokens_per_rank] * len(line)
        for at, values in drawn_values.items():
            axes, ranks, colour = panels[at], [r.ranks for r in line], f"C{number}"
            axes.plot(ranks, values, color=colour, label=plan)
            faces = [colour if r.fits else "white" for r in line]
            axes.scatter(ranks, values, c=faces, edgecolors=colour, zorder=3)
            if at in ideals:
                axes.plot(ranks, ideals[at], color=colour, linestyle="--", linewidth=0.8)
        for row in line:
            place = row.ranks, row.seconds * unit
            near = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
            times.annotate(row.mesh, place, fontsize=7, color=f"C{number}", **near)
    titles = [f"step, {second}", *(["tokens/s a GPU"] * has_tokens), f"memory at the peak, {byte} a rank"]
    for axes, title in zip(panels, titles, strict=True):
        _set_log_scales(axes)
        axes.set_ylabel(title)
    counts = sorted({row.ranks for row in rows})
    memory.set_xticks(counts, [str(n) for n in counts])
    memory.set_xlabel("ranks (hollow: does not fit; dashed: ideal scaling)")
    times.legend(fontsize="small")
    return drawn


def _fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest of ``rows`` for each number of ranks, the fewest ranks first."""
    best: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row.seconds):
        best.setdefault(row.ranks, row)
    return [best[ranks] for ranks in sorted(best)]


def _set_log_scales(axes: Any) -> None:
    """Give matplotlib's ``axes`` logarithmic scales, whose numbers are written out, and a grid."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(x=0.1, y=0.15)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.grid(alpha=0.3)


COMMANDS = (Command("sweep", "compare meshes and plans from one capture", ARGUMENTS, run),)
