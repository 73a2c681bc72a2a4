"""`Owned`: placement of a tensor that lies on one coordinate of a mesh axis; layouts of parameters with an owner.

A pipeline's stages are an axis of the user's mesh. Each parameter has one owner along it: the coordinate whose ranks
store it. On the others its local tensor is empty. So every rank has a DTensor for every name, and optimizers, clipping
and checkpoints work as on any mesh.

A tensor without dims cannot be empty. A parameter of that kind is replicated over the axis, and all coordinates get its
gradient from the owner, so they all make the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from shardc import _compat
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.placements import to_placements

Placements = tuple[Placement, ...]


class Owned(Shard):
    """Placement on a mesh dim: the coordinate ``owner`` has the whole tensor, and the others none of its rows.

    For DTensor it is a split of dim 0, into one shard with all rows and empty ones. The other placements split the
    owner's shard.

    >>> Owned(1)._local_shard_size_and_offset(6, 4, 1), Owned(1)._local_shard_size_and_offset(6, 4, 2)
    ((6, 0), (0, 6))
    """

    owner: int

    def __init__(self, owner: int) -> None:
        super().__init__(0)
        object.__setattr__(self, "owner", owner)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owned) and other.owner == self.owner

    def __ne__(self, other: object) -> bool:
        # DTensorSpec asks of each placement that splits dim 0 whether it is `!= Shard(0)`, and would refuse this one.
        return not (self == other or (type(other) is Shard and other.dim == 0))

    def __hash__(self) -> int:
        return hash((Owned, self.owner))

    def __repr__(self) -> str:
        return f"Owned({self.owner})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[object, ...]:
        return Owned, (self.owner,)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return repr(self), {"Owned": Owned}

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        """Returns (rows, offset of the first) on coordinate ``rank``: all on the owner, none at the end elsewhere."""
        return (curr_local_size, 0) if rank == self.owner else (0, curr_local_size)

    def _split_tensor(
        self, tensor: Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        # Returns (shards of all coordinates, their paddings), as DTensor's method does.
        assert not with_padding, "shards of all rows and of none are not scattered"
        return [tensor if rank == self.owner else tensor[:0] for rank in range(num_chunks)], []

    def _to_replicate_tensor(
        self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[Any]
    ) -> Tensor:
        # A rank that is not the owner has no rows, and learns their number from the logical shape.
        shape = [current_logical_shape[0], *local_tensor.shape[1:]]
        return self.from_owner(local_tensor, shape, mesh, mesh_dim)

    def from_owner(self, local: Tensor, shape: Sequence[int], mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        """Broadcasts the tensor ``local`` of the owner along ``mesh_dim``. Returns it on every rank, in new memory."""
        if mesh.get_local_rank(mesh_dim) == self.owner:
            out = local.detach().clone(memory_format=torch.contiguous_format)
        else:
            out = local.new_empty(shape)
        if not out.is_meta:
            dist.broadcast(out, group=mesh.get_group(mesh_dim), group_src=self.owner)
        return out


torch.serialization.add_safe_globals([Owned])


@dataclass(frozen=True, init=False)
class OwnedLayout(Layout):
    """Storage layout of a parameter that one pipeline stage stores. On ranks of other stages it has no rows. Its mesh
    is that of one stage.

    Args:
        layout: the layout on the ranks of the owner's stage.
        stages: the axis of stages.
        owner: coordinate along it of the stage that stores the parameter.
        local: whether that is this rank's stage. Otherwise the local shape has no rows.
    """

    stages: str
    owner: int
    local: bool

    def __init__(self, layout: Layout, stages: str, owner: int, local: bool) -> None:
        super().__init__(layout.mesh, layout.dims, layout.partial)
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "local", local or not layout.ndim)  # a tensor without dims is on all stages

    def __reduce__(self) -> tuple[object, ...]:
        return OwnedLayout, (Layout(self.mesh, self.dims, self.partial), self.stages, self.owner, self.local)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's shard; dim 0 is 0 on a rank of a stage that does not own the parameter."""
        return super().local_shape if self.local else (0, *super().local_shape[1:])

    @property
    def placement(self) -> Placement:
        """The DTensor placement, along the mesh axis of pipeline stages, of a parameter that one stage stores: `Owned`,
        or ``Replicate`` if it has no dims.
        """
        return Owned(self.owner) if self.ndim else Replicate()


