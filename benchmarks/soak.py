"""Whether memory stays flat: forwards without a backward, steps, and switches between evaluation and training.

    python benchmarks/soak.py --count 2000 --switches 200

Two gloo ranks. Each phase is first run in short, so that what is allocated once is there, and then in full. It fails
where the resident memory of a rank, or the number of its tensors, grows by more than ``--most``.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import shardc

RANKS, WIDTH, ROWS, LAYERS = 2, 64, 64, 3


class Net(nn.Module):
    """Layers with a norm; it returns the last hidden value twice, a head, and classes, which need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
        self.head, self.drop = nn.Linear(WIDTH, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        for layer in self.layers:
            x = x + self.drop(layer(x))
        x = x.tanh()
        logits = self.head(x)
        return logits, x, x, logits.argmax(-1)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def phases(module: Any, x: Tensor) -> dict[str, Callable[[], None]]:
    """What is done again and again, by name."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def forward() -> None:
        module(x)

    def step() -> None:
        logits, hidden, _, _ = module(x)
        logits.div_(0.7)
        (logits.square().mean() + hidden.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def switch() -> None:
        module.eval()
        with torch.no_grad():
            module(x)
        module(x)  # an evaluation that forgot no_grad
        module.train()
        step()

    return {"forwards without a backward": forward, "steps": step, "switches": switch}


def growth(act: Callable[[], None], count: int) -> tuple[float, float]:
    """By how much, as a part of it, memory grows over ``count`` times, and the number of tensors."""
    for _ in range(max(count // 10, 5)):
        act()
    gc.collect()
    before, objects = resident(), _tensors()
    for _ in range(count):
        act()
    gc.collect()
    return (resident() - before) / before, (_tensors() - objects) / max(objects, 1)


def _tensors() -> int:
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def rank(at: int, path: str, backend: str, count: int, switches: int, most: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(path, RANKS), rank=at, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    module = shardc.compile(Net(), mesh, shardc.fsdp("dp"), backend=backend)
    x = module.shard_inputs(torch.randn(ROWS * RANKS, WIDTH))
    if at == 0:
        print("| phase | times | memory | tensors |\n| --- | --- | --- | --- |")
    failed = []
    for name, act in phases(module, x).items():
        times = switches if name == "switches" else count
        memory, tensors = growth(act, times)
        if at == 0:
            print(f"| {name} | {times} | {100 * memory:+.2f} % | {100 * tensors:+.2f} % |", flush=True)
        if memory > most or tensors > most:
            failed.append(name)
    dist.barrier()
    dist.destroy_process_group()
    if failed:
        raise SystemExit(f"rank {at}: memory grows in {', '.join(failed)}")


def run(backend: str, count: int, switches: int, most: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, args=(str(Path(folder) / "store"), backend, count, switches, most), nprocs=RANKS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--switches", type=int, default=200)
    parser.add_argument("--most", type=float, default=0.01, help="the growth that is no failure")
    args = parser.parse_args()
    run(args.backend, args.count, args.switches, args.most)
