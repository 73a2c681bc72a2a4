"""``measure``: real steps on gloo ranks under the profiler, beside what the schedule predicts of them."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc._compat import pytree
from shardc.analysis import hardware
from shardc.analysis.cost import CostModel
from shardc.analysis.export import gigabytes, layers_of, milliseconds, shorten
from shardc.analysis.hardware import Hardware, calibrated
from shardc.analysis.schedule import Collective, Schedule
from shardc.cli import target
from shardc.errors import InputError
from shardc.ir.tally import wire_elements
from shardc.plan.resolve import check_axes, entry_axes
from shardc.runtime.profile import Profiled, Ran, profile_step


@dataclass(frozen=True)
class Pair:
    """A collective as predicted and as it ran.

    Args:
        kind, axis, tensor: of the prediction.
        ran: the kind that ran.
        predicted_bytes, bytes: that this rank sent; None where the profiler does not tell.
        predicted_seconds, seconds: from start to end.
    """

    kind: str
    axis: str
    tensor: str
    ran: str
    predicted_bytes: int
    bytes: int | None
    predicted_seconds: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """A step as predicted and as it ran on rank 0.

    Args:
        pairs: collectives in their order.
        counts: of collectives, (predicted, run).
        seconds: of a step, (predicted, the median of those that were timed).
        exposed: seconds, (predicted exposed, run: in calls and waits of collectives, with the profiler on).
        memory: bytes that are held at the peak, (predicted, run).
    """

    pairs: tuple[Pair, ...]
    counts: tuple[int, int]
    seconds: tuple[float, float]
    exposed: tuple[float, float]
    memory: tuple[int, int]

    @property
    def bytes(self) -> tuple[int, int | None]:
        """(predicted, counted) bytes that the rank sent; None where one of them was not counted."""
        counted = [pair.bytes for pair in self.pairs]
        known = [count for count in counted if count is not None]
        return sum(p.predicted_bytes for p in self.pairs), sum(known) if len(known) == len(counted) else None


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "measure", help="run steps on gloo ranks; compare with predicted"
    )
    parser.add_argument("target", metavar="TARGET", help="path.py:function or module:function -> (model, example_args)")
    parser.add_argument("--nproc", type=int, required=True, help="gloo processes to start")
    parser.add_argument("--plan", required=True, help="""a plan, as 'fsdp("dp")'""")
    parser.add_argument("--mesh", help="axes and sizes, as dp=2,tp=2 (default: the plan's one axis)")
    parser.add_argument("--loss", metavar="NAME", help="a function of the target's file: loss(output, *last arguments)")
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"), help="(default: inductor)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (default: 5)")
    parser.add_argument("--cost", metavar="FILE", help="what `calibrate` wrote; by default the rough description 'cpu'")
    parser.add_argument("--json", metavar="FILE", help="write the comparison")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints predicted and measured, of each collective and in total.

    Raises:
        InputError, MeshError, PlanError: what is wrong with an argument.
    """
    found, mesh = _check(options)
    described = hardware.CPU if options.cost is None else calibrated(CostModel.load(options.cost))
    described.check(mesh)
    del found
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options, mesh, described, folder), nprocs=options.nproc)
        record = json.loads((Path(folder) / "made.json").read_text())
    pairs = tuple(Pair(**pair) for pair in record.pop("pairs"))
    made = Comparison(pairs, **{name: tuple(both) for name, both in record.items()})
    _print(made, options)
    if options.json is not None:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(asdict(made), indent=1) + "\n")


def _check(options: argparse.Namespace) -> tuple[target.Target, shardc.Mesh]:
    """The target and the mesh; everything that one process can find wrong is found here, not on the ranks."""
    if options.nproc < 1 or options.steps < 1:
        raise InputError("--nproc and --steps are 1 or more")
    found = target.load(options.target)
    plan = target.plan_of(options.plan, found, "--plan")
    if options.loss is not None:
        found.named(options.loss, "loss")
    axes = list(dict.fromkeys(axis for entry in plan.entries for axis in entry_axes(entry)))
    if options.mesh is None and len(axes) != 1:
        raise InputError(
            f"the plan speaks of axes {', '.join(axes) or 'none'}", fix="give their sizes: --mesh dp=2,tp=2"
        )
    mesh = target.mesh_of(options.mesh or f"{axes[0]}={options.nproc}")
    if mesh.ranks != options.nproc:
        raise InputError(f"the mesh {mesh} has {mesh.ranks} ranks, and --nproc is {options.nproc}")
    check_axes(plan, mesh)
    return found, mesh


def _rank(rank: int, options: argparse.Namespace, mesh: shardc.Mesh, described: Hardware, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.nproc)
    made = compare(options, mesh, described)
    if rank == 0:
        (Path(folder) / "made.json").write_text(json.dumps(asdict(made)))
    dist.barrier()
    dist.destroy_process_group()


