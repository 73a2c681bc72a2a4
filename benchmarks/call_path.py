"""What a call of a compiled module costs on the host before its first op: with its checks, and without some of them.

    python benchmarks/call_path.py --size tiny --calls 2000

Two gloo ranks call a decoder in the steady state; the graphs themselves are left out. Read the minima: a rank that
waits for a core is no cost of the call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import shardc
from benchmarks.work import SIZES
from examples.models.llama import loss
from shardc.runtime.rank_consistency import RankConsistency
from shardc.runtime.state import State

RANKS = 2


@contextmanager
def nothing(name: str, owner: type) -> Iterator[None]:
    """A block in which a check does nothing."""
    with patch.object(owner, name, lambda *args, **kwargs: None):
        yield


def microseconds(call: Callable[[], Any], count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - start))
    return found


def rank(at: int, path: str, size: str, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, RANKS), rank=at, world_size=RANKS)
    mesh, work = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",)), SIZES[size]
    module = shardc.compile(work.model(), mesh, shardc.fsdp("dp"), loss=loss, backend="eager")
    batch = module.shard_inputs(*work.data(0, RANKS))
    for _ in range(3):
        module(*batch).backward()
    consistency = module.shardc.spec.groups.consistency
    done, backward = consistency.call, consistency.call.backward(frozenset({0}))

    def acts() -> None:
        consistency.enter(done)
        consistency.enter(backward)

    rows = {"acts of a step (call and backward) alone": microseconds(acts, count)}
    # Calls without their backward are acts of another order.
    with patch("shardc.runtime.module.run_step", lambda runner, inputs: None):
        for _ in range(3):
            module(*batch)
        rows["call"] = microseconds(lambda: module(*batch), count)
        with nothing("enter", RankConsistency):
            rows["call, ranks agree on nothing"] = microseconds(lambda: module(*batch), count)
            with nothing("check", State):
                rows["call, and parameters are not checked"] = microseconds(lambda: module(*batch), count)
    if at == 0:
        print(f"| {size}, on the host | min us | median us |\n| --- | --- | --- |")
        for name, times in rows.items():
            print(f"| {name} | {min(times):.1f} | {statistics.median(times):.1f} |")
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (f"{folder}/store", options.size, options.calls), nprocs=RANKS)


if __name__ == "__main__":
    main()
