"""Pickling of DTensors with their mesh position, so that a rank cannot load another rank's shard.

Plain DTensors unpickle onto the mesh coordinate of the reading rank: the first rank's file would give its shard to
every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.errors import LayoutError
from shardc.runtime.gathered import ReplicatedSpec

_PART = "shardc_part"  # key in the state of a pickled DTensor
_pickle = DTensor.__reduce_ex__

Part = list[tuple[str, int, int]]  # (name, size, coordinate) per mesh dim that shards it


def install() -> None:
    """Makes DTensors store their mesh position when pickled, and check it when unpickled."""
    DTensor.__reduce_ex__ = _reduce  # type: ignore[assignment]
    DTensor.__setstate__ = _set_state  # type: ignore[assignment]


def _part(tensor: DTensor) -> Part | None:
    """Returns the mesh position of this rank's shard; None if this rank is not on the mesh."""
    mesh: DeviceMesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    # A pickled mesh keeps the coordinate of the writing rank.
    place = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    if not place or int(mesh.mesh.max()) >= dist.get_world_size():
        return None
    dims = zip(names, mesh.mesh.shape, place[0], tensor.placements, strict=True)
    return [(name, size, at) for name, size, at, placement in dims if not placement.is_replicate()]


def _reduce(self: DTensor, protocol: Any) -> Any:
    build, (func, cls, args, (attributes, slots)) = _pickle(self, protocol)
    if isinstance(slots["_spec"], ReplicatedSpec):
        slots = {**slots, "_spec": slots["_spec"].plain()}
    if dist.is_initialized():
        attributes = {**(attributes or {}), _PART: _part(self)}
    return build, (func, cls, args, (attributes, slots))


def _set_state(self: DTensor, state: Any) -> None:
    torch._utils._set_obj_state(self, state)
    part = vars(self).pop(_PART, None)
    if not part or not dist.is_initialized():  # replicated, or read without a process group
        return
    current = _part(self)
    if part == current:
        return
    raise LayoutError(
        f"a tensor of shape {list(self.shape)} in this file is shard {_shown(part)}, and rank {dist.get_rank()} has "
        f"shard {_shown(current)}",
        fix="save module.full_state_dict(rank0_only=True) on the first rank, which every rank can load; or save and "
        "load with torch.distributed.checkpoint on all ranks; or let each rank load the file that it saved",
    )


def _shown(part: Part | None) -> str:
    return "none" if part is None else ", ".join(f"{at} of {size} along {name}" for name, size, at in part)
