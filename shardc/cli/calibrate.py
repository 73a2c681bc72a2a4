"""``calibrate``: measures collectives and local ops on this machine, and writes the cost model as JSON."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.cli.target import Argument, Command
from shardc.cost.hardware import CPU
from shardc.cost.model import CostModel, Measured
from shardc.errors import InputError
from shardc.links import messages
from shardc.runtime.gloo.measure import measure_collectives, measure_compute, measure_messages

DEFAULT_PATH = "shardc-cost.json"


ARGUMENTS = (
    Argument("--ranks", type=int, default=2, help="gloo processes to start, unless torchrun did (default: 2)"),
    Argument("--runs", type=int, default=10, help="timed runs of each collective and size (default: 10)"),
    Argument("--out", metavar="FILE", default=DEFAULT_PATH, help=f"where to write (default: {DEFAULT_PATH})"),
)


def run(options: argparse.Namespace) -> None:
    """Measure on the ranks that torchrun started, or on new processes; rank 0 writes the file.

    Raises:
        InputError: fewer than two ranks.
    """
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        _measure(options.runs, options.out)
        dist.destroy_process_group()
        return
    if options.ranks < 2:
        raise InputError(f"--ranks {options.ranks}: one rank has no peers", fix="use 2 or more")
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        mp.spawn(_rank, (options.ranks, options.runs, options.out, store), nprocs=options.ranks)


def _rank(rank: int, ranks: int, runs: int, out: str, store: str) -> None:
    """Run the measurement as rank ``rank`` of ``ranks`` new processes, which meet at the URL ``store``. Rank 0 writes
    ``out``.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    _measure(runs, out)
    dist.destroy_process_group()


def _measure(runs: int, out: str) -> None:
    """Measure with all ranks of the process group; rank 0 prints the cost model and writes it to ``out``."""
    world = dist.group.WORLD
    assert world is not None
    sizes = sorted({2, dist.get_world_size()})
    rows, messages_of = [], []
    for size in sizes:
        group = world if size == dist.get_world_size() else dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            rows += [Measured(*row) for row in measure_collectives(group, runs=runs)]
            messages_of.append(measure_messages(group, runs=runs))
        dist.barrier()
    flops, attention, memory_bandwidth = measure_compute(runs)
    launch = measure_launch(runs)
    if dist.get_rank() == 0:
        cost = CostModel(
            latency=min(row.latency for row in rows), bandwidth=max(row.bandwidth for row in rows),
            flops=flops, memory_bandwidth=memory_bandwidth, kinds=tuple(rows),
            attention=attention / flops, launch=launch, messages=messages(messages_of[-1], messages_of[0], sizes[-1]),
        )  # fmt: skip
        cost.save(out)
        _print(cost)
        print(f"wrote {out}")
    dist.barrier()


def measure_launch(runs: int) -> float:
    """Return the seconds of overhead per kernel of a compiled step, as the median of steps with hardly any work."""
    sizes = (dist.get_world_size(),)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12)))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp",))
    # Without collectives, ranks do not wait for each other.
    module = shardc.compile(model, mesh, shardc.ddp("dp"), options=shardc.Options(skip_comm=True), init_sync=True)
    x = torch.rand(8, 16)
    kernels = len(module.shardc.lower(torch.empty(8 * sizes[0], 16)).schedule(CPU).runs)
    seconds = []
    for _ in range(10 * runs):
        start = time.perf_counter()
        module(x).sum().backward()
        seconds.append(time.perf_counter() - start)
        module.zero_grad()
    return statistics.median(seconds) / kernels


def _print(cost: CostModel) -> None:
    """Print the measured numbers."""
    for row in cost.kinds:
        print(f"{row.kind:15} {row.ranks} ranks {row.latency * 1e6:8.0f} us {row.bandwidth / 1e6:8.0f} MB/s")
    assert cost.messages is not None
    costs = cost.messages
    print(
        f"messages: {costs.latency * 1e6:.0f} us, {costs.bandwidth / 1e6:.0f} MB/s; of a rank's own time "
        f"{costs.call * 1e6:.0f} us, {costs.message * 1e6:.0f} us each, and {costs.share:.0%} of what runs beside them"
    )
    print(
        f"compute: {cost.flops / 1e9:.1f} Gflop/s, {cost.attention:.0%} of that in attention, "
        f"{cost.memory_bandwidth / 1e9:.1f} GB/s, {cost.launch * 1e6:.0f} us a kernel"
    )


COMMANDS = (Command("calibrate", "measure this machine's collectives and write a cost model", ARGUMENTS, run),)
