"""Start an example on several ranks of this machine, and name the meshes and plans that it offers."""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist
from models.llama import llama_tp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardc

PLANS = {
    "ddp": lambda: shardc.ddp("dp"),
    "fsdp": lambda: shardc.fsdp("dp", level=3),
    "fsdp1": lambda: shardc.fsdp("dp", level=1),
    "fsdp2": lambda: shardc.fsdp("dp", level=2),
    "hsdp": lambda: shardc.hsdp(shard="dp", replicate="rep"),
    "tp": lambda: llama_tp("tp"),
    "tp+sp": lambda: llama_tp("tp", sequence=True),
    "fsdp+tp": lambda: shardc.fsdp("dp", level=3) | llama_tp("tp"),
    "fsdp+cp": lambda: shardc.fsdp(("dp", "cp"), level=3) | shardc.cp("cp"),
    "fsdp+pp": lambda: shardc.fsdp("dp", level=3) | shardc.pp("pp"),
}


def default_mesh(plan: str, ranks: int) -> str:
    """Axis sizes for ``plan`` on ``ranks`` ranks: of a plan over two axes, ``rep`` or ``tp`` gets 2 ranks if it can."""
    few = 2 if ranks % 2 == 0 else 1
    if plan == "hsdp":
        return f"rep={few},dp={ranks // few}"
    if plan in ("fsdp+tp", "fsdp+cp", "fsdp+pp"):
        return f"dp={ranks // few},{plan[-2:]}={few}"
    return f"tp={ranks}" if plan.startswith("tp") else f"dp={ranks}"


def under_torchrun(ranks: int, restarts: int = 0) -> None:
    """Return inside a torchrun worker; elsewhere replace this process by torchrun with ``ranks`` workers.

    Args:
        restarts: how often torchrun starts all of them again when one dies.
    """
    if "RANK" in os.environ:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A store of its own for each start: torch 2.13 gives the ranks of a restart the addresses of dead ones.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *options, "--", *sys.argv])


def join_mesh(plan: str, axes: str | None, ranks: int, restarts: int = 0) -> DeviceMesh:
    """The mesh of ``axes``, such as ``"dp=2,tp=2"``, over torchrun's ranks, or ``ranks`` if none runs."""
    under_torchrun(ranks, restarts)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    axes = axes or default_mesh(plan, dist.get_world_size())
    sizes = {name: int(size) for name, size in (axis.split("=") for axis in axes.split(","))}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
