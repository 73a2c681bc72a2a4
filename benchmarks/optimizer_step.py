"""One optimizer step of one rank: `shardc.optim.wrap` beside torch's optimizers, in turn, in one process.

    python benchmarks/optimizer_step.py --size tiny,small --steps 30

The parameters are a decoder's shards under FSDP over 2 ranks, of which this process is one; nothing is communicated.
Rows: the fused optimizer on plain local tensors of the same shapes (what the others are measured against), the wrapped
one, torch's own on the DTensors (fused and as it is by default). Read ratios of medians, not milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parent.parent))

import shardc
from benchmarks.work import SIZES

RANKS = 2
BASE = "fused, plain local tensors"


def rows(size: str) -> dict[str, Callable[[], Any]]:
    """A step of each row, on parameters of its own with gradients that stay."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))

    def module() -> Any:
        made = shardc.compile(SIZES[size].model(), mesh, shardc.fsdp("dp"))
        for param in made.parameters():
            param.grad = torch.randn_like(param)
        return made

    base, ours, fused, default = module(), module(), module(), module()
    # In memory that was allocated as that of the others: on a CPU a step's time depends on it by a tenth.
    local = [nn.Parameter(param._local_tensor) for param in base.parameters()]
    for param, like in zip(local, base.parameters(), strict=True):
        param.grad = like.grad._local_tensor
    adamw = torch.optim.AdamW
    return {
        BASE: adamw(local, lr=1e-3, fused=True).step,
        "shardc.optim.wrap": shardc.optim.wrap(adamw, ours, lr=1e-3).step,
        "fused, DTensors": adamw(fused.parameters(), lr=1e-3, fused=True).step,
        "default, DTensors": adamw(default.parameters(), lr=1e-3).step,
    }


def measure(steps: dict[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
    """Milliseconds of ``count`` steps of each row, the rows in turn; the first two of each are not counted."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for at in range(count + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if at >= 2:
                found[name].append(1e3 * (time.perf_counter() - start))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny,small", help=f"of {', '.join(SIZES)}, joined by commas")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        for size in options.size.split(","):
            found = measure(rows(size), options.steps)
            base = statistics.median(found[BASE])
            print(f"| {size}: AdamW | median ms | min ms | ratio |\n| --- | --- | --- | --- |")
            for name, times in found.items():
                middle = statistics.median(times)
                print(f"| {name} | {middle:.2f} | {min(times):.2f} | {middle / base:.2f} |")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
