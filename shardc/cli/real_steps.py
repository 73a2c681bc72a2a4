"""Runs real steps of a model on gloo ranks, under one plan or several in turn, and compares them with the
prediction.
"""

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
from shardc.ir.comm_volume import wire_elements
from shardc.report.predicted_schedule import Schedule
from shardc.report.prediction import Collective
from shardc.runtime.profile import Profiled, Ran, profile_step

WARM_UP = 2  # steps that are not timed; the first compiles


@dataclass(frozen=True)
class Work:
    """The model to run, and how.

    Args:
        target: argument of `shardc.cli.target.load`.
        loss: name of a function in the target's file, or None.
        backend: that of `shardc.compile`.
        steps: number of timed steps per plan.
    """

    target: str
    loss: str | None
    backend: str
    steps: int


@dataclass(frozen=True)
class Pair:
    """One collective as predicted and as measured.

    Args:
        kind, axis, tensor: those of the prediction.
        ran: the kind that ran.
        predicted_bytes, bytes: bytes that this rank sent; None if the profiler does not report them.
        predicted_seconds, seconds: time from start to end.
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
    """One step as predicted and as measured on rank 0.

    Args:
        plan: the plan, as text.
        pairs: the collectives, in order.
        counts: number of collectives (predicted, measured).
        seconds: step time (predicted, median of the timed steps).
        timed: time of each step on its slowest rank.
        exposed: seconds (predicted; measured in calls and waits of collectives, with the profiler on).
        memory: bytes at the peak (predicted, measured).
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
        """Return (predicted, measured) bytes that the rank sent; None if a collective's bytes were not reported."""
        counted = [pair.bytes for pair in self.pairs if pair.bytes is not None]
        complete = len(counted) == len(self.pairs)
        return sum(p.predicted_bytes for p in self.pairs), sum(counted) if complete else None

    @property
    def noise(self) -> float:
        """Return the uncertainty of the median in seconds: half of its notch (McGill, Tukey and Larsen, 1978)."""
        if len(self.timed) < 2:
            return float("inf")
        low, _, high = statistics.quantiles(self.timed, n=4)
        return 1.57 * (high - low) / len(self.timed) ** 0.5


@dataclass(frozen=True)
class _Training:
    """A model under one plan on this rank: the compiled module, its predicted schedule, its inputs and optimizer."""

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
    """Train on this rank under each plan, one step of each in turn, and compare with the prediction; all ranks call it.

    Args:
        plans: text and mesh of each plan.
        described: hardware of the prediction.
    """
    trained = [_training(work, plan, mesh, described) for plan, mesh in plans]
    times: list[list[float]] = [[] for _ in trained]
    for _ in range(WARM_UP + work.steps):
        for training, seconds in zip(trained, times, strict=True):
            seconds.append(_timed(training.step))
            training.update()
    slowest = torch.tensor(times, dtype=torch.float64)[:, WARM_UP:]
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [_compared(x, tuple(seconds)) for x, seconds in zip(trained, slowest.tolist(), strict=True)]


def _training(work: Work, plan: str, mesh: shardc.Mesh, described: Hardware) -> _Training:
    torch.manual_seed(0)  # the same model on every rank
    loaded = target.load(work.target)
    loss = None if work.loss is None else loaded.named(work.loss, "loss")
    names, sizes = zip(*mesh.shape, strict=True)
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    parsed_plan = target.plan_of(plan, loaded, "--plan")
    module = shardc.compile(loaded.model, device_mesh, parsed_plan, loss=loss, backend=work.backend)
    if isinstance(loaded.model, nn.Module) and any(p.is_meta for p in loaded.model.parameters()):
        module.to_empty(device="cpu")
        module.shardc.init_weights()
    schedule = module.shardc.lower(*loaded.args).schedule(described)
    cut = module.shardc.shard_inputs(*(_real(x) for x in loaded.args))
    inputs = cut if isinstance(cut, tuple) else (cut,)
    return _Training(plan, module, schedule, inputs, torch.optim.AdamW(module.parameters(), lr=0.0))


def _timed(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _compared(training: _Training, timed: tuple[float, ...]) -> Comparison:
    dist.barrier()
    module, schedule = training.module, training.schedule
    allocated = _alive([*module.parameters(), *module.buffers(), *training.inputs, *_state(training.optimizer)])
    seen: Profiled = profile_step(training.step)
    training.optimizer.zero_grad()
    memory = allocated + seen.allocated + module.shardc.memory().arena
    pairs = [_pair(c, r) for c, r in zip(schedule.collectives, seen.collectives, strict=False)]
    waited = seen.waited + sum(collective.called for collective in seen.collectives)
    return Comparison(
        training.plan, tuple(pairs), (len(schedule.collectives), len(seen.collectives)),
        (schedule.seconds, statistics.median(timed)), timed, (schedule.exposed, waited),
        (schedule.memory.peak.total, memory),
    )  # fmt: skip


def _pair(predicted: Collective, ran: Ran) -> Pair:
    counted = ran.sent
    if counted is None and ran.payload is not None:
        elements, size = ran.payload
        counted = wire_elements(ran.kind, predicted.ranks, elements) * size
    return Pair(
        predicted.kind, predicted.axis, predicted.cause.tensor, ran.kind, predicted.wire, counted, predicted.seconds,
        ran.end - ran.start,
    )  # fmt: skip


def _real(x: Any) -> Any:
    """Return random or zero values for an example argument on the meta device."""
    if not isinstance(x, Tensor) or not x.is_meta:
        return x
    return torch.randn(x.shape, dtype=x.dtype) if x.is_floating_point() else torch.zeros(x.shape, dtype=x.dtype)


def _tensors(outputs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]


def _alive(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of this rank's storages of ``tensors``."""
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values())
