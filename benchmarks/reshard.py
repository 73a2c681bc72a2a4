"""Reshards side by side with DTensor's ``redistribute``: bytes for every pair of layouts, and time on gloo ranks.

    python benchmarks/reshard.py            # both tables
    python benchmarks/reshard.py --bytes    # bytes only: no processes are started

Bytes are those that a rank receives, by the volumes of `shardc.ir.comm_volume`: for shardc of its plan, for
DTensor of the collectives that ``redistribute`` issues on a fake process group. Where DTensor's are fewer,
its result is computed for all ranks in one process and compared with the tensor: *wrong* counts the pairs
for which it is not the tensor. Time is the sum over the pairs of the fastest of some runs, on four
processes of this machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardc.cost.model import CostModel
from shardc.cost.redistribute import steps, wire_bytes
from shardc.ir.comm_volume import KINDS, wire_elements
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.placements import to_placements
from shardc.passes.lower.collectives import lower_collective
from shardc.runtime.groups import Groups
from shardc.runtime.shards import shard

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.eager import Eager  # noqa: E402
from tests.layouts import every_layout  # noqa: E402

BYTES = CostModel(latency=1e-9, hop=0, bandwidth=1, memory_bandwidth=1e15, kinds=())
ITEMSIZE = 4
TENSORS = [
    (Mesh(a=2, b=2), (16, 16), (4, 4)),
    (Mesh(a=2, b=3), (12, 36), (2, 6)),
    (Mesh(a=4, b=2), (16, 64), (2, 8)),
    (Mesh(a=2, b=2, c=2), (64, 64), ()),
]

Pair = tuple[Layout, Layout]


def pairs(mesh: Mesh, shape: Sequence[int], majors: Sequence[int]) -> Iterator[Pair]:
    """Every pair of layouts that DTensor can be asked for: it makes no new pending sums."""
    layouts = every_layout(mesh, shape, majors)
    for src in layouts:
        for dst in layouts:
            if set(dst.partial) <= set(src.partial):
                yield src, dst


def kind(pair: Pair) -> str:
    """What sort of change it is."""
    src, dst = (to_placements(layout) for layout in pair)
    if any(not isinstance(p, Shard | Replicate | Partial) for p in (*src, *dst)):
        return "strided or fused"
    if any(isinstance(p, Partial) for p in src):
        return "pending sum"
    changed = [(p, q) for p, q in zip(src, dst, strict=True) if p != q]
    if any(isinstance(p, Shard) and isinstance(q, Shard) for p, q in changed):
        return "Shard(a) -> Shard(b)"
    return "gather or slice"


class Received(TorchDispatchMode):
    """Counts the bytes that this rank receives in functional collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        collective = KINDS.get(func._opname)
        if collective is not None:
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            moved = wire_elements(collective, dist.get_world_size(group), args[0].numel())
            self.bytes += moved * args[0].element_size()
        return out


def distributed(src: Layout, mesh: Any) -> tuple[DTensor, Callable[[Layout], DTensor]]:
    """A DTensor of zeros laid out as ``src``, and what redistributes it."""
    local = torch.zeros(src.local_shape, dtype=torch.float32)
    stride = torch.empty(src.shape, device="meta").stride()
    x = DTensor.from_local(local, mesh, to_placements(src), run_check=False, shape=torch.Size(src.shape), stride=stride)
    return x, lambda dst: x.redistribute(placements=to_placements(dst))


def dtensor_bytes(pair: Pair, mesh: Any) -> int | None:
    """Bytes that DTensor's ``redistribute`` makes a rank receive, or None where it raises."""
    src, dst = pair
    try:
        _, redistribute = distributed(src, mesh)
        with Received() as received:
            redistribute(dst)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError):
        return None
    return received.bytes


def dtensor_is_right(pair: Pair) -> bool:
    """Whether DTensor's ``redistribute``, run for all ranks in one process, gives each rank its shard."""
    src, dst = pair
    mesh, whole = src.mesh, torch.arange(1.0, src.numel + 1).reshape(src.shape)
    with LocalTensorMode(mesh.ranks):
        device_mesh = init_device_mesh("cpu", tuple(size for _, size in mesh.shape), mesh_dim_names=mesh.axes)
        local = LocalTensor(dict(enumerate(shard(whole, src))))
        x = DTensor.from_local(
            local, device_mesh, to_placements(src), run_check=False, shape=whole.shape, stride=whole.stride()
        )
        made = x.redistribute(placements=to_placements(dst)).to_local()
    return all(torch.equal(made._local_tensors[rank], want) for rank, want in enumerate(shard(whole, dst)))