def stored_placements(storage: Layout, view: Mesh) -> Placements:
    """Converts the storage layout ``storage`` of a tensor to DTensor placements on ``view``, the device mesh with
    some axes split into parts.

    Raises:
        LayoutError: as `shardc.ir.placements.to_placements`.
    """
    if not isinstance(storage, OwnedLayout):
        return to_placements(storage, view)
    placements, at = to_placements(storage, view.of_stage(storage.stages)), view.axes.index(storage.stages)
    return *placements[:at], storage.placement, *placements[at + 1 :]


def has_owner(placements: Iterable[Placement]) -> bool:
    """Whether one of ``placements`` is `Owned`."""
    return any(isinstance(placement, Owned) for placement in placements)


def everywhere(placements: Iterable[Placement]) -> Placements:
    """Returns ``placements`` with ``Replicate`` in place of `Owned` (stored whole on one coordinate of a mesh dim)."""
    return tuple(Replicate() if isinstance(placement, Owned) else placement for placement in placements)


def redistribute(
    move: Callable[..., DTensor], x: DTensor, device_mesh: DeviceMesh | None, placements: Placements, **options: Any
) -> DTensor:
    """Reshards ``x`` to ``placements``; the old or the new ones include `Owned` (stored whole on one coordinate of a
    mesh dim). Differentiable.

    The shards of an owner are broadcast, then moved as without stages, then dropped by those who do not own the result.
    DTensor's own order of steps would take an owner's rows for a chunk of a split dim.

    Args:
        move: DTensor's own ``redistribute``.
        options: its other arguments.
    """
    if tuple(placements) == x.placements:
        return move(x, device_mesh, placements, **options)
    return _kept_by_owner(move(_broadcast_owned(x), device_mesh, everywhere(placements), **options), placements)


def _broadcast_owned(x: DTensor) -> DTensor:
    """Returns ``x`` with `Owned` placements (stored whole on one coordinate) made replicated: the owners broadcast."""
    return _Spread.apply(x) if has_owner(x.placements) else x


def _kept_by_owner(x: DTensor, placements: Placements) -> DTensor:
    """Returns ``x`` with ``placements``. These differ from its own only by `Owned` (whole on one coordinate of a mesh
    dim) in place of ``Replicate``: the other coordinates drop the tensor.
    """
    return _Confine.apply(x, tuple(placements)) if has_owner(placements) else x


class _Spread(torch.autograd.Function):
    """Autograd function of `_broadcast_owned`, which broadcasts an owner's tensor. In backward, the owner keeps its own
    copy of the replicated gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        # Backward gives the gradient the placements of the operand.
        ctx.placements, mesh, local = x.placements, x.device_mesh, x._local_tensor
        spec = spec_like(x, everywhere(x.placements))
        shape, _ = compute_local_shape_and_global_offset(x.shape, mesh, spec.placements, skip_offset=True)
        # One broadcast for each mesh dim with an owner, from its coordinate along the dim.
        owned = [(dim, placement) for dim, placement in enumerate(x.placements) if isinstance(placement, Owned)]
        for at, (mesh_dim, placement) in enumerate(owned):
            # With several dims, only ranks at the owner's coordinate of each later dim take part: the others have no
            # values yet, and get them from the later broadcasts.
            if all(mesh.get_local_rank(dim) == later.owner for dim, later in owned[at + 1 :]):
                local = placement.from_owner(local, shape, mesh, mesh_dim)
        return DTensor(local, spec, requires_grad=x.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return grad.redistribute(placements=ctx.placements)


class _Confine(torch.autograd.Function):
    """Autograd function of `_kept_by_owner`, which leaves a replicated tensor on its owner only. Backward broadcasts
    the gradient from the owner.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: Placements) -> DTensor:
        ctx.placements = x.placements  # of the operand, which backward gives to the gradient
        coordinate = x.device_mesh.get_coordinate()
        assert coordinate is not None
        # A rank has rows only if it is at the owner's coordinate of every mesh dim that has one.
        owns = all(at == p.owner for at, p in zip(coordinate, placements, strict=True) if isinstance(p, Owned))
        local = x._local_tensor.detach().clone() if owns else x._local_tensor.new_empty((0, *x._local_tensor.shape[1:]))
        return DTensor(local, spec_like(x, placements), requires_grad=x.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return grad.redistribute(placements=ctx.placements), None


def spec_like(x: DTensor, placements: Placements, dtype: torch.dtype | None = None) -> DTensorSpec:
    """Returns the spec of a tensor of the shape and, by default, the dtype of ``x`` with ``placements``."""
    return _compat.dtensor_spec(x.device_mesh, placements, TensorMeta(x.shape, x.stride(), dtype or x.dtype))