def compare(options: argparse.Namespace, mesh: shardc.Mesh, described: Hardware) -> Comparison:
    """Trains on this rank and compares; all ranks call it."""
    found = target.load(options.target)
    plan = target.plan_of(options.plan, found, "--plan")
    loss = None if options.loss is None else found.named(options.loss, "loss")
    names, sizes = zip(*mesh.shape, strict=True)
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    module = shardc.compile(found.model, device_mesh, plan, loss=loss, backend=options.backend)
    if isinstance(found.model, nn.Module) and any(p.is_meta for p in found.model.parameters()):
        module.to_empty(device="cpu")
        module.init_weights()
    schedule = module.lower(*found.args).schedule(described)
    cut = module.shard_inputs(*(_real(x) for x in found.args))
    inputs = cut if isinstance(cut, tuple) else (cut,)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)

    def step() -> None:
        outputs = [x for x in _tensors(module(*inputs)) if x.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    times = []
    for _ in range(2 + options.steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    held = _alive([*module.parameters(), *module.buffers(), *inputs, *_state(optimizer)])
    seen = profile_step(step)
    memory = held + seen.allocated + module.memory().arena
    return _compared(schedule, seen, statistics.median(times[2:]), memory)


def _compared(schedule: Schedule, seen: Profiled, seconds: float, memory: int) -> Comparison:
    pairs = [_pair(c, r) for c, r in zip(schedule.collectives, seen.collectives, strict=False)]
    waited = seen.waited + sum(each.called for each in seen.collectives)
    return Comparison(
        tuple(pairs), (len(schedule.collectives), len(seen.collectives)), (schedule.seconds, seconds),
        (schedule.exposed, waited), (schedule.memory.peak.total, memory),
    )  # fmt: skip


def _pair(predicted: Collective, ran: Ran) -> Pair:
    counted = ran.sent
    if counted is None and ran.held is not None:
        elements, size = ran.held
        counted = wire_elements(ran.kind, predicted.ranks, elements) * size
    return Pair(
        predicted.kind, predicted.axis, predicted.cause.tensor, ran.kind, predicted.wire, counted, predicted.seconds,
        ran.end - ran.start,
    )  # fmt: skip


def _real(x: Any) -> Any:
    """A value for an example argument that has none."""
    if not isinstance(x, Tensor) or not x.is_meta:
        return x
    return torch.randn(x.shape, dtype=x.dtype) if x.is_floating_point() else torch.zeros(x.shape, dtype=x.dtype)


def _tensors(made: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]


def _alive(tensors: Sequence[Tensor]) -> int:
    """Bytes of this rank's part of ``tensors``."""
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values())


def _print(made: Comparison, options: argparse.Namespace) -> None:
    """The collectives, alike ones together, then the totals."""
    groups: dict[Any, list[Pair]] = {}
    for pair in made.pairs:
        groups.setdefault((pair.kind, pair.axis, layers_of(pair.tensor), pair.ran), []).append(pair)
    body = []
    for (kind, axis, tensor, ran), of in groups.items():
        counted = None if any(p.bytes is None for p in of) else sum(p.bytes or 0 for p in of)
        body.append((
            kind if kind == ran else f"{kind}, ran {ran}", axis, shorten(tensor, 48), str(len(of)),
            str(sum(p.predicted_bytes for p in of)), "-" if counted is None else str(counted),
            milliseconds(sum(p.predicted_seconds for p in of)), milliseconds(sum(p.seconds for p in of)),
        ))  # fmt: skip
    head = ("kind", "axis", "tensor", "count", "predicted B", "counted B", "predicted ms", "measured ms")
    print(tabulate(body, head, tablefmt="plain", disable_numparse=True, stralign="left") + "\n")
    sent, counted = made.bytes
    rows = [
        ("collectives", str(made.counts[0]), str(made.counts[1]), _off(*made.counts)),
        ("bytes sent", str(sent), "-" if counted is None else str(counted), _off(sent, counted)),
        ("step ms", *map(milliseconds, made.seconds), _off(*made.seconds)),
        ("exposed ms", *map(milliseconds, made.exposed), _off(*made.exposed)),
        ("peak GB", *map(gigabytes, made.memory), _off(*made.memory)),
    ]
    by = "the rough description 'cpu'" if options.cost is None else options.cost
    print(tabulate(rows, ("of a step", "predicted", "measured", "off by"), tablefmt="plain", disable_numparse=True))
    print(
        f"\npredicted by {by}; measured on rank 0 of {options.nproc}, {options.backend}, the step without the optimizer"
    )


def _off(predicted: float, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else "-"