@dataclass
class Row:
    """Pairs of one kind on one mesh."""

    pairs: int = 0
    refused: int = 0
    wrong: int = 0
    dtensor: int = 0
    shardc: int = 0
    fewer: int = 0
    more: int = 0

    def add(self, pair: Pair, theirs: int | None, ours: int) -> None:
        self.pairs += 1
        if theirs is None:
            self.refused += 1
        elif theirs < ours and not dtensor_is_right(pair):
            self.wrong += 1
        else:
            self.dtensor += theirs
            self.shardc += ours
            self.fewer += ours < theirs
            self.more += ours > theirs

    def cells(self) -> list[Any]:
        ratio = self.shardc / self.dtensor if self.dtensor else 1.0
        counts = [self.pairs, self.refused, self.wrong]
        return [*counts, self.dtensor, self.shardc, f"{ratio:.2f}", self.fewer, self.more]


def compare_bytes(mesh: Mesh, shape: Sequence[int], majors: Sequence[int]) -> dict[str, Row]:
    """Rows by kind of change. Starts and ends a fake process group of the mesh's size."""
    rows: dict[str, Row] = {}
    dist.init_process_group("fake", rank=0, world_size=mesh.ranks, store=FakeStore())
    try:
        device_mesh = init_device_mesh("cpu", tuple(size for _, size in mesh.shape), mesh_dim_names=mesh.axes)
        for src, dst in pairs(mesh, shape, majors):
            ours = wire_bytes(src, dst, ITEMSIZE, BYTES)
            theirs = dtensor_bytes((src, dst), device_mesh)
            rows.setdefault(kind((src, dst)), Row()).add((src, dst), theirs, ours)
    finally:
        dist.destroy_process_group()
    return rows


def print_bytes() -> None:
    table = []
    for mesh, shape, majors in TENSORS:
        for name, row in sorted(compare_bytes(mesh, shape, majors).items()):
            table.append([str(mesh), "x".join(map(str, shape)), name, *row.cells()])
    counts = ["pairs", "refused", "wrong", "DTensor B", "shardc B", "ratio", "fewer", "more"]
    print("Bytes that a rank receives, summed over the pairs that DTensor gets right (refused: it raises).\n")
    print(tabulate(table, ["mesh", "tensor", "change", *counts]))


# --- time, on real ranks


def _time_rank(rank: int, ranks: int, store: str, size: int, runs: int) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = Mesh(a=2, b=2)
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=mesh.axes)
    groups, cost = Groups.of(device_mesh), CostModel(latency=1e-4, bandwidth=1e9, memory_bandwidth=4e9, kinds=())
    todo = [(src, dst) for src, dst in pairs(mesh, (size, size), (4, 4)) if src != dst]
    plans = {pair: steps(*pair, ITEMSIZE, cost) for pair in todo}
    groups.add({step.axes for plan in plans.values() for step in plan})
    eager, rows = Eager(groups), {}
    for src, dst in todo:
        x, redistribute = distributed(src, device_mesh)
        local = x.to_local()

        def ours(plan: Any = plans[src, dst], value: torch.Tensor = local) -> None:
            for step in plan:
                value = lower_collective(step, value, eager)

        try:
            theirs = _fastest(lambda: redistribute(dst).to_local(), runs)  # noqa: B023  (called at once)
        except (RuntimeError, NotImplementedError, ValueError, AssertionError):
            continue
        row = rows.setdefault(kind((src, dst)), [0, 0.0, 0.0])
        row[0] += 1
        row[1] += theirs
        row[2] += _fastest(ours, runs)
    if rank == 0:
        found = sorted(rows.items())
        table = [[name, n, f"{t * 1e3:.0f}", f"{o * 1e3:.0f}", f"{o / t:.2f}"] for name, (n, t, o) in found]
        print(f"\nTime on 4 gloo ranks, mesh {mesh}, float32 [{size}, {size}], fastest of {runs}, over the pairs.\n")
        print(tabulate(table, ["change", "pairs", "DTensor ms", "shardc ms", "ratio"]))
    dist.barrier()
    dist.destroy_process_group()


def _fastest(run: Callable[[], Any], runs: int) -> float:
    """Seconds of the fastest run, all ranks starting together."""
    best = float("inf")
    for _ in range(runs + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true", help="only count bytes")
    parser.add_argument("--size", type=int, default=512, help="rows and columns of the timed tensor")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each pair")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print_bytes()
    if not options.bytes:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_time_rank, (4, f"{folder}/store", options.size, options.runs), nprocs=4)


if __name__ == "__main__":
    main()
