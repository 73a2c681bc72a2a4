"""Gathers DTensors, and writes gathered tensors back to their shards. Also saves checkpoints of shards that consist
of several boxes.

``weight[0]`` of a parameter sharded along dim 0 is not a view of a rank's shard. DTensor returns a gathered copy and
loses writes to it. A `GatheredView` reads the current values and writes through to the shards.

A shard may consist of several boxes of the global tensor. DTensor's checkpoint hooks describe one: an offset and the
local shape. For a layout such as ``(3 32@tp)``, with three boxes, this is wrong (torch 2.13 refuses to save:
"overlapping chunks"). Torch makes the DTensors of optimizer state itself, so `install_checkpointing` replaces the three
hooks on DTensor, and what ``StateDictOptions(broadcast_from_rank0=True)`` cuts whole tensors with, which would take
other rows. DTensors of one box are saved as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import mesh_broadcast
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from shardc import _compat
from shardc._compat import PyTree
from shardc.errors import LayoutError
from shardc.runtime.owned import Owned
from shardc.runtime.shards import fingerprint

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


Box: TypeAlias = "tuple[tuple[slice, ...], ChunkStorageMetadata]"

_HOOKS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
_original = {name: getattr(DTensor, name) for name in _HOOKS}
_distribute_boxes = _state_dict_utils._distribute_tensors


def install_checkpointing() -> None:
    """Replaces DTensor's hooks for distributed checkpoints by ones that also handle a shard of several boxes. A
    second call changes nothing.
    """
    for name, hook in zip(_HOOKS, (_write_items, _chunk_list, _tensor_shard), strict=True):
        setattr(DTensor, name, hook)
    _state_dict_utils._distribute_tensors = _distribute_tensors


def _distribute_tensors(local_state_dict: dict[str, object], keys: list[str], *args: object, **options: object) -> None:
    """Replaces torch's function of this name, which loads checkpoints. Each pair (DTensor, whole tensor) in the state
    dict is replaced by the DTensor, filled with its shard of the tensor.
    """
    for key in keys:
        pair = local_state_dict.get(key)
        # Other entries are left to torch's function, below: it cuts shards of one box right.
        if not isinstance(pair, tuple) or not isinstance(pair[0], DTensor) or not _is_strided(pair[0]):
            continue
        target, part = pair
        for dim, index in enumerate(box_indices(target)):
            part = part.index_select(dim, index.to(part.device))
        if target.is_meta:  # it has no memory to copy to
            target = DTensor(part, target._spec, requires_grad=False)
        else:
            target.to_local().copy_(part)
        local_state_dict[key] = target
    _distribute_boxes(local_state_dict, keys, *args, **options)  # type: ignore[arg-type]


def _is_strided(tensor: DTensor) -> bool:
    """Whether ``tensor`` has a strided placement (``_StridedShard``). Its shards then may consist of several boxes of
    the global tensor.
    """
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements)


def _write_items(self: DTensor, fqn: str, value: object) -> list[WriteItem]:
    """Implements ``DTensor.__create_write_items__``, which tells a checkpoint what to save of a shard: one item for
    each box (contiguous part) of the shard.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    boxes = _boxes(self)
    if len(boxes) <= 1:
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
    """Implements ``DTensor.__create_chunk_list__``, which tells a checkpoint what a shard consists of: one chunk for
    each box (contiguous part) of the shard.
    """
    boxes = _boxes(self)
    return [chunk for _, chunk in boxes] if len(boxes) > 1 else _original["__create_chunk_list__"](self)


def _tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
    """Implements ``DTensor.__get_tensor_shard__``, with which a checkpoint reads a shard that consists of several
    boxes: returns the box that starts at the offset of ``index``.
    """
    boxes = _boxes(self)
    if len(boxes) <= 1:
        return _original["__get_tensor_shard__"](self, index)
    return next(self._local_tensor[where] for where, chunk in boxes if chunk.offsets == index.offset)


