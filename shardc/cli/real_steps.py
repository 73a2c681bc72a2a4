"""Real steps of a model on gloo ranks, under one plan or several that take turns, beside what is predicted of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc._compat import pytree
from shardc.cli import target
from shardc.cost.hardware import Hardware
from shardc.ir.tally import wire_elements
from shardc.report.predicted_schedule import Schedule
from shardc.report.prediction import Collective
from shardc.runtime.profile import Profiled, Ran, profile_step

WARM_UP = 2  # steps before those that count; the first compiles


@dataclass(frozen=True)
class Work:
    """What to run.

    Args:
        target: as `shardc.cli.target.load` takes it.
        loss: the name of a function of its file, or None.
        backend: of `shardc.compile`.
        steps: timed steps of each plan.
    """

    target: str
    loss: str | None
    backend: str
    steps: int


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
        plan: that it was of, as text.
        pairs: collectives in their order.
        counts: of collectives, (predicted, run).
        seconds: of a step, (predicted, the median of those that were timed).
        timed: seconds of each of these, on the rank that took longest.
        exposed: seconds, (predicted exposed, run: in calls and waits of collectives, with the profiler on).
        memory: bytes that are held at the peak, (predicted, run).
    """

    plan: str
    pairs: tuple[Pair, ...]
    counts: tuple[int, int]
    seconds: tuple[float, float]
    timed: tuple[float, ...]
    exposed: tuple[float, float]
    memory: tuple[int, int]

    @property
    def bytes(self) -> tuple[int, int | None]:
        """(predicted, counted) bytes that the rank sent; None where one of them was not counted."""
        counted = [pair.bytes for pair in self.pairs]
        known = [count for count in counted if count is not None]
        return sum(p.predicted_bytes for p in self.pairs), sum(known) if len(known) == len(counted) else None

    @property
    def noise(self) -> float:
        """Seconds that the median of the timed steps may be off: half of its notch (McGill, Tukey and Larsen, 1978)."""
        if len(self.timed) < 2:
            return float("inf")
        low, _, high = statistics.quantiles(self.timed, n=4)
        return 1.57 * (high - low) / len(self.timed) ** 0.5


@dataclass(frozen=True)
class _Training:
    """A model under one plan on this rank: what is predicted of a step, the step, and what comes behind it."""

    plan: str
    module: Any
    schedule: Schedule
    inputs: tuple[Tensor, ...]
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        outputs = [x for x in _tensors(self.module(*self.inputs)) if x.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare(work: Work, plans: Sequence[tuple[str, shardc.Mesh]], described: Hardware) -> list[Comparison]:
    """Trains on this rank under each plan, step by step in turn, and compares; all ranks call it.

    Args:
        plans: the text and the mesh of each.
        described: what steps are predicted for.
    """
    trained = [_training(work, plan, mesh, described) for plan, mesh in plans]
    times: list[list[float]] = [[] for _ in trained]
    for _ in range(WARM_UP + work.steps):
        for one, mine in zip(trained, times, strict=True):
            mine.append(_timed(one.step))
            one.update()
    slowest = torch.tensor(times, dtype=torch.float64)[:, WARM_UP:]
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [_compared(one, tuple(mine)) for one, mine in zip(trained, slowest.tolist(), strict=True)]


def _training(work: Work, plan: str, mesh: shardc.Mesh, described: Hardware) -> _Training:
    torch.manual_seed(0)  # the same model on every rank
    found = target.load(work.target)
    loss = None if work.loss is None else found.named(work.loss, "loss")
    names, sizes = zip(*mesh.shape, strict=True)
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    said = target.plan_of(plan, found, "--plan")
    module = shardc.compile(found.model, device_mesh, said, loss=loss, backend=work.backend)
    if isinstance(found.model, nn.Module) and any(p.is_meta for p in found.model.parameters()):
        module.to_empty(device="cpu")
        module.shardc.init_weights()
    schedule = module.shardc.lower(*found.args).schedule(described)
    cut = module.shardc.shard_inputs(*(_real(x) for x in found.args))
    inputs = cut if isinstance(cut, tuple) else (cut,)
    return _Training(plan, module, schedule, inputs, torch.optim.AdamW(module.parameters(), lr=0.0))


def _timed(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _compared(one: _Training, timed: tuple[float, ...]) -> Comparison:
    dist.barrier()
    module, schedule = one.module, one.schedule
    held = _alive([*module.parameters(), *module.buffers(), *one.inputs, *_state(one.optimizer)])
    seen: Profiled = profile_step(one.step)
    one.optimizer.zero_grad()
    memory = held + seen.allocated + module.shardc.memory().arena
    pairs = [_pair(c, r) for c, r in zip(schedule.collectives, seen.collectives, strict=False)]
    waited = seen.waited + sum(each.called for each in seen.collectives)
    return Comparison(
        one.plan, tuple(pairs), (len(schedule.collectives), len(seen.collectives)),
        (schedule.seconds, statistics.median(timed)), timed, (schedule.exposed, waited),
        (schedule.memory.peak.total, memory),
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
