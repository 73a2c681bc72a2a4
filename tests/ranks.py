"""Real ranks on this machine: a function run on several gloo processes, each with its own process group."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(fn: Callable[..., None], ranks: int, *args: Any) -> None:
    """Runs ``fn(*args)`` on ``ranks`` processes; ``fn`` is at the top of a module. Raises what a rank raises."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (fn, ranks, str(Path(folder) / "store"), args), nprocs=ranks)


def _rank(rank: int, fn: Callable[..., None], ranks: int, store: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        fn(*args)
    finally:
        dist.destroy_process_group()