def _boxes(tensor: DTensor) -> list[Box]:
    """Splits this rank's shard into boxes, parts that are contiguous in the global tensor in every dim. Returns
    (slices of the local tensor, chunk with global offsets and sizes) for each.

    Returns [] without strided placements: the shard is one box, of which DTensor's own hooks know.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if not _is_strided(tensor):
        return []
    # Of each dim, the runs of consecutive global indices. A box has one run per dim.
    runs = [list(_runs(index)) for index in box_indices(tensor)]
    return [
        (
            tuple(slice(at, at + size) for at, _, size in box),
            ChunkStorageMetadata(torch.Size(start for _, start, _ in box), torch.Size(size for _, _, size in box)),
        )
        for box in product(*runs)
    ]


def box_indices(tensor: DTensor) -> list[torch.Tensor]:
    """Returns, for each dim of ``tensor``, the global indices that this rank's shard has, as an int64 tensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "only ranks of the mesh save and load"
    return indices_at(tensor.shape, tensor.placements, tuple(tensor.device_mesh.shape), coordinate)


def indices_at(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> list[torch.Tensor]:
    """Returns, for each dim of a tensor of ``shape``, the global indices that one rank's shard has, as `box_indices`
    does for this rank. The rank is at ``coordinate`` of a mesh of ``sizes``.

    Args:
        shape, placements: of the tensor.
        sizes: of the mesh's dims.
        coordinate: of the rank.
    """
    indices = [torch.arange(size) for size in shape]
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Owned):
            # The owner has the whole tensor, and the other coordinates no row of it.
            indices[0] = indices[0] if coordinate[mesh_dim] == placement.owner else indices[0][:0]
        elif isinstance(placement, Shard | _StridedShard):
            # The indices are a 1-d tensor, so the split is along dim 0. With factor 1 it is that of `Shard`.
            factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
            along = _StridedShard(0, split_factor=factor)
            pieces, _ = along._split_tensor(indices[placement.dim], sizes[mesh_dim], with_padding=False)
            indices[placement.dim] = pieces[coordinate[mesh_dim]]
    return indices


