"""`shardc.mesh`: the mesh of the ranks that torchrun started, or of a single process."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardc.errors import MeshError
from shardc.ir.mesh import Mesh
from shardc.validate import checked


def mesh(*, device: str | None = None, **axes: int) -> DeviceMesh:
    """Returns the mesh of all ranks; initialises the process group and sets the rank's device, if not done yet.

    Under torchrun, these are its ranks. A plain process is a world of one rank, so that the same script runs without
    torchrun.

    Args:
        device: "cuda" or "cpu"; by default "cuda" if there is a GPU. GPUs use NCCL, CPUs gloo; an existing process
            group is used as it is.
        axes: sizes by name, the slowest first, as in ``mesh(dp=-1, tp=8)``; by default ``dp=-1``. One may be -1, for
            the remaining ranks. Neighbouring ranks, and so the last axes, share a node.

    Raises:
        MeshError: the sizes do not match the world, or the node has fewer GPUs than ranks.
    """
    checked(device, str | None, "device")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(kind)
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    sizes = sizes_of(axes or {"dp": -1}, ranks)
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise MeshError(
                f"rank {os.environ.get('RANK', 0)} is the {local + 1}. of its node, which has "
                f"{torch.cuda.device_count()} GPUs",
                fix="start as many ranks on a node as it has GPUs: torchrun --nproc-per-node gpu",
            )
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        # CPU tensors too: for checkpoints and comparisons between ranks.
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(kind, tuple(size for _, size in sizes.shape), mesh_dim_names=sizes.axes)


def _check_device(kind: str) -> None:
    """Raises MeshError if ``kind`` is not the type of a device: torch does not know it, or it has an index."""
    try:
        index = torch.device(kind).index
    except RuntimeError:
        raise MeshError(f"there is no device {kind!r}", fix='write device="cuda" or device="cpu"') from None
    if index is not None:
        raise MeshError(
            f"device {kind!r} has an index, and each rank takes its own",
            fix=f'write device="{kind.partition(":")[0]}": the index is the rank\'s number on its node',
        )


def sizes_of(axes: dict[str, int], ranks: int) -> Mesh:
    """Returns the abstract mesh with ``axes`` over ``ranks`` ranks; one axis may be -1.

    Raises:
        MeshError: an axis is invalid, or the product of the sizes is not ``ranks``.

    >>> sizes_of({"dp": -1, "tp": 4}, 8)
    Mesh(dp=2, tp=4)
    """
    text = ", ".join(f"{name}={size}" for name, size in axes.items())
    open_axes = [name for name, size in axes.items() if size == -1]
    if len(open_axes) > 1:
        raise MeshError(f"mesh({text}): two axes are -1", fix="give all but one a size")
    fixed = Mesh({name: 1 if size == -1 else size for name, size in axes.items()})
    if ranks % fixed.ranks or (not open_axes and fixed.ranks != ranks):
        wanted = f"a multiple of {fixed.ranks}" if open_axes else str(fixed.ranks)
        raise MeshError(
            f"mesh({text}) is of {wanted} ranks, and the world has {ranks}",
            fix=f"torchrun --nproc-per-node {fixed.ranks} starts {fixed.ranks} ranks; one axis may be -1",
        )
    rest = ranks // fixed.ranks
    return Mesh({name: rest if name in open_axes else fixed.size(name) for name in axes})
