"""Measures collectives and local ops on the ranks of the world, for `python -m shardc calibrate`.

All ranks run each measurement at once, as in a step. Compute is a median of runs, like the step that it predicts. Waits
of ranks for each other after compute are a mean, because a step sums over them. Other times are minima, since other
load only adds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

import shardc.runtime.gloo.direct  # noqa: F401  (collectives that are measured)
from shardc.ir.arena import LARGEST
from shardc.ir.comm import is_ring
from shardc.ir.comm_volume import wire_elements
from shardc.runtime.gloo.buffers import let_compute_first

c10d = torch.ops._c10d_functional
T = TypeVar("T")
Call = Callable[[list[torch.Tensor]], list[torch.Tensor]]  # starts a collective
_SMALL, _MANY = 64, 17  # elements of a small tensor; number of tensors in a collective of many
_APART = LARGEST // 4 + 16  # elements of a tensor too large to share a message
_MIDDLE, _LARGE = 1 << 16, 1 << 20  # elements
_SEGMENT = 4e-3  # seconds of compute before a collective


def collectives(group: str, ranks: int) -> dict[str, Callable[[torch.Tensor], list[torch.Tensor]]]:
    """Maps each kind of collective ("all_gather", "reduce_scatter", ...) to a function that starts it on a float32
    tensor, whose size is a multiple of ``ranks``, and returns a list with its result, still to be waited for.
    """

    def equal_splits(x: torch.Tensor) -> list[int]:
        return [x.numel() // ranks] * ranks

    return {
        "all_gather": lambda x: [c10d.all_gather_into_tensor(x, ranks, group)],
        "reduce_scatter": lambda x: [c10d.reduce_scatter_tensor(x, "sum", ranks, group)],
        "all_reduce": lambda x: [c10d.all_reduce(x, "sum", group)],
        "all_to_all": lambda x: [c10d.all_to_all_single(x, equal_splits(x), equal_splits(x), group)],
        "permute_ranks": lambda x: [torch.ops.shardc.permute_ranks(x, [*range(1, ranks), 0], group)],
    }


def measure_collectives(
    group: dist.ProcessGroup, small: int = 1 << 10, large: int = 1 << 22, runs: int = 10
) -> Iterator[tuple[str, int, float, float]]:
    """Yields (kind, ranks, latency in seconds, bytes received per second) for each kind in `collectives` on ``group``.

    The latency is the time of a ``small`` message; the bandwidth is that of the additional bytes of a ``large`` one
    (both in bytes per rank). All ranks of the group call this and get the slowest rank's numbers.
    """
    ranks = dist.get_world_size(group)
    for kind, call in collectives(group.group_name, ranks).items():
        seconds, wire_bytes = [], []
        for nbytes in (small, large):
            x = torch.zeros(nbytes // 4 // ranks * ranks)  # float32
            seconds.append(_slowest(_fastest(partial(_run_and_wait, call, x), runs, group), group))
            wire_bytes.append(4 * wire_elements(kind, ranks, x.numel()))
        # Under load the large message may be faster than the small one; keep the bandwidth positive.
        yield kind, ranks, seconds[0], (wire_bytes[1] - wire_bytes[0]) / max(seconds[1] - seconds[0], 1e-9)


def in_messages(group: str, ranks: int) -> dict[str, Call]:
    """Maps each kind of collective that runs as direct messages between ranks to a function. The function starts that
    collective on a list of tensors.
    """
    ops = torch.ops.shardc
    calls = {
        "all_gather": lambda xs: ops.all_gather_into_tensor_coalesced(xs, ranks, group),
        "reduce_scatter": lambda xs: ops.reduce_scatter_tensor_coalesced(xs, "sum", ranks, group),
        "all_reduce": lambda xs: ops.all_reduce_coalesced(xs, "sum", group),
    }
    return {kind: call for kind, call in calls.items() if not is_ring(kind, ranks)}


class Sent(NamedTuple):
    """Measured costs of collectives that run as direct messages, averaged over the kinds in `in_messages`.

    Args:
        latency: seconds until the first byte.
        call: seconds of host time per call.
        message: seconds of host time per message.
        bandwidth: bytes per second.
        share: fraction of the transfer time by which concurrent compute is slowed.
    """

    latency: float
    call: float
    message: float
    bandwidth: float
    share: float


def measure_messages(group: dist.ProcessGroup, runs: int = 10, times: int = 10) -> Sent:
    """Measures the costs of collectives that run as direct messages on ``group``, and returns them as `Sent`. Most
    times are those of the fastest of ``runs`` runs of ``times`` calls each.
    """
    let_compute_first()
    ranks = dist.get_world_size(group)
    calls = in_messages(group.group_name, ranks)

    def mean(seconds: Callable[[Call, str], float]) -> float:
        """Measures each kind of collective by ``seconds(call, kind)``, and takes the slowest rank's time. Returns the
        mean over the kinds.
        """
        return sum(_slowest(seconds(call, kind), group) for kind, call in calls.items()) / len(calls)

    def operands(kind: str, elements: int, count: int = 1) -> list[torch.Tensor]:
        """Returns ``count`` operands of a collective: for each, a rank sends ``elements`` elements to each peer (twice
        as many for an all-reduce).
        """
        return [torch.zeros((ranks if kind != "all_gather" else 1) * elements) for _ in range(count)]

    def fastest(call: Call, kind: str, elements: int, count: int = 1) -> float:
        """Returns the seconds of a collective on ``count`` operands, with its wait."""
        return _fastest(partial(_run_and_wait, call, operands(kind, elements, count)), runs, group, times)

    # The same bytes in one message to each peer and in many.
    single = mean(lambda call, kind: fastest(call, kind, _MANY * _APART))
    many = mean(lambda call, kind: fastest(call, kind, _APART, _MANY))
    message_seconds = max(many - single, 0.0) / ((_MANY - 1) * (ranks - 1))

    def host(call: Call, kind: str) -> float:
        """Returns the seconds of a small collective in which this thread computes."""
        run = partial(_run_and_wait, call, operands(kind, _SMALL))
        return min(_seconds_of_runs(run, runs, group, 10, time.thread_time))

    host_seconds = mean(host)
    # A collective of one small tensor sends one message to each peer.
    call_seconds = max(host_seconds - message_seconds * (ranks - 1), 0.0)
    latency = max(
        mean(lambda call, kind: _after_compute(call, operands(kind, _SMALL), runs, group)) - host_seconds, 0.0
    )
    # The bandwidth is that of the additional bytes of a large message. By kind, the bytes of both sizes on the wire:
    sizes = {kind: [4 * wire_elements(kind, ranks, operands(kind, n)[0].numel()) for n in (_MIDDLE, _LARGE)]
             for kind in calls}  # fmt: skip
    middle_seconds = mean(lambda call, kind: fastest(call, kind, _MIDDLE))
    large_seconds = mean(lambda call, kind: fastest(call, kind, _LARGE))
    wire_bytes = sum(big - small for small, big in sizes.values()) / len(calls)
    per_byte = max(large_seconds - middle_seconds, 1e-9) / wire_bytes
    slowdown = mean(lambda call, kind: _slowdown(call, operands(kind, _LARGE), runs, times, group))
    return Sent(latency, call_seconds, message_seconds, 1 / per_byte, slowdown)


def _after_compute(call: Call, xs: list[torch.Tensor], runs: int, group: dist.ProcessGroup) -> float:
    """Returns the seconds that a collective, ``call(xs)``, adds to the compute before it: the mean time of runs with it
    minus that of runs without it. Each mean leaves out the fastest and the slowest tenth of the runs.

    In a step, ranks meet after milliseconds of compute: they arrive at different times, and sleeping threads must be
    rescheduled. Back-to-back collectives hide both. Long waits count in a step, so a median would be too low.
    """
    x = torch.rand(256, 256)
    # Number of products in a segment of compute.
    count = max(int(_SEGMENT / _fastest(lambda: x @ x, runs, group, times=50)), 1)

    def segment(sent: bool) -> float:
        """Returns the seconds of a segment of compute and, if ``sent``, of the collective after it."""
        start = time.perf_counter()
        for _ in range(count):
            x @ x
        if sent:
            _run_and_wait(call, xs)
        return time.perf_counter() - start

    seconds = {}
    for sent in (False, True):
        dist.barrier(group)
        seconds[sent] = _mean_of_middle([segment(sent) for _ in range(5 * runs)])
    return max(seconds[True] - seconds[False], 0.0)


def _slowdown(call: Call, xs: list[torch.Tensor], runs: int, times: int, group: dist.ProcessGroup) -> float:
    """Returns the fraction of the time of a collective, ``call(xs)``, by which it delays compute that runs at the same
    time.
    """
    x = torch.rand(256, 256)
    alone = _fastest(partial(_run_and_wait, call, xs), runs, group, times)
    product = _fastest(lambda: x @ x, runs, group, times=50)
    # Compute goes on for twice as long as the collective, so that all of it is concurrent.
    count = max(int(2 * alone / product), 1)

    def compute() -> None:
        for _ in range(count):
            x @ x

    def both() -> None:
        results = call(xs)
        compute()
        for result in results:
            c10d.wait_tensor(result)

    half_times = -(-times // 2)  # these calls take longer
    delay = _fastest(both, runs, group, half_times) - _fastest(compute, runs, group, half_times)
    return min(max(delay / alone, 0.0), 0.95)


def measure_compute(runs: int = 10) -> tuple[float, float, float]:
    """Measures float32 compute: (FLOP/s of matrix products, FLOP/s of attention, bytes/s of pointwise kernels)."""
    # New tensors each time: in a step, operands are hardly ever in a cache.
    products = _in_turn(
        lambda: [torch.rand(512, 512), torch.rand(512, 256), torch.rand(256, 768), torch.rand(768, 512)]
    )

    def multiply() -> None:
        square, tall, wide, long = next(products)
        square @ square, tall @ wide, long @ tall, wide @ long  # noqa: B018

    product_flop = 2 * (512**3 + 3 * 512 * 256 * 768)  # of `multiply`: a multiplication and an addition per term
    shape = torch.Size([4, 8, 128, 32])  # batch, heads, sequence, head dim
    operands = _in_turn(lambda: [torch.rand(shape) for _ in range(4)])
    attend_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attend_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def attention() -> None:
        *heads, tangent = next(operands)
        attend_backward(tangent, *heads, *attend_forward(*heads, 0.0, True), 0.0, True)  # without dropout, causal

    forward: Any = sdpa_flop_count
    backward: Any = sdpa_backward_flop_count
    attention_flop = forward(shape, shape, shape) + backward(shape, shape, shape, shape)
    tensors, weight = _in_turn(lambda: [torch.rand(2048, 512) for _ in range(4)]), torch.rand(512)
    fused: Any = torch.compile(_elementwise, fullgraph=True, dynamic=False)
    # `_elementwise` reads 4 tensors and writes 3.
    moved_bytes = 7 * next(tensors)[0].nbytes
    return (
        product_flop / statistics.median(_seconds_of_runs(multiply, 10 * runs)),
        attention_flop / statistics.median(_seconds_of_runs(attention, 10 * runs)),
        moved_bytes / statistics.median(_seconds_of_runs(lambda: fused(*next(tensors), weight), 20 * runs)),
    )


def _in_turn(make: Callable[[], list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Yields lists of tensors made by ``make``, in a cycle over at least 64 MB. So each measurement reads memory that
    is not in the CPU's caches.
    """
    first = make()
    count = -(-(64 << 20) // sum(x.nbytes for x in first))
    return cycle([first, *(make() for _ in range(count))])


def _elementwise(
    x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs memory-bound ops of a transformer, to measure bandwidth: a residual, its norm and a gate. They read 4
    tensors and write 3.
    """
    total = x + y
    norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight
    return total, norm, torch.nn.functional.silu(gate) * up


def _run_and_wait(call: Callable[[T], list[torch.Tensor]], operands: T) -> None:
    """Runs a collective, ``call(operands)``, and waits for all its results."""
    for result in call(operands):
        c10d.wait_tensor(result)


def _fastest(call: Callable[[], object], runs: int, group: dist.ProcessGroup | None = None, times: int = 1) -> float:
    """Returns the seconds per call in the fastest of ``runs`` runs of ``times`` calls; see `_seconds_of_runs`."""
    return min(_seconds_of_runs(call, runs, group, times))


def _seconds_of_runs(
    call: Callable[[], object],
    runs: int,
    group: dist.ProcessGroup | None = None,
    times: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the seconds per call, by ``clock``, in each of ``runs`` runs of ``times`` calls, after a warm-up run.

    The ranks of ``group`` start each run together.
    """
    seconds = []
    for _ in range(runs + 1):
        if group is not None:
            dist.barrier(group)
        start = clock()
        for _ in range(times):
            call()
        seconds.append((clock() - start) / times)
    return seconds[1:]


def _mean_of_middle(seconds: list[float]) -> float:
    """Returns the mean of ``seconds`` without the lowest and the highest tenth of them."""
    cut = len(seconds) // 10
    return statistics.mean(sorted(seconds)[cut : len(seconds) - cut])


def _slowest(seconds: float, group: dist.ProcessGroup) -> float:
    """Returns the largest ``seconds`` among the ranks of ``group``."""
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest)
