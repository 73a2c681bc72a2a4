"""``measure``: runs real steps of a model on gloo ranks, under one or several plans, and compares with predictions."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc._compat import PyTree, pytree
from shardc.cli import target
from shardc.cli.measured import Comparison, off, pairs_of, phases_of, step_of
from shardc.cli.target import Argument, Command, options_of
from shardc.cost import hardware
from shardc.cost.hardware import Hardware, calibrated
from shardc.cost.model import CostModel
from shardc.errors import InputError, PlanError
from shardc.ir.mesh import Mesh
from shardc.plan.resolve import check_axes
from shardc.report.export import write
from shardc.report.predicted_schedule import Schedule
from shardc.report.schedule_text import aligned
from shardc.report.units import duration, size
from shardc.runtime.profile import Profiled, alive, profile_step
from shardc.validate import checked

WARM_UP = 2  # steps that are not timed; the first compiles
Plans = list[tuple[str, shardc.Mesh]]  # (plan as text, its mesh)


@dataclass(frozen=True)
class _Training:
    """A model compiled under one plan on this rank, with its optimizer, inputs and predicted schedule.

    Args:
        plan: the plan, as text.
        module: the compiled module.
        schedule: its predicted schedule.
        inputs: this rank's inputs of a step.
        optimizer: the optimizer of the module's parameters.
    """

    plan: str
    module: Any
    schedule: Schedule
    inputs: tuple[Tensor, ...]
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        """Run forward and backward."""
        outputs = [x for x in _tensors(self.module(*self.inputs)) if x.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    def update(self) -> None:
        """Run the optimizer and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare(options: argparse.Namespace, plans: Plans, described: Hardware) -> list[Comparison]:
    """Train under each plan on this rank; return a `Comparison` (predicted, measured) for each. All ranks call it.

    The plans take turns, one step each.

    Args:
        options: the arguments of ``measure``.
        plans: (plan as text, mesh) of each plan.
        described: the hardware of the prediction.
    """
    trained = [_training(options, plan, mesh, described) for plan, mesh in plans]
    times: list[list[float]] = [[] for _ in trained]
    for _ in range(WARM_UP + options.steps):
        for training, seconds in zip(trained, times, strict=True):
            seconds.append(_timed(training.step))
            training.update()
    slowest = torch.tensor(times, dtype=torch.float64)[:, WARM_UP:]
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [_profiled(x, tuple(seconds), options.html) for x, seconds in zip(trained, slowest.tolist(), strict=True)]


def _training(options: argparse.Namespace, plan: str, mesh: shardc.Mesh, described: Hardware) -> _Training:
    """Return the model compiled under ``plan`` on this rank, with its predicted schedule."""
    torch.manual_seed(0)  # the same model on every rank
    loaded, loss = target.load_with_loss(options.target, options.loss)
    names, sizes = zip(*mesh.shape, strict=True)
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    parsed_plan = target.plan_of(plan, loaded, "--plan")
    compile_options = options_of(loaded, options.option)
    module = shardc.compile(
        loaded.model, device_mesh, parsed_plan, loss=loss, backend=options.backend, options=compile_options
    )
    _init_if_meta(module, loaded.model)
    schedule = module.shardc.lower(*loaded.args).schedule(described)
    cut = module.shardc.shard_inputs(*(_with_values(x) for x in loaded.args))
    inputs = cut if isinstance(cut, tuple) else (cut,)
    return _Training(plan, module, schedule, inputs, torch.optim.AdamW(module.parameters(), lr=0.0))


def _init_if_meta(module: Any, model: object) -> None:
    """Initialise the compiled ``module`` on the CPU if the ``model`` that it was compiled from is on ``meta``."""
    if isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters()):
        module.to_empty(device="cpu")
        module.shardc.init_weights()


def _timed(step: Callable[[], None]) -> float:
    """Return the seconds that a call of ``step`` takes on this rank. All ranks start it together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _profiled(training: _Training, timed: tuple[float, ...], html: str | None) -> Comparison:
    """Return the comparison of one plan, after one more step under the profiler.

    Args:
        timed: seconds of steps.
        html: file for a page of it, which rank 0 writes.
    """
    dist.barrier()
    module, schedule = training.module, training.schedule
    allocated = alive([*module.parameters(), *module.buffers(), *training.inputs, *_state_tensors(training.optimizer)])
    seen: Profiled = profile_step(training.step)
    training.optimizer.zero_grad()
    memory = allocated + seen.allocated + module.shardc.memory().arena
    waited = sum(end - start for start, end in seen.waits) + sum(ran.called for ran in seen.collectives)
    comparison = Comparison(
        training.plan, pairs_of(schedule, seen, _latest(seen)), (len(schedule.collectives), len(seen.collectives)),
        (schedule.seconds, statistics.median(timed)), timed, (schedule.exposed, waited),
        (schedule.memory.peak.total, memory), phases_of(schedule, seen),
    )  # fmt: skip
    if html is not None and dist.get_rank() == 0:
        write(html, schedule.to_html(beside=step_of(schedule, seen, comparison.tables(), "a step of rank 0, profiled")))
    return comparison


def _latest(seen: Profiled) -> list[float]:
    """Return the time at which the last of all ranks started each collective of ``seen``, in seconds since the start of
    this rank's step.

    ``seen`` is this rank's profile. All ranks call this.
    """
    starts = torch.tensor([seen.begin + round(ran.start * 1e9) for ran in seen.collectives], dtype=torch.int64)
    dist.all_reduce(starts, dist.ReduceOp.MAX)
    return [(start - seen.begin) / 1e9 for start in starts.tolist()]


def _with_values(x: PyTree) -> PyTree:
    """Return the example argument ``x`` with values: a tensor on the meta device is replaced by random numbers, or
    zeros if it holds integers.
    """
    if not isinstance(x, Tensor) or not x.is_meta:
        return x
    return torch.randn(x.shape, dtype=x.dtype) if x.is_floating_point() else torch.zeros(x.shape, dtype=x.dtype)


def _tensors(outputs: PyTree) -> list[Tensor]:
    """Return the tensors in the outputs of a model."""
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state."""
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]


