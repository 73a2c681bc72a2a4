"""Measures what collectives and local ops take on the ranks of the world; `python -m shardc calibrate` calls it.

Times are the fastest of some runs: what else the machine does only ever adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import shardc.runtime.permute  # noqa: F401  (one of the collectives)
from shardc.ir.tally import wire_elements

c10d = torch.ops._c10d_functional


def collectives(group: str, ranks: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Kind of collective -> a call of it on a float32 tensor whose size ``ranks`` divides."""

    def each(x: torch.Tensor) -> list[int]:
        return [x.numel() // ranks] * ranks

    return {
        "all_gather": lambda x: c10d.all_gather_into_tensor(x, ranks, group),
        "reduce_scatter": lambda x: c10d.reduce_scatter_tensor(x, "sum", ranks, group),
        "all_reduce": lambda x: c10d.all_reduce(x, "sum", group),
        "all_to_all": lambda x: c10d.all_to_all_single(x, each(x), each(x), group),
        "permute_ranks": lambda x: torch.ops.shardc.permute_ranks(x, [*range(1, ranks), 0], group),
    }


def measure_collectives(
    group: dist.ProcessGroup, small: int = 1 << 10, large: int = 1 << 22, runs: int = 10
) -> Iterator[tuple[str, int, float, float]]:
    """(kind, ranks, seconds of latency, bytes per second received) of each kind of collective on ``group``.

    The latency is the time of a ``small`` message, the bandwidth that of the further bytes of a ``large``
    one; both are bytes of float32 that a rank holds. Every rank of the group calls this, and gets the slowest
    rank's numbers.
    """
    ranks = dist.get_world_size(group)
    for kind, call in collectives(group.group_name, ranks).items():
        times, wires = [], []
        for held in (small, large):
            x = torch.zeros(held // 4 // ranks * ranks)
            times.append(_slowest(_fastest(partial(_waited, call, x), runs, group), group))
            wires.append(4 * wire_elements(kind, ranks, x.numel()))
        # A machine that is busy may time the large message below the small one; a bandwidth is positive.
        yield kind, ranks, times[0], (wires[1] - wires[0]) / max(times[1] - times[0], 1e-9)


def measure_compute(size: int = 512, runs: int = 5) -> tuple[float, float]:
    """(floating-point operations per second of a matmul, bytes per second of a copy), in float32 on this rank."""
    x = torch.rand(size, size)
    matmul = _fastest(lambda: x @ x, runs)
    wide = torch.rand(1 << 22)
    copy = _fastest(wide.clone, runs)
    return 2 * size**3 / matmul, 2 * wide.numel() * wide.element_size() / copy


def _waited(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(call(x))


def _fastest(call: Callable[[], Any], runs: int, group: dist.ProcessGroup | None = None) -> float:
    """Seconds of the fastest of ``runs`` calls, after one that warms up; the ranks of ``group`` start together."""
    best = float("inf")
    for _ in range(runs + 1):
        if group is not None:
            dist.barrier(group)
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _slowest(seconds: float, group: dist.ProcessGroup) -> float:
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest)
