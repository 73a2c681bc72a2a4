"""``calibrate``: measures what collectives and local ops take here, and writes the cost model as JSON."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardc.analysis.cost import CostModel, Measured
from shardc.errors import InputError
from shardc.runtime.measure import measure_collectives, measure_compute

DEFAULT_PATH = "shardc-cost.json"


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "calibrate", help="measure this machine's collectives and write a cost model"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="gloo processes to start, unless torchrun did (default: 2)"
    )
    parser.add_argument("--runs", type=int, default=10, help="timed runs of each collective and size (default: 10)")
    parser.add_argument("--out", metavar="FILE", default=DEFAULT_PATH, help=f"where to write (default: {DEFAULT_PATH})")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measures on the ranks that torchrun started, or on processes of its own; the first rank writes the file.

    Raises:
        InputError: fewer than two ranks.
    """
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        _measure(options.runs, options.out)
        dist.destroy_process_group()
        return
    if options.ranks < 2:
        raise InputError(f"--ranks {options.ranks}: one rank has nobody to talk to", fix="use 2 or more")
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        mp.spawn(_rank, (options.ranks, options.runs, options.out, store), nprocs=options.ranks)


def _rank(rank: int, ranks: int, runs: int, out: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    _measure(runs, out)
    dist.destroy_process_group()


def _measure(runs: int, out: str) -> None:
    world = dist.group.WORLD
    assert world is not None
    sizes = sorted({2, dist.get_world_size()})
    rows = []
    for size in sizes:
        group = world if size == dist.get_world_size() else dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            rows += [Measured(*row) for row in measure_collectives(group, runs=runs)]
        dist.barrier()
    flops, memory_bandwidth = measure_compute()
    if dist.get_rank() == 0:
        cost = CostModel(
            latency=min(row.latency for row in rows),
            bandwidth=max(row.bandwidth for row in rows),
            flops=flops,
            memory_bandwidth=memory_bandwidth,
            kinds=tuple(rows),
        )
        cost.save(out)
        for row in rows:
            print(f"{row.kind:15} {row.ranks} ranks {row.latency * 1e6:8.0f} us {row.bandwidth / 1e6:8.0f} MB/s")
        print(f"wrote {out}")
    dist.barrier()
