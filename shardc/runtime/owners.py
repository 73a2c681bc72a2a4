"""`Owners`: which rank updates which whole parameter, and the exchange of shards for whole tensors.

An optimizer of whole matrices runs on one rank for each matrix: its owner. A parameter is split over some dims of its
mesh, and the ranks that differ along these only hold it together. One of them owns it. Replicas of the parameter have
owners of their own, at the same coordinates, which make the same update.

The dims are those of DTensor's mesh: axes of the user's mesh, or parts of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, product
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement

from shardc import _compat
from shardc.runtime.gathered import indices_at
from shardc.runtime.groups import Groups
from shardc.runtime.owned import Owned

T = TypeVar("T")
# Bytes of whole tensors, per rank, that one exchange moves: each of its two buffers has about this size.
_BUCKET = 1 << 28


def update_cost(shape: Sequence[int]) -> int:
    """Returns the relative cost of an optimizer's update of a matrix: elements times the smaller of rows and columns.

    That is the order of its products with itself (Muon, Shampoo). Dims after the first count as columns.
    """
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
    return rows * columns * min(rows, columns)


def split_dims(param: DTensor) -> list[int]:
    """Returns the mesh dims along which ``param`` is split, or lies on one coordinate only. Mesh dims of one rank are
    left out.
    """
    return [
        dim for dim, placement in enumerate(param.placements)
        if not placement.is_replicate() and param.device_mesh.size(dim) > 1
    ]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Box:
    """The elements of the whole tensor that a rank's shard has, as an index that selects them.

    Args:
        index: selects the shard: a slice per dim, or index tensors that broadcast to its shape.
        shape: shape of the shard.
    """

    index: tuple[slice | Tensor, ...]
    shape: tuple[int, ...]

    @staticmethod
    @lru_cache(maxsize=65536)
    def at(
        shape: tuple[int, ...], placements: tuple[Placement, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...]
    ) -> Box:
        """Returns which elements of a tensor of ``shape`` the rank at ``coordinate`` has, as a `Box`. The mesh has
        ``sizes``.
        """
        indices = indices_at(shape, placements, sizes, coordinate)
        local = tuple(map(len, indices))
        if all(len(index) == 0 or int(index[-1] - index[0]) + 1 == len(index) for index in indices):
            # One box: slices are faster than an index, and select a view.
            starts = [int(index[0]) if len(index) else 0 for index in indices]
            return Box(tuple(slice(at, at + size) for at, size in zip(starts, local, strict=True)), local)
        # Else one index tensor per dim, which broadcast against each other to the shape of the shard.
        ones = [1] * len(shape)
        wide = [index.view(*ones[:dim], -1, *ones[dim + 1 :]) for dim, index in enumerate(indices)]
        return Box(tuple(wide), local)


@dataclass(eq=False)
class Owner:
    """Records which rank updates one parameter as a whole tensor (the owner), and where the shards lie in that
    tensor.

    Args:
        param: the parameter.
        rank: global rank of the owner among the ranks that hold this rank's replica.
        boxes: global rank -> its shard, for each of these ranks; empty on ranks other than the owner.
        placements: placements of whole tensors that only owners have, such as the optimizer's state.
    """

    param: DTensor
    rank: int
    boxes: dict[int, Box]
    placements: tuple[Placement, ...]

    @cached_property
    def is_local(self) -> bool:
        """Whether this rank is the one that updates the parameter."""
        return self.rank == dist.get_rank()

    def place(self, local: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> DTensor:
        """Wraps the owner's whole tensor ``local`` as a DTensor of global ``shape``. Other ranks have no rows of it.

        Args:
            local: the whole tensor, on the owner; elsewhere unused.
        """
        size = torch.Size(shape)
        if not self.is_local or local is None:
            local = self.param._local_tensor.new_empty((0, *size[1:]), dtype=dtype)
        stride = tuple(prod(size[dim + 1 :]) for dim in range(len(size)))
        spec = _compat.dtensor_spec(self.param.device_mesh, self.placements, TensorMeta(size, stride, dtype))
        return DTensor(local, spec, requires_grad=False)


@dataclass(eq=False)
class Owners:
    """Chooses for each parameter an owner, the rank that updates the whole parameter, so that all ranks have about
    the same `update_cost`. Exchanges shards for whole tensors.

    All ranks make it with the same parameters, in the same order.

    Args:
        params: parameters of the mesh of ``groups``, or of views of it, each with `split_dims`.
        groups: process groups of the whole device mesh.
    """

    params: Sequence[DTensor]
    groups: Groups
    owners: list[Owner] = field(init=False)

    def __post_init__(self) -> None:
        load = torch.zeros(max(self.groups.everyone()) + 1, dtype=torch.float64)  # by global rank
        # Largest first, each to the rank with the least load: a greedy balance.
        order = sorted(range(len(self.params)), key=lambda at: -update_cost(self.params[at].shape))
        chosen = {at: _choose_owner(self.params[at], load) for at in order}
        self.owners = [_owner(param, chosen[at]) for at, param in enumerate(self.params)]

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks of the mesh."""
        return self.groups.group(self.groups.mesh.axes)

    @cached_property
    def ranks(self) -> list[int]:
        """Global ranks of the process group `group`, in the order of the group."""
        return dist.get_process_group_ranks(self.group)

    def gather(self, shards: Sequence[tuple[int, Tensor]]) -> list[Tensor | None]:
        """Sends each of ``shards`` to the owner of its parameter by all-to-alls. Returns, for each, the whole tensor
        (in new memory) on the owner, and None on other ranks.

        Args:
            shards: (index of a parameter, this rank's shard of it or of its gradient), the same indices on all ranks.
        """
        out: list[Tensor | None] = [None] * len(shards)
        for batch in self._batches(shards):
            # Every rank sends its shards to the owners; only owners have boxes, and so expect pieces.
            entries = [(self.owners[index], shard) for index, shard in (shards[at] for at in batch)]
            pieces = self._exchange(
                sent=[(owner.rank, shard) for owner, shard in entries],
                expected=[(rank, box.shape) for owner, _ in entries for rank, box in owner.boxes.items()],
                like=entries[0][1],
            )
            for at, (owner, shard) in zip(batch, entries, strict=True):
                if owner.is_local:
                    whole = out[at] = shard.new_empty(owner.param.shape)
                    # Pieces come in the order in which they were announced to `_exchange`.
                    for box in owner.boxes.values():
                        whole[box.index] = next(pieces).to(whole.device)
        return out

    def scatter(self, shards: Sequence[tuple[int, Tensor, Tensor | None]]) -> None:
        """Copies each whole tensor from its owner to the shards on all ranks, in place, by all-to-alls.

        Args:
            shards: (index of a parameter, this rank's shard, the whole tensor on its owner).
        """
        for batch in self._batches([(at, local) for at, local, _ in shards]):
            # The reverse of `gather`: an owner sends each rank its box of the whole tensor.
            entries = [(self.owners[index], shard, whole) for index, shard, whole in (shards[at] for at in batch)]
            sent = [
                (rank, whole[box.index])
                for owner, _, whole in entries
                for rank, box in owner.boxes.items()
                if whole is not None
            ]
            expected = [(owner.rank, tuple(shard.shape)) for owner, shard, _ in entries]
            pieces = self._exchange(sent, expected, like=entries[0][1])
            for (_, shard, _), piece in zip(entries, pieces, strict=True):
                shard.copy_(piece)

    def share(self, value: T) -> dict[int, T]:
        """Returns each rank's ``value``, by global rank; a collective of objects that can be pickled."""
        everyone = [value] * len(self.ranks)
        with self.groups.consistency.communicates("optimizer.state_dict()"):
            dist.all_gather_object(everyone, value, group=self.group)
        return dict(zip(self.ranks, everyone, strict=True))

    def _batches(self, shards: Sequence[tuple[int, Tensor]]) -> Iterator[list[int]]:
        """Groups ``shards`` into exchanges of one dtype and at most `_BUCKET` bytes each. Yields lists of indices of
        ``shards``.
        """
        # All ranks make the same batches: these depend on global sizes and on the order of parameters alone.
        for dtype in dict.fromkeys(local.dtype for _, local in shards):
            batch: list[int] = []
            size = 0
            for at, (index, local) in enumerate(shards):
                if local.dtype != dtype:
                    continue
                # Bytes per rank on average: owners are spread over all ranks.
                more = self.params[index].numel() * dtype.itemsize // len(self.ranks)
                if batch and size + more > _BUCKET:
                    yield batch
                    batch, size = [], 0
                batch.append(at)
                size += more
            yield batch

    def _exchange(
        self, sent: Sequence[tuple[int, Tensor]], expected: Sequence[tuple[int, tuple[int, ...]]], like: Tensor
    ) -> Iterator[Tensor]:
        """Exchanges tensors between ranks by one all-to-all. Yields the received tensors in the order of ``expected``,
        which gives their senders and shapes.

        Args:
            sent: (global rank, tensor), in the order in which that rank expects this rank's.
            expected: (global rank, shape of a tensor that it sends).
            like: a tensor of their dtype.
        """
        outgoing: dict[int, list[Tensor]] = {rank: [] for rank in self.ranks}
        incoming: dict[int, list[int]] = {rank: [] for rank in self.ranks}  # elements of each tensor of that rank
        for rank, x in sent:
            outgoing[rank].append(x.reshape(-1))
        for rank, shape in expected:
            incoming[rank].append(prod(shape))
        # Through memory of the mesh's devices, also for parameters on the host; in the group's order of ranks.
        kind = self.params[0].device_mesh.device_type
        flat = torch.cat([like.new_empty(0), *chain.from_iterable(outgoing.values())]).to(kind)
        sizes_sent = [sum(map(len, tensors)) for tensors in outgoing.values()]
        sizes_received = list(map(sum, incoming.values()))
        buffer = flat.new_empty(sum(sizes_received))
        with self.groups.consistency.communicates("optimizer.step()"):
            dist.all_to_all_single(buffer, flat, sizes_received, sizes_sent, group=self.group)
        pieces = {
            rank: iter(part.split(sizes))
            for (rank, sizes), part in zip(incoming.items(), buffer.split(sizes_received), strict=True)
        }
        return (next(pieces[rank]).view(shape) for rank, shape in expected)


