"""``torch.distributed.checkpoint`` of DTensors whose local tensor consists of several boxes of the global tensor.

DTensor's checkpoint hooks describe one box: an offset and the local shape. For a layout such as ``(3 32@tp)``, with
three boxes, this is wrong (torch 2.13 refuses to save: "overlapping chunks"). Torch makes the DTensors of optimizer
state itself, so `install` replaces the three hooks on DTensor. DTensors of one box are saved as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Box: TypeAlias = "tuple[tuple[slice, ...], ChunkStorageMetadata]"

_HOOKS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
_original = {name: getattr(DTensor, name) for name in _HOOKS}


def install() -> None:
    """Replaces DTensor's checkpoint hooks; a second call changes nothing."""
    for name, hook in zip(_HOOKS, (_write_items, _chunk_list, _tensor_shard), strict=True):
        setattr(DTensor, name, hook)


def _write_items(self: DTensor, fqn: str, value: Any) -> list[WriteItem]:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    boxes = _boxes(self)
    if len(boxes) == 1:
        return _original["__create_write_items__"](self, fqn, value)
    properties = TensorProperties.create_from_tensor(self._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
        )
        for _, chunk in boxes
    ]


def _chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
    boxes = _boxes(self)
    return [chunk for _, chunk in boxes] if len(boxes) > 1 else _original["__create_chunk_list__"](self)


def _tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
    boxes = _boxes(self)
    if len(boxes) == 1:
        return _original["__get_tensor_shard__"](self, index)
    return next(self._local_tensor[where] for where, chunk in boxes if chunk.offsets == index.offset)


def _boxes(tensor: DTensor) -> list[Box]:
    """Returns the boxes of a shard: slices of the local tensor, with global offsets and sizes."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if not any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        whole = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())
        return [((), whole)]
    runs = [list(_runs(index)) for index in local_indices(tensor)]
    return [
        (
            tuple(slice(at, at + size) for at, _, size in box),
            ChunkStorageMetadata(torch.Size(start for _, start, _ in box), torch.Size(size for _, _, size in box)),
        )
        for box in product(*runs)
    ]


def local_indices(tensor: DTensor) -> list[torch.Tensor]:
    """Returns, per dim, the global indices of this rank's shard, by applying the placements to the indices."""
    indices = [torch.arange(size) for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "only ranks of the mesh save and load"
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            # The indices are a 1-d tensor, so the split is along dim 0.
            factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
            along = _StridedShard(0, split_factor=factor)
            pieces, _ = along._split_tensor(
                indices[placement.dim], tensor.device_mesh.size(mesh_dim), with_padding=False
            )
            indices[placement.dim] = pieces[coordinate[mesh_dim]]
    return indices


def _runs(index: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields (local start, global start, length) of each contiguous run of ``index``."""
    breaks = [0, *(torch.nonzero(index.diff() != 1).flatten() + 1).tolist(), len(index)]
    for start, stop in pairwise(breaks):
        yield start, int(index[start]) if stop > start else 0, stop - start