def _runs(index: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields (position in ``index``, global index, length) of each run of consecutive numbers in ``index``."""
    # Positions at which a run begins, and the end of the last. Without elements: one run of length 0.
    breaks = [0, *(torch.nonzero(index.diff() != 1).flatten() + 1).tolist(), len(index)]
    for start, stop in pairwise(breaks):
        yield start, int(index[start]) if stop > start else 0, stop - start


pytree = _compat.pytree


def gather(x: DTensor) -> Tensor:
    """Gathers ``x``, with pending sums reduced, and returns the unsharded tensor; a collective. If ``x`` is
    replicated, its local tensor is returned.
    """
    if x._spec.is_replicated():
        return x._local_tensor
    local, kind = x._local_tensor.detach(), x.device_mesh.device_type
    # An offloaded parameter is gathered on the device.
    source = local if local.device.type == kind else local.to(kind)
    meta = TensorMeta(x.shape, x._spec.tensor_meta.stride if x._spec.tensor_meta else x.stride(), x.dtype)
    spec = _compat.dtensor_spec(x.device_mesh, x.placements, meta)
    return DTensor(source, spec, requires_grad=False).full_tensor().to(local.device)


def replicated(whole: Tensor, device_mesh: DeviceMesh) -> DTensor:
    """Wraps ``whole``, which is the same on all ranks, as a replicated DTensor."""
    return DTensor(whole, replicated_spec(whole, device_mesh), requires_grad=False)


class ReplicatedSpec(DTensorSpec):
    """Spec of a replicated DTensor, which DTensor's caches distinguish from the spec of a plain tensor.

    DTensor caches its decisions by the operands' specs, and gives plain tensors specs too. With equal specs, a plain
    tensor in place of a DTensor would hit the cache, and `dtensor_ops` would not see it.
    """

    def __eq__(self, other: object, /) -> bool:
        return type(other) is ReplicatedSpec and self._check_equals(other)

    __hash__ = DTensorSpec.__hash__

    def plain(self) -> DTensorSpec:
        """Returns a plain DTensorSpec with the same content, which can be saved to files."""
        spec = DTensorSpec.__new__(DTensorSpec)
        spec.__dict__.update(self.__dict__)
        return spec

    @classmethod
    def mark(cls, spec: object) -> bool:
        """Makes ``spec`` a `ReplicatedSpec`, in place, if it is a plain DTensorSpec of a replicated tensor. Returns
        whether it was one.
        """
        if type(spec) is not DTensorSpec or not spec.is_replicated():
            return False
        spec.__class__ = cls
        return True


def replicated_spec(whole: Tensor, device_mesh: DeviceMesh) -> DTensorSpec:
    """Returns the `ReplicatedSpec` of ``whole``, which is the same on every rank."""
    spec = _spec_of(whole, device_mesh, (Replicate(),) * device_mesh.ndim)
    ReplicatedSpec.mark(spec)
    return spec


def reduce_pending(x: DTensor) -> DTensor:
    """If ``x`` has pending reductions, performs them and makes ``x`` replicated, in place. Returns ``x``."""
    if any(placement.is_partial() for placement in x.placements):
        whole = gather(x)
        x._local_tensor, x._spec = whole, replicated_spec(whole, x.device_mesh)
    return x


def scatter_into(x: DTensor, whole: Tensor) -> None:
    """Copies this rank's shard of the unsharded ``whole`` into ``x``, in place; LayoutError if the shapes differ."""
    if whole.shape != x.shape:
        raise LayoutError(
            f"an op in place would make a DTensor of shape {list(x.shape)} one of shape {list(whole.shape)}",
            fix="keep its shape; for a new value of another shape, change the model and compile it again",
        )
    part = shard_of(x, whole)
    if part is not x._local_tensor:
        x._local_tensor.copy_(part)


def shard_of(x: DTensor, whole: Tensor) -> Tensor:
    """Returns this rank's shard of the unsharded ``whole`` in the layout of ``x``, which has the same shape. If ``x``
    is replicated, it is ``whole`` itself.
    """
    part = whole
    for dim, index in enumerate(box_indices(x)):
        if len(index) != whole.shape[dim]:
            part = part.index_select(dim, index.to(part.device))
    return part


def scattered_like(x: DTensor, whole: Tensor) -> DTensor:
    """Returns ``whole``, an unsharded tensor, as a DTensor in the layout of ``x``, which must have no pending sums."""
    return DTensor(shard_of(x, whole), _spec_of(whole, x.device_mesh, x.placements), requires_grad=False)


def _spec_of(whole: Tensor, device_mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensorSpec:
    """Returns the spec of a DTensor with ``placements`` and the global shape and strides of ``whole``."""
    return _compat.dtensor_spec(device_mesh, placements, TensorMeta(whole.shape, whole.stride(), whole.dtype))


def check_equal(tensors: list[Tensor], device_mesh: DeviceMesh, op: OpOverload) -> None:
    """Raises LayoutError unless plain ``tensors``, used with DTensors in ``op``, are equal on all ranks; one
    collective.

    Tensors of one element are not compared, like Python numbers.

    Raises:
        LayoutError: they differ, so they cannot count as replicated.
    """
    tensors = [x for x in tensors if x.numel() > 1]
    if not tensors:
        return
    # Fingerprints have 64 bits without a sign, of which int64 holds 63.
    fingerprints = torch.tensor([fingerprint(x) >> 1 for x in tensors], device=device_mesh.device_type)
    # One all-reduce gives the maximum of all ranks and, as the largest complement (~), the minimum.
    bounds = torch.stack([fingerprints, ~fingerprints])
    for dim in range(device_mesh.ndim):
        torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX, device_mesh.get_group(dim))
    for x, highest, complement in zip(tensors, *bounds.tolist(), strict=True):
        if highest != ~complement:
            raise LayoutError(
                f"{op} has a parameter or gradient and a plain tensor of shape {list(x.shape)}, which stands for a "
                "whole tensor; its values differ between ranks",
                fix="make the same tensor on all ranks (the same seed), or a DTensor with its placements; what "
                "a module takes and gives is a rank's own rows: write the line inside of forward",
            )


def broadcast(x: Tensor, device_mesh: DeviceMesh) -> None:
    """Broadcasts ``x``, in place, from the mesh's first rank."""
    for dim in range(device_mesh.ndim):
        mesh_broadcast(x, device_mesh, dim)


def written(op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Iterator[Tensor]:
    """Yields the tensor arguments that ``op`` writes, by the marks of its schema, such as ``Tensor(a!) self``."""
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            yield from (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))


class _Source:
    """The base DTensor of gathered views, and the unsharded tensor that their local tensors are views of."""

    def __init__(self, base: DTensor, whole: Tensor) -> None:
        self.base, self.whole = base, whole

    def read(self) -> None:
        """Gathers the current values of the base DTensor into the unsharded tensor that the views are of, in place; a
        collective.
        """
        self.whole.copy_(gather(self.base))

    def write(self) -> None:
        """Writes the unsharded tensor, which views may have changed, back to the shards of the base DTensor, in
        place.
        """
        scatter_into(self.base, self.whole)


class GatheredView(DTensor):
    """A view of a sharded DTensor as if it were unsharded: ops on it read current values and write to the shards.

    Each op on it gathers the DTensor, so all ranks must run it.
    """

    _source: _Source

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: tuple[PyTree, ...] = (), kwargs: dict[str, PyTree] | None = None
    ) -> PyTree:
        """Runs an op on views: gathers the current values of their bases, runs it on these, and writes what it changed
        back to the shards.
        """
        kwargs = kwargs or {}
        views = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, GatheredView)]
        for source in {id(x._source): x._source for x in views}.values():  # once for several views of one base
            source.read()
        first = args[0] if args else None
        # A view of a view has the same source, to which it writes through.
        if func.is_view and isinstance(first, GatheredView):
            return _wrapped(func(first._local_tensor, *args[1:], **kwargs), first._source)
        writes = list(written(func, args, kwargs))
        stand_ins: dict[int, DTensor] = {}  # id of a view -> plain DTensor in its memory, on which `func` runs

        def unwrap(x: object) -> object:
            if isinstance(x, GatheredView):
                return stand_ins.setdefault(id(x), DTensor(x._local_tensor, x._spec, requires_grad=False))
            return x

        # As plain DTensors, on which the op does not come back here.
        result = func(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs))
        for x in writes:
            if isinstance(x, GatheredView):
                x._source.write()
        # An in-place op returns its argument: here the view, and not its stand-in.
        view_of_stand_in = {id(stand_ins[id(x)]): x for x in writes if id(x) in stand_ins}
        return pytree.tree_map(lambda x: view_of_stand_in.get(id(x), x), result)


def view_of(base: DTensor, op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    """Applies the view ``op`` to ``base``, its first argument; each result is a `GatheredView`."""
    whole = gather(base)
    if whole is base._local_tensor:
        whole = whole.detach()
    return _wrapped(op(whole, *args[1:], **kwargs), _Source(base, whole))


def _wrapped(results: PyTree, source: _Source) -> PyTree:
    """Wraps each tensor in ``results``, a view of the unsharded tensor of ``source``, as a `GatheredView`."""

    def wrap(x: object) -> object:  # a view op may have several results, such as ``split``
        if not isinstance(x, Tensor):
            return x
        view = GatheredView(x, replicated_spec(x, source.base.device_mesh), requires_grad=False)
        view._source = source
        return view

    return pytree.tree_map(wrap, results)
