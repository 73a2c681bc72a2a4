"""Process groups under the names that the compiled graphs use, the same names on every rank.

A graph names a group by its axes, ``"shardc:dp"`` or ``"shardc:dp,tp"`` (mesh order; axis parts such as
``tp:1x2`` too), so every rank runs the same graph; each rank registers its own process group under that
name. A second mesh of the process gets names with a tag, ``"shardc.1:dp"``: `Groups.rename` maps the
names of the graph to the registered ones before lowering.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

import shardc.runtime.wire.direct  # noqa: F401  (collectives that graphs may call on these groups)
import shardc.runtime.wire.rows  # noqa: F401
from shardc import _compat
from shardc.errors import MeshError
from shardc.ir.comm_volume import GROUP_PREFIX
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh, groups_of
from shardc.ir.view import parts_of, view_of
from shardc.runtime.rank_consistency import Agreement
from shardc.runtime.shards import flat_index
from shardc.runtime.wire.listen import interrupt

Axes = tuple[str, ...]


def _check_carries(mesh: Mesh, kind: str) -> None:
    """Refuses gloo for an accelerator: it raises at some collectives there, and ends the process at others."""
    config = str(dist.get_backend_config())  # such as "cpu:gloo,cuda:nccl"
    if mesh.ranks > 1 and kind != "cpu" and f"{kind}:gloo" in config.split(","):
        raise MeshError(
            f"the mesh {mesh} is of {kind} devices, but gloo, their backend here, does not carry their tensors",
            fix='call dist.init_process_group("nccl"), with a device for each rank, or make a mesh of "cpu"',
        )


class Groups:
    """This rank's process groups of one DeviceMesh; made by `Groups.of`, shared by all programs on that mesh.

    Attributes:
        mesh: the abstract mesh.
        rank: where this process stands on it: the row-major index of its coordinates, not its global rank.
        prefix: of the registered names; another one for each mesh of the process.
        agreement: on what the ranks of the mesh run.
        rename: group name in a graph -> registered name, for the groups added so far.
    """

    def __init__(self, device_mesh: DeviceMesh, tag: int = 0) -> None:
        self.mesh = Mesh.of(device_mesh)
        self.rename: dict[str, str] = {}
        self._device_mesh = device_mesh
        self._views: dict[Mesh, DeviceMesh] = {}
        self._coordinates: dict[tuple[Axes, torch.device], torch.Tensor] = {}
        self.prefix = GROUP_PREFIX if tag == 0 else f"{GROUP_PREFIX.removesuffix(':')}.{tag}:"
        # Mesh rank -> global rank: a DeviceMesh may cover any ranks in any order.
        self._global: list[int] = device_mesh.mesh.flatten().tolist()
        if max(self._global) >= dist.get_world_size():
            raise MeshError(
                f"mesh {self.mesh} has {self.mesh.ranks} ranks, the world has {dist.get_world_size()}",
                fix=f"start {self.mesh.ranks} processes, or make the mesh smaller",
            )
        if dist.get_rank() not in self._global:
            raise MeshError(
                f"rank {dist.get_rank()} is not on the mesh {self.mesh} of ranks {self._global}",
                fix="compile on the ranks of the mesh only",
            )
        _check_carries(self.mesh, device_mesh.device_type)
        self.rank = self._global.index(dist.get_rank())
        self.agreement = Agreement(self.prefix, dist.get_rank(), self._global, self._interrupt)

    @classmethod
    def of(cls, device_mesh: DeviceMesh) -> Groups:
        """The groups of ``device_mesh``; every rank must first ask for its meshes in the same order.

        Raises:
            MeshError: no process group, a mesh without names or larger than the world, or this rank is not on it.
        """
        if not dist.is_initialized():
            raise MeshError("there is no process group to run on", fix="call dist.init_process_group first")
        groups_by_mesh = _known.setdefault(_world(), {})
        key = (device_mesh.mesh_dim_names, tuple(device_mesh.shape), tuple(device_mesh.mesh.flatten().tolist()))
        if key not in groups_by_mesh:
            groups_by_mesh[key] = cls(device_mesh, tag=len(groups_by_mesh))
        return groups_by_mesh[key]

    def add(self, axes_sets: Iterable[Axes]) -> dict[str, str]:
        """Makes the groups of ``axes_sets`` that are not there yet, in an order that depends on the set alone.

        Every rank of the mesh must call this with the same axes sets. Returns `rename`.
        """
        ordered = {self._ordered(axes) for axes in axes_sets}
        for axes in sorted(ordered, key=lambda axes: [self._place(axis) for axis in axes]):
            name = ",".join(axes)
            if GROUP_PREFIX + name in self.rename:
                continue
            c10d._register_process_group(self.prefix + name, self._make(axes))  # type: ignore[arg-type]
            self.rename[GROUP_PREFIX + name] = self.prefix + name
        return self.rename

    def view(self, layouts: Iterable[Layout]) -> DeviceMesh:
        """The mesh with every axis that ``layouts`` cut in parts replaced by them, so that placements can say these.

        Every rank of the mesh must call this with the same layouts.
        """
        parts = parts_of(self.mesh, layouts)
        view = view_of(self.mesh, parts)
        if view == self.mesh:
            return self._device_mesh
        if view not in self._views:
            rename = self.add((part,) for part in parts)
            process_groups = [c10d._resolve_process_group(rename[GROUP_PREFIX + part]) for part in parts]  # type: ignore[arg-type]
            ranks = self._device_mesh.mesh.reshape([size for _, size in view.shape])
            kind = self._device_mesh.device_type
            self._views[view] = DeviceMesh.from_group(process_groups, kind, mesh=ranks, mesh_dim_names=view.axes)
        return self._views[view]

    def _interrupt(self) -> None:
        """Makes whatever this rank waits for in a collective of a graph raise; the groups are of no use then."""
        interrupt({c10d._resolve_process_group(name) for name in self.rename.values()})  # type: ignore[arg-type]

    def everyone(self) -> list[int]:
        """The global ranks of the mesh, in the mesh's order."""
        return list(self._global)

    def ranks(self, axes: Axes) -> list[int]:
        """The global ranks of this rank's group along ``axes``, in group order (first axis in mesh order slowest)."""
        return next(group for group in self._groups(self._ordered(axes)) if dist.get_rank() in group)

    def of_first(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, which all ranks have, with the values of the mesh's first rank: a broadcast along each axis."""
        for axis, group in self._along_each_axis():
            with self.agreement.waits():
                dist.broadcast(x, self.ranks((axis,))[0], group)
        return x

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on some rank of the mesh; all of them call it."""
        return self.most(int(flag)) > 0

    def most(self, number: int) -> int:
        """The largest ``number`` of all ranks of the mesh, which all call it."""
        largest = torch.tensor([number], dtype=torch.int32, device=self._device_mesh.device_type)
        for _, group in self._along_each_axis():
            with self.agreement.waits():
                dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        return int(largest.item())

    def _along_each_axis(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        for axis, size in self.mesh.shape:
            if size > 1:
                name = self.add([(axis,)])[GROUP_PREFIX + axis]
                yield axis, c10d._resolve_process_group(name)  # type: ignore[arg-type]

    def coordinate(self, axes: Axes, device: torch.device | str | None = None) -> torch.Tensor:
        """This rank's index along ``axes``, the first slowest: int64 [1] on ``device`` (the mesh's by default).

        The same tensor at every call: it is for reading.
        """
        place = torch.device(device or self._device_mesh.device_type)
        if (axes, place) not in self._coordinates:
            self._coordinates[axes, place] = torch.tensor([flat_index(self.mesh, axes, self.rank)], device=place)
        return self._coordinates[axes, place]

    def _ordered(self, axes: Axes) -> Axes:
        return tuple(sorted(axes, key=self.mesh.order))

    def _place(self, axis: str) -> tuple[int, int, int]:
        return (*self.mesh.order(axis), self.mesh.size(axis))

    def _groups(self, axes: Axes) -> list[list[int]]:
        """The global ranks of every group along ``axes``, one group after the other."""
        return [[self._global[rank] for rank in group] for group in groups_of(self.mesh, axes)]

    def _make(self, axes: Axes) -> dist.ProcessGroup:
        """This rank's group along ``axes``. What is made, and in which order, is the same on all ranks."""
        groups = self._groups(axes)
        everyone = list(range(dist.get_world_size()))
        if groups == [everyone]:
            return _world()
        if axes[0] in self.mesh.axes and len(axes) == 1 and all(group == sorted(group) for group in groups):
            return self._device_mesh.get_group(axes[0])
        if sorted(self._global) != everyone:
            # Ranks that are not on the mesh do not take part.
            return _compat.new_group(self.ranks(axes), members_only=True)
        handles = [_compat.new_group(group) for group in groups]
        return next(group for group, ranks in zip(handles, groups, strict=True) if dist.get_rank() in ranks)


# The meshes of each world that have groups, by names, shape and ranks. It is the one record of which names
# are taken in c10d's registry, which is global to the process too, and it goes away with its world.
_known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Groups]] = WeakKeyDictionary()


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
