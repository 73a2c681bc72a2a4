"""A whole training step as one CUDA graph, `train_step(cuda_graph=True)`, beside the same step without.

    python -m benchmarks.gpu.graphs --device cuda --rows out/gpu/rows.jsonl

The learning rate changes at each step, and one plan has dropout. On a CPU there are no such graphs: there the step runs
as it is, and the row says so.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardc
from benchmarks.gpu.ranks import World, mesh_of, settle, start
from benchmarks.gpu.rows import Skipped, tried
from examples.models import llama
from shardc.train import TrainStep

PLANS = {"ddp": shardc.ddp("dp"), "fsdp2": shardc.fsdp("dp", level=2), "fsdp3": shardc.fsdp("dp")}
DROPOUT = "fsdp3, dropout"
BEFORE, TIMED = 8, 20  # steps; the first ones compile, and a graph is recorded behind some


class Dropped(llama.SwiGLU):
    """The decoder's SwiGLU with dropout behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


def _step(plan: str, backend: str, world: World, graph: bool) -> TrainStep:
    torch.manual_seed(0)
    source = llama.Llama(llama.LlamaConfig(layers=4)).to(world.device)
    if plan == DROPOUT:
        for layer in source.layers:
            layer.mlp.__class__ = Dropped
    mesh = mesh_of(world.kind, world.ranks, ("dp",))
    module = shardc.compile(source, mesh, PLANS[plan.split(",")[0]], loss=llama.loss, backend=backend)
    optimizer = shardc.optim.wrap(torch.optim.AdamW, module, lr=1e-3, capturable=world.kind != "cpu")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return shardc.train_step(module, optimizer, max_norm=1.0, scheduler=scheduler, cuda_graph=graph)


def _timed(step: TrainStep, data: list[tuple[Tensor, Tensor]], device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step, and the last loss."""
    settle(device)
    began, loss = time.perf_counter(), torch.empty(())
    for x, y in data:
        loss = step(x, y)
    settle(device)
    return (time.perf_counter() - began) / len(data) * 1e3, loss.item()


def compare(plan: str, backend: str, world: World) -> tuple[str, dict[str, Any]]:
    """Both trained on the same batches with the same random numbers; their losses are to be equal."""
    torch.manual_seed(1)
    data = [tuple(x.to(world.device) for x in llama.batch(llama.LlamaConfig())) for _ in range(BEFORE + TIMED)]

    def trained(graph: bool) -> tuple[float, float]:
        step = _step(plan, backend, world, graph)
        torch.manual_seed(2)
        for batch in data[:BEFORE]:
            step(*batch)
        return _timed(step, data[BEFORE:], world.device)  # type: ignore[arg-type]

    launched, expected = trained(False)
    numbers = {"ms": launched, "loss": expected}
    if world.kind == "cpu":
        raise Skipped(f"no graphs on a CPU; the step itself trains, loss {expected:.4f}")
    graph, loss = trained(True)
    numbers |= {"graph_ms": graph, "graph_loss": loss}
    assert abs(loss - expected) <= 1e-4 * abs(expected), f"loss {loss} as a graph, {expected} without"
    return f"{launched:.2f} ms a step launched, {graph:.2f} ms as a graph; the same loss", numbers


def _rank(rank: int, ranks: int, folder: str, device: str, plans: str, backends: str, rows: str) -> None:
    world = World(device, rank, ranks, folder)
    for plan in plans.split(";"):
        for backend in backends.split(","):
            world.enter(f"{plan}/{backend}")
            tried(Path(rows), "CUDA graph", f"{plan}, {backend}", 60, partial(compare, plan, backend, world))
            world.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plans", default=";".join((*PLANS, DROPOUT)), help="joined by semicolons")
    parser.add_argument("--backends", default="eager,inductor")
    parser.add_argument("--rows", required=True)
    given = parser.parse_args()
    start(1, _rank, given.device, given.plans, given.backends, given.rows)


if __name__ == "__main__":
    main()
