"""Worlds of one rank and of several on one device: NCCL where each rank has a device of its own, else over the host."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.gpu import staged

PATIENCE = timedelta(seconds=60)


def backend_of(device: str, ranks: int) -> str:
    """The backend of a world of ``ranks``. Two ranks on one GPU cannot use NCCL: copies on the host go over gloo."""
    if device == "cpu":
        return "gloo"
    return "nccl" if torch.cuda.device_count() >= ranks else staged.NAME


def device_of(device: str, rank: int) -> torch.device:
    """The device of a rank, made the current one."""
    if device == "cpu":
        return torch.device("cpu")
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    torch.cuda.init()  # a DeviceMesh sets the device of a process that has none
    return torch.device(device, index)


def mesh_of(device: str, ranks: int, axes: tuple[str, ...]) -> DeviceMesh:
    """A mesh whose last axis has all ranks."""
    return init_device_mesh(device, (*[1] * (len(axes) - 1), ranks), mesh_dim_names=axes)


def settle(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


class World:
    """A rank's place among ``ranks``, and the store in which they meet."""

    def __init__(self, device: str, rank: int, ranks: int, folder: str) -> None:
        self.kind, self.rank, self.ranks = device, rank, ranks
        self.device = device_of(device, rank)
        self.store = dist.FileStore(str(Path(folder) / "store"), ranks)

    def enter(self, name: str) -> None:
        """A process group of its own for one case: one that failed is of no use to the next."""
        store = dist.PrefixStore(name, self.store)
        backend = backend_of(self.kind, self.ranks)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks, timeout=PATIENCE)

    def leave(self) -> None:
        settle(self.device)
        if dist.is_initialized():
            dist.destroy_process_group()

    def said(self, name: str, mine: str) -> list[str]:
        """What each rank says of a case, by rank; it fails where one does not come."""
        self.store.set(f"said/{name}/{self.rank}", mine)
        keys = [f"said/{name}/{rank}" for rank in range(self.ranks)]
        self.store.wait(keys, PATIENCE)
        return [self.store.get(key).decode() for key in keys]


def start(ranks: int, check: Callable[..., None], *args: Any) -> None:
    """Calls ``check(rank, ranks, folder, *args)`` on each rank, in this process where there is only one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            check(0, 1, folder, *args)
        else:
            mp.start_processes(check, (ranks, folder, *args), nprocs=ranks, start_method="spawn")
    sys.stdout.flush()