def _choose_owner(param: DTensor, load: Tensor) -> tuple[int, ...]:
    """Chooses the ranks that own a parameter: those with the least ``load`` so far. Returns their coordinates along
    the mesh dims that split the parameter (`split_dims`).

    Args:
        load: summed cost of each global rank's updates; those of the owners grow by the parameter's.
    """
    ranks, dims = param.device_mesh.mesh, split_dims(param)
    replicated = [dim for dim in range(ranks.dim()) if dim not in dims]
    # All replicas get an owner at the same coordinates: the most loaded of these ranks counts. `most` has size 1 along
    # the dims in `replicated`.
    most = load[ranks].amax(replicated, keepdim=True) if replicated else load[ranks].clone()
    for dim in dims:
        if isinstance(placement := param.placements[dim], Owned):
            # Only ranks of the pipeline stage that stores the parameter may own it.
            others = [at for at in range(most.shape[dim]) if at != placement.owner]
            most.index_fill_(dim, torch.tensor(others), torch.inf)
    best = torch.unravel_index(most.argmin(), most.shape)
    # Global ranks of the owners, one per replica.
    owners = ranks[tuple(int(best[dim]) if dim in dims else slice(None) for dim in range(ranks.dim()))]
    load[owners.flatten()] += update_cost(param.shape)
    return tuple(int(best[dim]) for dim in dims)


def _owner(param: DTensor, at: tuple[int, ...]) -> Owner:
    """Returns the `Owner` of ``param``: the rank with coordinates ``at`` along the mesh dims that split the
    parameter, and with this rank's coordinates along the other mesh dims.
    """
    mesh, by_dim = param.device_mesh, dict(zip(split_dims(param), at, strict=True))
    own_coordinate = mesh.get_coordinate()
    assert own_coordinate is not None, "only ranks of the mesh have the module"
    rank = int(mesh.mesh[tuple(by_dim.get(dim, index) for dim, index in enumerate(own_coordinate))])
    boxes = {}
    if rank == dist.get_rank():
        sizes = tuple(mesh.mesh.shape)
        # The ranks that hold this replica together: all coordinates along the dims that split it.
        for coordinate in product(
            *(range(sizes[dim]) if dim in by_dim else [own_coordinate[dim]] for dim in range(mesh.ndim))
        ):
            box = Box.at(tuple(param.shape), param.placements, sizes, coordinate)
            boxes[int(mesh.mesh[coordinate])] = box
    placements = tuple(Owned(by_dim[dim]) if dim in by_dim else Replicate() for dim in range(mesh.ndim))
    return Owner(param, rank, boxes, placements)