ARGUMENTS = (
    *target.MODEL,
    Argument("--nproc", type=int, required=True, help="gloo processes to start"),
    Argument(
        "--plan", "--plans", dest="plans", metavar="PLAN", nargs="+", required=True,
        help="""a plan, as 'fsdp("dp")', or several, whose steps take turns""",
    ),
    Argument("--mesh", help="axes and sizes, as dp=2,tp=2 (default: the plan's one axis)"),
    Argument("--backend", default="inductor", choices=("inductor", "eager"), help="(default: inductor)"),
    Argument("--steps", type=int, default=5, help="timed steps of each plan (default: 5)"),
    Argument("--cost", metavar="FILE", help="what `calibrate` wrote; by default the rough description 'cpu'"),
    Argument("--json", metavar="FILE", help="write the comparisons, a list"),
    Argument("--html", metavar="FILE", help="write a page of one plan: the measured step under the predicted"),
)  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Run real steps and print predicted and measured numbers: for one plan, of its collectives and in total; for
    several plans, their totals and order.

    Raises:
        InputError, MeshError, PlanError: an argument is wrong.
    """
    plans = _check(options)
    described = hardware.CPU if options.cost is None else calibrated(CostModel.load(options.cost))
    for _, mesh in plans:
        described.check(mesh)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options, plans, described, folder), nprocs=options.nproc)
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
    """Return (text, mesh) of each plan to measure. First checks all that one process can check, before ranks are
    started.

    Raises:
        InputError, MeshError, PlanError: an argument is wrong.
    """
    if options.nproc < 1 or options.steps < 1:
        raise InputError("--nproc and --steps are 1 or more")
    if options.html is not None and len(options.plans) > 1:
        raise InputError(f"--html: a page is of one plan, and there are {len(options.plans)}")
    loaded, _ = target.load_with_loss(options.target, options.loss)
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
        if (pp := plan.setting("pp")) is not None:
            raise PlanError(
                "measure compares what all ranks run alike, and does not know the stages of a pipeline",
                plan_entry=str(pp),
                fix="leave pp out of the plan, or see what schedule predicts",
            )
        plans.append((text, mesh))
    return plans


def _rank(rank: int, options: argparse.Namespace, plans: Plans, described: Hardware, folder: str) -> None:
    """Measure and compare the plans as rank ``rank`` of the new processes. Rank 0 writes the comparisons to
    ``folder``.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.nproc)
    comparisons = compare(options, plans, described)
    if rank == 0:
        (Path(folder) / "comparisons.json").write_text(json.dumps([asdict(comparison) for comparison in comparisons]))
    dist.barrier()
    dist.destroy_process_group()


def _print_one(comparison: Comparison) -> None:
    """Print the step, then the tables of one plan: totals, phases, collectives and lost overlap."""
    predicted, measured = comparison.seconds
    print(f"step {duration(measured)} measured, {duration(predicted)} predicted: off by {off(predicted, measured)}")
    for table in comparison.tables():
        if table.rows:
            print("\n" + table.text())


def _print_all(comparisons: list[Comparison]) -> None:
    """Print a table of predicted and measured numbers with a row per plan. Then print the plans ordered by predicted
    and by measured time.
    """
    body = []
    for row in comparisons:
        sent, counted = row.bytes
        body.append((
            row.plan, *map(duration, row.seconds), off(*row.seconds), duration(row.noise), duration(min(row.timed)),
            *map(size, row.memory), off(*row.memory), str(sent),
            "-" if counted is None else "equal" if counted == sent else str(counted),
        ))  # fmt: skip
    head = "plan", "step", "measured", "off by", "+-", "fastest", "peak", "measured", "off by", "bytes sent", "counted"
    fastest = min(comparisons, key=lambda row: row.seconds[1])
    print(f"fastest: {fastest.plan}, {duration(fastest.seconds[1])} a step")
    print("\n" + aligned(body, head, left=("plan",), cut=("plan",)) + "\n")
    for at, name in enumerate(("predicted", "measured")):
        print(f"{name} order: {', '.join(row.plan for row in sorted(comparisons, key=lambda c: c.seconds[at]))}")
    print("\n".join(order(comparisons)))


def order(comparisons: list[Comparison]) -> list[str]:
    """Return a line for each pair of plans whose measured times are not in the predicted order; if there is none, one
    line that says so.
    """
    lines = []
    for first, second in combinations(sorted(comparisons, key=lambda c: c.seconds[0]), 2):
        difference = first.seconds[1] - second.seconds[1]
        if difference > 0:
            noise = (first.noise**2 + second.noise**2) ** 0.5
            significance = "more" if difference > noise else "not more"
            lines.append(
                f"{second.plan} is faster than {first.plan}, by {duration(difference)}, {significance} than "
                f"these medians may be off; predicted was slower, by "
                f"{duration(second.seconds[0] - first.seconds[0])}"
            )
    return lines or ["the orders agree"]


COMMANDS = (Command("measure", "run steps on gloo ranks; compare with predicted", ARGUMENTS, run),)
