"""How much of a step's communication is exposed, as torch's profiler sees it, and how busy the device is.

    python -m benchmarks.gpu.exposed --device cuda --rows out/gpu/rows.jsonl --trace out/gpu/trace.json

Communication is NCCL's kernels, or, where there are none (gloo), the host's waits for collectives. It is exposed while
no other kernel runs. A CPU rank computes nothing while it waits, so there all of it is exposed.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import shardc
from benchmarks.gpu.ranks import World, backend_of, mesh_of, settle, start
from benchmarks.gpu.rows import tried
from examples.models import llama

PLANS = {
    "ddp": (shardc.ddp("x"), False),
    "fsdp2": (shardc.fsdp("x", level=2), False),
    "fsdp3": (shardc.fsdp("x"), False),
    "tp+sp": (llama.llama_tp("x", sequence=True), True),
}
WIDE = llama.LlamaConfig(8192, 2048, 4, heads=16, kv_heads=8, hidden=5632)
SMALL = llama.LlamaConfig(256, 64, 2, heads=4, kv_heads=2, hidden=128)
Span = tuple[float, float]
# Names that the profiler repeats on the device's tracks, of what the host said around the launches.
MARKS = ("Optimizer.", "ProfilerStep", "nccl:", "c10d::", "gloo:", "##")


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans that do not overlap, ascending.

    >>> union([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    out: list[Span] = []
    for first, last in sorted(spans):
        if out and first <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], last)
        else:
            out.append((first, last))
    return out


def length(spans: Iterable[Span]) -> float:
    return sum(last - first for first, last in spans)


def outside(spans: list[Span], others: list[Span]) -> float:
    """How long ``spans`` lasts outside of ``others``, both as `union` gives them.

    >>> outside([(0, 4)], [(1, 2), (3, 5)])
    2
    """
    shared = sum(max(0, min(b, d) - max(a, c)) for a, b in spans for c, d in others)
    return length(spans) - shared


def profiled(step: Callable[[], Any], device: torch.device, trace: Path | None) -> dict[str, float]:
    """Milliseconds of one step: in all, of kernels, of communication, and of that what is exposed."""
    kinds = [ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    settle(device)
    with profile(activities=kinds) as seen:
        step()
        settle(device)
    if trace is not None:
        seen.export_chrome_trace(str(trace))
        with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        trace.unlink()
    results: Any = seen.profiler.kineto_results
    events = [
        (e.name(), e.device_type(), e.start_ns() / 1e6, (e.start_ns() + e.duration_ns()) / 1e6)
        for e in results.events()
    ]
    host = torch.autograd.DeviceType.CPU
    on_device = [(name, (a, b)) for name, kind, a, b in events if kind != host and not name.startswith(MARKS)]
    kernels = union(span for name, span in on_device if "nccl" not in name)
    moved = [span for name, span in on_device if "nccl" in name]
    waits = [(a, b) for name, kind, a, b in events if kind == host and name == "_c10d_functional::wait_tensor"]
    talking = union(moved or waits)
    whole = max(b for *_, b in events) - min(a for *_, a, _ in events)
    return {
        "step": whole, "kernels": length(kernels), "communication": length(talking),
        "exposed": outside(talking, kernels),
    }  # fmt: skip


def look(name: str, backend: str, world: World, trace: Path | None) -> tuple[str, dict[str, Any]]:
    """A step of the decoder under one plan, the fourth."""
    plan, whole_batch = PLANS[name]
    config, sizes = (SMALL, {"size": 4, "length": 32}) if world.kind == "cpu" else (WIDE, {"size": 8, "length": 1024})
    torch.manual_seed(0)
    with world.device:
        source = llama.Llama(config)
    mesh = mesh_of(world.kind, world.ranks, ("x",))
    module = shardc.compile(source, mesh, plan, loss=llama.loss, backend=backend)
    del source
    optimizer = shardc.optim.wrap(torch.optim.AdamW, module, lr=1e-3)
    step = shardc.train_step(module, optimizer)
    data = tuple(x.to(world.device) for x in llama.batch(config, **sizes))
    mine = data if whole_batch else module.shard_inputs(*data)
    for _ in range(3):
        step(*mine)
    found = profiled(lambda: step(*mine), world.device, trace)
    return (
        f"step {found['step']:.1f} ms, kernels {found['kernels']:.1f}, communication {found['communication']:.1f}, of "
        f"which exposed {found['exposed']:.1f}, over {backend_of(world.kind, world.ranks)}", found
    )  # fmt: skip


def _rank(rank: int, ranks: int, folder: str, device: str, backend: str, rows: str, trace: str) -> None:
    torch.set_num_threads(1)
    world = World(device, rank, ranks, folder)
    for name in PLANS:
        world.enter(name)
        last = Path(trace) if rank == 0 and name == "fsdp3" and trace else None
        path = Path(rows) if rank == 0 else None
        many = "s" * (ranks > 1)
        tried(path, "profile", f"{name}, {ranks} rank{many}, {backend}", 60, partial(look, name, backend, world, last))
        world.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rows", required=True)
    parser.add_argument("--trace", default="", help="write the trace of fsdp3's step here, packed")
    given = parser.parse_args()
    start(given.ranks, _rank, given.device, given.backend, given.rows, given.trace)


if __name__ == "__main__":
    main()
