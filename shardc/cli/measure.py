"""``measure``: runs real steps on gloo ranks under the profiler, and compares them with the prediction."""

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
    """Print predicted and measured numbers: of one plan each collective and totals, of several totals and order.

    Raises:
        InputError, MeshError, PlanError: an argument is wrong.
    """
    plans = _check(options)
    described = hardware.CPU if options.cost is None else calibrated(CostModel.load(options.cost))
    for _, mesh in plans:
        described.check(mesh)
    work = Work(options.target, options.loss, options.backend, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (work, plans, described, folder, options.nproc), nprocs=options.nproc)
        records = json.loads((Path(folder) / "comparisons.json").read_text())
    comparisons: list[Comparison] = [checked(record, Comparison, "a comparison", tables=True) for record in records]
    if len(comparisons) == 1:
        _print_one(comparisons[0])
    else:
        _print_all(comparisons)
    by = "the rough description 'cpu'" if options.cost is None else options.cost
    print(
        f"\npredicted by {by}; measured on {options.nproc} ranks, {options.backend}, the step without the optimizer: "
        f"the median of {options.steps}"
    )
    if options.json is not None:
        write(options.json, json.dumps(records, indent=1) + "\n")


def _check(options: argparse.Namespace) -> Plans:
    """Return the plans and their meshes, after all checks that one process can do, before ranks are started."""
    if options.nproc < 1 or options.steps < 1:
        raise InputError("--nproc and --steps are 1 or more")
    loaded = target.load(options.target)
    plans = []
    for text in options.plans:
        plan = target.plan_of(text, loaded, "--plan")
        axes = plan.on(Mesh(dp=1)).axes
        if options.mesh is None and len(axes) != 1:
            raise InputError(
                f"the plan has the axes {', '.join(axes) or 'none'}", fix="give their sizes: --mesh dp=2,tp=2"
            )
        mesh = target.mesh_of(options.mesh or f"{axes[0]}={options.nproc}")
        if mesh.ranks != options.nproc:
            raise InputError(f"the mesh {mesh} has {mesh.ranks} ranks, and --nproc is {options.nproc}")
        check_axes(plan.on(mesh), mesh)
        plans.append((text, mesh))
    if options.loss is not None:
        loaded.named(options.loss, "loss")
    return plans


def _rank(rank: int, work: Work, plans: Plans, described: Hardware, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    comparisons = compare(work, plans, described)
    if rank == 0:
        (Path(folder) / "comparisons.json").write_text(json.dumps([asdict(comparison) for comparison in comparisons]))
    dist.barrier()
    dist.destroy_process_group()


def _print_one(comparison: Comparison) -> None:
    """Print the collectives, equal ones grouped, and the totals."""
    groups = grouped(comparison.pairs, lambda pair: (pair.kind, pair.axis, layers_of(pair.tensor), pair.ran))
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
    sent, counted = comparison.bytes
    rows = [
        ("collectives", str(comparison.counts[0]), str(comparison.counts[1]), _off(*comparison.counts)),
        ("bytes sent", str(sent), "-" if counted is None else str(counted), _off(sent, counted)),
        ("step ms", *map(milliseconds, comparison.seconds), _off(*comparison.seconds)),
        ("exposed ms", *map(milliseconds, comparison.exposed), _off(*comparison.exposed)),
        ("peak GB", *map(gigabytes, comparison.memory), _off(*comparison.memory)),
    ]
    print(plain(rows, ("of a step", "predicted", "measured", "off by")))


def _print_all(comparisons: list[Comparison]) -> None:
    """Print a row per plan, and whether the order by measured time is the predicted one."""
    body = []
    for row in comparisons:
        sent, counted = row.bytes
        body.append((
            row.plan, *map(milliseconds, row.seconds), _off(*row.seconds), milliseconds(row.noise),
            milliseconds(min(row.timed)), *map(gigabytes, row.memory), _off(*row.memory),
            str(sent), "-" if counted is None else "equal" if counted == sent else str(counted),
        ))  # fmt: skip
    head = (
        "plan", "step ms", "measured", "off by", "+-", "fastest", "peak GB", "measured", "off by", "bytes sent",
        "counted",
    )  # fmt: skip
    print(plain(body, head) + "\n")
    for at, name in enumerate(("predicted", "measured")):
        print(f"{name} order: {', '.join(row.plan for row in sorted(comparisons, key=lambda c: c.seconds[at]))}")
    print("\n".join(order(comparisons)))


def order(comparisons: list[Comparison]) -> list[str]:
    """Return a line for each pair of plans whose measured times are not in the predicted order."""
    lines = []
    for first, second in combinations(sorted(comparisons, key=lambda c: c.seconds[0]), 2):
        difference = first.seconds[1] - second.seconds[1]
        if difference > 0:
            noise = (first.noise**2 + second.noise**2) ** 0.5
            significance = "more" if difference > noise else "not more"
            lines.append(
                f"{second.plan} is faster than {first.plan}, by {milliseconds(difference)} ms, {significance} than "
                f"these medians may be off; predicted was slower, by "
                f"{milliseconds(second.seconds[0] - first.seconds[0])} ms"
            )
    return lines or ["the orders agree"]


def _off(predicted: float, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else "-"
