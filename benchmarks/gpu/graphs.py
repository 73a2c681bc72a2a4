"""A whole training step as one CUDA graph, beside the same step without: the recipe of docs/accelerators.md.

    python -m benchmarks.gpu.graphs --device cuda --rows out/gpu/rows.jsonl

On a CPU there are no such graphs: there the recipe's step runs as it is, and the row says so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardc
from benchmarks.gpu.ranks import World, mesh_of, settle, start
from benchmarks.gpu.rows import Skipped, tried
from examples.models import llama

PLANS = {"ddp": shardc.ddp("dp"), "fsdp2": shardc.fsdp("dp", level=2), "fsdp3": shardc.fsdp("dp")}
BEFORE, TIMED = 3, 20  # steps


def captured(step: Callable[..., Tensor], x: Tensor, y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """``step`` as a graph that is replayed for batches of the shapes of ``x`` and ``y``; it has run before."""
    x, y = x.clone(), y.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(BEFORE):
            step(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may ask for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step(x, y)

    def replayed(new_x: Tensor, new_y: Tensor) -> Tensor:
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        return loss

    return replayed


def _module(plan: str, backend: str, world: World) -> tuple[Any, Callable[..., Tensor]]:
    torch.manual_seed(0)
    config = llama.LlamaConfig(layers=4)
    source = llama.Llama(config).to(world.device)
    mesh = mesh_of(world.kind, world.ranks, ("dp",))
    module = shardc.compile(source, mesh, PLANS[plan], loss=llama.loss, backend=backend)
    # Capturable: the count of steps lies on the device, where a replay finds it.
    extra = {"capturable": True} if world.kind != "cpu" else {}
    optimizer = shardc.optim.wrap(torch.optim.AdamW, module, lr=1e-3, **extra)
    return module, shardc.train_step(module, optimizer)


def _timed(step: Callable[..., Tensor], data: list[tuple[Tensor, Tensor]], device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step, and the last loss."""
    settle(device)
    began, loss = time.perf_counter(), torch.empty(())
    for x, y in data:
        loss = step(x, y)
    settle(device)
    return (time.perf_counter() - began) / len(data) * 1e3, loss.item()


def compare(plan: str, backend: str, world: World) -> tuple[str, dict[str, Any]]:
    """Both trained on the same batches; their losses are to be equal."""
    torch.manual_seed(1)
    config = llama.LlamaConfig()
    data = [tuple(x.to(world.device) for x in llama.batch(config)) for _ in range(TIMED)]
    warm = data[0]
    _, plain = _module(plan, backend, world)
    for _ in range(2 * BEFORE):
        plain(*warm)
    launched, expected = _timed(plain, data, world.device)  # type: ignore[arg-type]
    numbers = {"ms": launched, "loss": expected}
    if world.kind == "cpu":
        raise Skipped(f"no graphs on a CPU; the step itself trains, loss {expected:.4f}")
    _, step = _module(plan, backend, world)
    for _ in range(BEFORE):
        step(*warm)
    replayed = captured(step, *warm)
    graph, loss = _timed(replayed, data, world.device)  # type: ignore[arg-type]
    numbers |= {"graph_ms": graph, "graph_loss": loss}
    assert abs(loss - expected) <= 1e-4 * abs(expected), f"loss {loss} as a graph, {expected} without"
    return f"{launched:.2f} ms a step launched, {graph:.2f} ms as a graph; the same loss", numbers


def _rank(rank: int, ranks: int, folder: str, device: str, plans: str, backends: str, rows: str) -> None:
    world = World(device, rank, ranks, folder)
    for plan in plans.split(","):
        for backend in backends.split(","):
            world.enter(f"{plan}/{backend}")
            tried(Path(rows), "CUDA graph", f"{plan}, {backend}", 60, partial(compare, plan, backend, world))
            world.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--backends", default="eager,inductor")
    parser.add_argument("--rows", required=True)
    given = parser.parse_args()
    start(1, _rank, given.device, given.plans, given.backends, given.rows)


if __name__ == "__main__":
    main()
