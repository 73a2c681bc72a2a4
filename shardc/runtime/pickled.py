"""A DTensor that is pickled says which part of the whole tensor it is; another rank does not take it for its own part.

A DTensor in a file is one rank's shard and a mesh. When it is read, its mesh is that of the rank that reads, so the
first rank's file would give every rank the first rank's shards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.errors import LayoutError
from shardc.runtime.gathered import ReplicatedSpec

_PART = "shardc_part"  # in the state of a pickled DTensor
_pickle = DTensor.__reduce_ex__

Part = list[tuple[str, int, int]]  # of each mesh dim that splits the tensor: name, size, this rank's place


def install() -> None:
    """Makes DTensors say their part when they are pickled, and look at it when they are read."""
    DTensor.__reduce_ex__ = _reduce  # type: ignore[assignment]
    DTensor.__setstate__ = _set_state  # type: ignore[assignment]


def _part(tensor: DTensor) -> Part | None:
    """Which part of the whole this rank's is; None where it has none."""
    mesh: DeviceMesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    # A mesh that was pickled keeps the coordinate of the rank that did so.
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
    if not part or not dist.is_initialized():  # whole on every rank, or only looked at
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
