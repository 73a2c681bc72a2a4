"""A backend for ranks that share one GPU, which NCCL refuses: each collective is gloo's, on copies in host memory.

Gloo by itself does not carry tensors of a GPU: its coalesced all-reduces raise, its reduce-scatters end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

NAME = "staged"


class Staged(dist.ProcessGroup):
    """A process group whose collectives are over when they return."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._over = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


def _staged(call: Callable[..., Any], *args: Any) -> dist.Work:
    """``call`` with host copies of all tensors, whose values then come back."""
    both: list[tuple[Tensor, Tensor]] = []

    def on_host(value: Any) -> Any:
        if isinstance(value, Tensor):
            both.append((value, value.to("cpu", copy=True)))
            return both[-1][1]
        return [on_host(each) for each in value] if isinstance(value, (list, tuple)) else value

    call(*[on_host(arg) for arg in args])
    for there, here in both:
        there.copy_(here)
    done: Future[list[Tensor]] = Future()
    done.set_result([there for there, _ in both])
    return _create_work_from_future(done)


def _whole(name: str) -> Callable[..., dist.Work]:
    return lambda self, *args: _staged(lambda *here: getattr(self._over, name)(*here).wait(), *args)


def _one_by_one(name: str) -> Callable[..., dist.Work]:
    """A coalesced collective, of which gloo's class has each part alone."""

    def parts(self: Staged, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> dist.Work:
        def call(made: list[Tensor], given: list[Tensor], *more: Any) -> None:
            for one, other in zip(made, given, strict=True):
                getattr(self._over, name)(one, other, *more).wait()

        return _staged(call, outputs, inputs, *options)

    return parts


for _name in (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base",
    "alltoall_base", "broadcast", "barrier", "send", "recv",
):  # fmt: skip
    setattr(Staged, _name, _whole(_name))
Staged.allgather_into_tensor_coalesced = _one_by_one("_allgather_base")
Staged.reduce_scatter_tensor_coalesced = _one_by_one("_reduce_scatter_base")
dist.Backend.register_backend(NAME, Staged, devices=["cpu", "cuda"])
