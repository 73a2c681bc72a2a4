"""``measure``: real steps on gloo ranks under the profiler, beside what the schedule predicts of them."""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardc
from shardc.cli import target
from shardc.cli.real_steps import Comparison, Work, compare
from shardc.cost import hardware
from shardc.cost.hardware import Hardware, calibrated
from shardc.cost.model import CostModel
from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from shardc.plan.resolve import check_axes
from shardc.report.export import gigabytes, layers_of, milliseconds, plain, shorten, write
from shardc.report.prediction import grouped
from shardc.validate import checked

Plans = list[tuple[str, shardc.Mesh]]


HELP = "run steps on gloo ranks; compare with predicted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_model(parser)
    parser.add_argument("--nproc", type=int, required=True, help="gloo processes to start")
    parser.add_argument(
        "--plan", "--plans", dest="plans", metavar="PLAN", nargs="+", required=True,
        help="""a plan, as 'fsdp("dp")', or several, whose steps take turns""",
    )  # fmt: skip
    parser.add_argument("--mesh", help="axes and sizes, as dp=2,tp=2 (default: the plan's one axis)")
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"), help="(default: inductor)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each plan (default: 5)")
    parser.add_argument("--cost", metavar="FILE", help="what `calibrate` wrote; by default the rough description 'cpu'")
    parser.add_argument("--json", metavar="FILE", help="write the comparisons, a list")


def run(options: argparse.Namespace) -> None:
    """Prints predicted and measured: of one plan each collective and the totals, of several their totals and order.

    Raises:
        InputError, MeshError, PlanError: what is wrong with an argument.
    """
    plans = _check(options)
    described = hardware.CPU if options.cost is None else calibrated(CostModel.load(options.cost))
    for _, mesh in plans:
        described.check(mesh)
    work = Work(options.target, options.loss, options.backend, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (work, plans, described, folder, options.nproc), nprocs=options.nproc)
        records = json.loads((Path(folder) / "made.json").read_text())
    made: list[Comparison] = [checked(record, Comparison, "a comparison", tables=True) for record in records]
    if len(made) == 1:
        _print_one(made[0])
    else:
        _print_all(made)
    by = "the rough description 'cpu'" if options.cost is None else options.cost
    print(
        f"\npredicted by {by}; measured on {options.nproc} ranks, {options.backend}, the step without the optimizer: "
        f"the median of {options.steps}"
    )
    if options.json is not None:
        write(options.json, json.dumps(records, indent=1) + "\n")


def _check(options: argparse.Namespace) -> Plans:
    """The plans and their meshes; everything that one process can find wrong is found here, not on the ranks."""
    if options.nproc < 1 or options.steps < 1:
        raise InputError("--nproc and --steps are 1 or more")
    found = target.load(options.target)
    made = []
    for text in options.plans:
        plan = target.plan_of(text, found, "--plan")
        axes = plan.on(Mesh(dp=1)).axes
        if options.mesh is None and len(axes) != 1:
            raise InputError(
                f"the plan speaks of axes {', '.join(axes) or 'none'}", fix="give their sizes: --mesh dp=2,tp=2"
            )
        mesh = target.mesh_of(options.mesh or f"{axes[0]}={options.nproc}")
        if mesh.ranks != options.nproc:
            raise InputError(f"the mesh {mesh} has {mesh.ranks} ranks, and --nproc is {options.nproc}")
        check_axes(plan.on(mesh), mesh)
        made.append((text, mesh))
    if options.loss is not None:
        found.named(options.loss, "loss")
    return made


def _rank(rank: int, work: Work, plans: Plans, described: Hardware, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    made = compare(work, plans, described)
    if rank == 0:
        (Path(folder) / "made.json").write_text(json.dumps([asdict(one) for one in made]))
    dist.barrier()
    dist.destroy_process_group()


def _print_one(made: Comparison) -> None:
    """The collectives, alike ones together, then the totals."""
    groups = grouped(made.pairs, lambda pair: (pair.kind, pair.axis, layers_of(pair.tensor), pair.ran))
    body = []
    for (kind, axis, tensor, ran), of in groups.items():
        counted = None if any(p.bytes is None for p in of) else sum(p.bytes or 0 for p in of)
        body.append((
            kind if kind == ran else f"{kind}, ran {ran}", axis, shorten(tensor, 48), str(len(of)),
            str(sum(p.predicted_bytes for p in of)), "-" if counted is None else str(counted),
            milliseconds(sum(p.predicted_seconds for p in of)), milliseconds(sum(p.seconds for p in of)),
        ))  # fmt: skip
    head = ("kind", "axis", "tensor", "count", "predicted B", "counted B", "predicted ms", "measured ms")
    print(plain(body, head) + "\n")
    sent, counted = made.bytes
    rows = [
        ("collectives", str(made.counts[0]), str(made.counts[1]), _off(*made.counts)),
        ("bytes sent", str(sent), "-" if counted is None else str(counted), _off(sent, counted)),
        ("step ms", *map(milliseconds, made.seconds), _off(*made.seconds)),
        ("exposed ms", *map(milliseconds, made.exposed), _off(*made.exposed)),
        ("peak GB", *map(gigabytes, made.memory), _off(*made.memory)),
    ]
    print(plain(rows, ("of a step", "predicted", "measured", "off by")))


def _print_all(made: list[Comparison]) -> None:
    """A row for each plan, then whether the order by time is the one predicted."""
    body = []
    for one in made:
        sent, counted = one.bytes
        body.append((
            one.plan, *map(milliseconds, one.seconds), _off(*one.seconds), milliseconds(one.noise),
            milliseconds(min(one.timed)), *map(gigabytes, one.memory), _off(*one.memory),
            str(sent), "-" if counted is None else "equal" if counted == sent else str(counted),
        ))  # fmt: skip
    head = (
        "plan", "step ms", "measured", "off by", "+-", "fastest", "peak GB", "measured", "off by", "bytes sent",
        "counted",
    )  # fmt: skip
    print(plain(body, head) + "\n")
    for at, name in enumerate(("predicted", "measured")):
        print(f"{name} order: {', '.join(one.plan for one in sorted(made, key=lambda one: one.seconds[at]))}")
    print("\n".join(order(made)))


def order(made: list[Comparison]) -> list[str]:
    """Whether the plans' measured times are in the order that was predicted: a line for each two that are not."""
    lines = []
    for one, other in combinations(sorted(made, key=lambda each: each.seconds[0]), 2):
        apart = one.seconds[1] - other.seconds[1]
        if apart > 0:
            noise = (one.noise**2 + other.noise**2) ** 0.5
            known = "more" if apart > noise else "not more"
            lines.append(
                f"{other.plan} is faster than {one.plan}, by {milliseconds(apart)} ms, {known} than these medians "
                f"may be off; predicted was slower, by {milliseconds(other.seconds[0] - one.seconds[0])} ms"
            )
    return lines or ["the orders agree"]


def _off(predicted: float, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else "-"
