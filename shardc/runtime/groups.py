"""Process groups of one mesh, under names that compiled graphs use on every rank, and errors of their collectives.

A graph names a group by its axes in mesh order, ``"shardc:dp"`` or ``"shardc:dp,tp"`` (or axis parts, ``tp:1x2``). Each
rank registers its own process group under that name, so all ranks run the same graph. Names of a second mesh of the
process have a tag, ``"shardc.1:dp"``; `Groups.rename` maps graph names to registered names before lowering.

If an axis of the device mesh has a pipeline's stages, programs run on the mesh of one stage (`Mesh.of_stage`). Its
`Groups` lie inside this rank's stage. What all ranks agree on goes through the groups of the whole mesh.

`as_collective_error` names a failed collective (a peer is gone), its plan entry and source line. Nothing is recorded
for it during a step: the traceback shows the failing node, or the line of Inductor's code, whose collectives are in
graph order (`shardc.ir.emitted.check_order`).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import getitem
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

import shardc.runtime.gloo.direct  # noqa: F401  (collectives that graphs may call on these groups)
from shardc import _compat
from shardc.errors import CollectiveError, MeshError
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT, group_name
from shardc.ir.comm_volume import GROUP_PREFIX, arguments_of, collective_kind, group_axes
from shardc.ir.emitted import collective_at
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh, groups_of
from shardc.ir.placements import parts_of, view_of
from shardc.ir.repeat import Segment
from shardc.runtime.gloo.listen import interrupt
from shardc.runtime.rank_consistency import RankConsistency
from shardc.runtime.shards import flat_index

Axes = tuple[str, ...]


def _check_ranks(mesh: Mesh, ranks: Sequence[int]) -> None:
    """Raises MeshError if ``mesh``, of the global ``ranks``, exceeds the world, or if this rank is not on it."""
    if max(ranks) >= dist.get_world_size():
        raise MeshError(
            f"mesh {mesh} has {mesh.ranks} ranks, the world has {dist.get_world_size()}",
            fix=f"start {mesh.ranks} processes, or make the mesh smaller",
        )
    if dist.get_rank() not in ranks:
        raise MeshError(
            f"rank {dist.get_rank()} is not on the mesh {mesh} of ranks {ranks}",
            fix="compile on the ranks of the mesh only",
        )


def _check_carries(mesh: Mesh, kind: str) -> None:
    """Raises MeshError if gloo is the backend of accelerators: some of its collectives raise, others end the process.

    Args:
        kind: device type of the mesh.
    """
    config = str(dist.get_backend_config())  # such as "cpu:gloo,cuda:nccl"
    if mesh.ranks > 1 and kind != "cpu" and f"{kind}:gloo" in config.split(","):
        raise MeshError(
            f"the mesh {mesh} is of {kind} devices, but gloo, their backend here, does not carry their tensors",
            fix='call dist.init_process_group("nccl"), with a device for each rank, or make a mesh of "cpu"',
        )


class Groups:
    """This rank's process groups of one DeviceMesh, shared by all its programs; get one with `Groups.of`.

    Args:
        tag: number of the mesh among those of the process.
        number: number of the mesh among those of the process that have the same ranks, so that these agree on it.
        whole: the groups of the whole device mesh; None makes these.
        stages: axis of the device mesh whose coordinates are stages, with ``whole``.

    Attributes:
        mesh: the abstract mesh, on which ``stages`` has size 1.
        device_mesh: a mesh equal to the device mesh, whose groups no other thread uses (`_without_world_group`).
        rank: row-major index of this process on the mesh, not its global rank.
        prefix: prefix of the registered names, unique per mesh of the process.
        consistency: checks that all ranks of the device mesh run the same events.
        rename: group name in a graph -> registered name.
    """

    def __init__(
        self, device_mesh: DeviceMesh, tag: int = 0, number: int = 0, whole: Groups | None = None, stages: str = ""
    ) -> None:
        self.mesh = Mesh.of(device_mesh)
        self.rename: dict[str, str] = {}
        self.stages, self._whole = stages, whole
        self._inside: dict[str, Groups] = {}  # axis of stages -> the groups inside this rank's stage
        self.device_mesh = device_mesh
        self._views: dict[Mesh, DeviceMesh] = {}  # results of `view`
        self._coordinates: dict[tuple[Axes, torch.device], torch.Tensor] = {}  # results of `coordinate`
        self.prefix = _prefix(tag)
        # Mesh rank -> global rank: a DeviceMesh may cover any ranks in any order.
        self._global_ranks: list[int] = device_mesh.mesh.flatten().tolist()
        # The groups inside a stage; checks between ranks are still those of the whole mesh.
        if whole is not None:
            self.mesh, self._global_ranks = self.mesh.of_stage(stages), self.of_stage(self.stage)
            self.rank = self._global_ranks.index(dist.get_rank())
            self.consistency: RankConsistency = whole.consistency
            self.consistency.place = self.place
            return
        _check_ranks(self.mesh, self._global_ranks)
        _check_carries(self.mesh, device_mesh.device_type)
        self.rank = self._global_ranks.index(dist.get_rank())
        # Keys in the store have `number`, on which the ranks agree; `tag` may differ, as ranks may have other meshes.
        self.consistency = RankConsistency(_prefix(number), dist.get_rank(), self._global_ranks, self._interrupt)
        for dim in range(device_mesh.ndim):
            _compat.take_timeout_of_world(device_mesh.get_group(dim))
        self.device_mesh = _without_world_group(device_mesh)
        self._spans_world = self.device_mesh is not device_mesh

    @classmethod
    def of(cls, device_mesh: DeviceMesh, stages: str = "") -> Groups:
        """Returns the `Groups` of ``device_mesh``, made at the first call. If several meshes have the same ranks, all
        ranks must use these meshes in the same order.

        Args:
            stages: axis of ``device_mesh`` whose coordinates are a pipeline's stages. The groups are those inside this
                rank's stage then.

        Raises:
            MeshError: there is no process group, the mesh has no names or exceeds the world, or this rank is not on it.
        """
        if not dist.is_initialized():
            raise MeshError("there is no process group to run on", fix="call dist.init_process_group first")
        # A new world: DTensor's caches may name groups of one that has ended.
        if _world() not in _known:
            _compat.forget_specs_of_dtensors()
        groups_by_mesh = _known.setdefault(_world(), {})
        mesh_ranks = tuple(device_mesh.mesh.flatten().tolist())
        key = (device_mesh.mesh_dim_names, tuple(device_mesh.shape), mesh_ranks)
        if key not in groups_by_mesh:
            # The same on all ranks of the mesh. The tag is not: this process may have further meshes.
            number = sum(ranks == mesh_ranks for _, _, ranks, *_ in groups_by_mesh)
            groups_by_mesh[key] = cls(device_mesh, tag=len(groups_by_mesh), number=number)
        whole = groups_by_mesh[key]
        if not stages:
            return whole
        if stages not in whole._inside:
            whole._inside[stages] = cls(device_mesh, tag=len(groups_by_mesh), whole=whole, stages=stages)
            # Entered too, since the tag of the next mesh is the number of entries.
            of_stages = (*key, stages)
            groups_by_mesh[of_stages] = whole._inside[stages]
        return whole._inside[stages]

    @property
    def whole(self) -> Groups:
        """The `Groups` of the whole device mesh, with the ranks of all pipeline stages. Without stages it is this
        object.
        """
        return self if self._whole is None else self._whole

    @property
    def stage(self) -> int:
        """This rank's coordinate along the axis of stages; 0 without stages."""
        return self.whole.mesh.index(self.stages, self.whole.rank) if self.stages else 0

    @property
    def first(self) -> bool:
        """Whether this is the first rank of the device mesh."""
        return self.whole.rank == 0

    def along_stages(self, back: bool = False) -> dist.ProcessGroup:
        """Returns this rank's process group along the axis of pipeline stages. With ``back``, returns a second group
        of the same ranks, for messages in the opposite direction.

        Args:
            back: whether it is the second one. NCCL runs what two ranks send each other over one group in turn, so
                each direction has a group of its own.
        """
        whole, name = self.whole, GROUP_PREFIX + self.stages
        if back and f"{name}:back" not in whole.rename:
            registered = f"{whole.prefix}{self.stages}:back"
            c10d._register_process_group(registered, whole._new((self.stages,)))  # type: ignore[arg-type]
            whole.rename[f"{name}:back"] = registered
        key = f"{name}:back" if back else name
        registered_names = whole.add([(self.stages,)])
        return c10d._resolve_process_group(registered_names[key])  # type: ignore[arg-type]

    def add(self, axes_sets: Iterable[Axes]) -> dict[str, str]:
        """Creates the process groups along ``axes_sets``, unless they exist. Returns `rename`: name of a group in
        graphs -> name under which torch has registered the group.

        All ranks of the mesh must call this with the same axes sets; groups are created in the same order on all. With
        stages, the ranks of each stage must.
        """
        ordered = {self._ordered(axes) for axes in axes_sets}
        # Sorted, as the order of a set differs between processes.
        for axes in sorted(ordered, key=lambda axes: [self._place(axis) for axis in axes]):
            name = ",".join(axes)
            if GROUP_PREFIX + name in self.rename:
                continue
            c10d._register_process_group(self.prefix + name, self._make(axes))  # type: ignore[arg-type]
            self.rename[GROUP_PREFIX + name] = self.prefix + name
        return self.rename

    def group(self, axes: Axes) -> dist.ProcessGroup:
        """Returns this rank's process group along ``axes``, created if it does not exist (see `add`)."""
        name = self.add([axes])[group_name(self._ordered(axes))]
        return c10d._resolve_process_group(name)  # type: ignore[arg-type]

    def view(self, layouts: Iterable[Layout]) -> DeviceMesh:
        """Returns a DeviceMesh in which each axis that ``layouts`` split into parts is replaced by one dim per part.

        With stages it is a view of the whole device mesh. All ranks of that must call this with the same layouts.
        """
        if self.whole is not self:
            return self.whole.view(layouts)
        parts = parts_of(self.mesh, layouts)
        view = view_of(self.mesh, parts)
        if view == self.mesh:  # no axis is split
            return self.device_mesh
        if view not in self._views:
            rename = self.add((part,) for part in parts)
            # One per dim of the view, which is the mesh with its ranks in the same order.
            process_groups = [c10d._resolve_process_group(rename[GROUP_PREFIX + part]) for part in parts]  # type: ignore[arg-type]
            ranks = self.device_mesh.mesh.reshape([size for _, size in view.shape])
            kind = self.device_mesh.device_type
            self._views[view] = DeviceMesh.from_group(process_groups, kind, mesh=ranks, mesh_dim_names=view.axes)
        return self._views[view]

    def _interrupt(self) -> None:
        """Aborts the collectives in which this rank waits: the wait raises an error. The process groups cannot be
        used afterwards.
        """
        names = [name for groups in (self, *self._inside.values()) for name in groups.rename.values()]
        groups = {c10d._resolve_process_group(name) for name in names}  # type: ignore[arg-type]
        # A rank may also wait in a collective of the user's, for those that do not come.
        interrupt(groups | ({_world()} if self._spans_world else set()))

    def everyone(self) -> list[int]:
        """Returns the global ranks of the mesh, in mesh order; with stages, the ranks of this rank's stage."""
        return list(self._global_ranks)

    def of_stage(self, stage: int) -> list[int]:
        """Returns the global ranks of ``stage``, in mesh order; without stages all of them."""
        whole = self.whole
        if not self.stages:
            return list(self._global_ranks)
        return [rank for at, rank in enumerate(whole._global_ranks) if whole.mesh.index(self.stages, at) == stage]

    def ranks(self, axes: Axes) -> list[int]:
        """Returns the global ranks of this rank's group along ``axes``, in group order (first mesh axis slowest)."""
        return next(group for group in self._groups(self._ordered(axes)) if dist.get_rank() in group)

    def place(self, rank: int) -> str:
        """Returns a global rank as text, with its stage if it is on the mesh: "3 (pp=1)"."""
        ranks = self.whole._global_ranks
        return (
            f"{rank} ({self.stages}={self.whole.mesh.index(self.stages, ranks.index(rank))})"
            if rank in ranks
            else str(rank)
        )

    def of_first(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcasts ``x`` from the device mesh's first rank, in place, and returns it."""
        for axis, group in self.whole._along_each_axis():
            with self.consistency.waits():
                dist.broadcast(x, self.whole.ranks((axis,))[0], group)
        return x

    def any(self, flag: bool) -> bool:
        """Returns whether ``flag`` is true on some rank of the device mesh; a collective."""
        return self.most(int(flag)) > 0

    def most(self, number: int) -> int:
        """Returns the largest ``number`` of all ranks of the device mesh; a collective."""
        largest = torch.tensor([number], dtype=torch.int32, device=self.device_mesh.device_type)
        for _, group in self.whole._along_each_axis():
            with self.consistency.waits():
                dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        return int(largest.item())

    def _along_each_axis(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """Yields (name, this rank's process group along it) of each mesh axis with several ranks."""
        for axis, size in self.mesh.shape:
            if size > 1:
                yield axis, self.group((axis,))

    def coordinate(self, axes: Axes, device: torch.device | str | None = None) -> torch.Tensor:
        """Returns this rank's index along ``axes`` (first slowest) as int64 [1], on the mesh's device by default.

        It is cached: do not write to it.
        """
        place = torch.device(device or self.device_mesh.device_type)
        if (axes, place) not in self._coordinates:
            self._coordinates[axes, place] = torch.tensor([flat_index(self.mesh, axes, self.rank)], device=place)
        return self._coordinates[axes, place]

    def _ordered(self, axes: Axes) -> Axes:
        """Returns ``axes`` in mesh order."""
        return tuple(sorted(axes, key=self.mesh.order))

    def _place(self, axis: str) -> tuple[int, int, int]:
        """Returns a sort key for an axis or axis part: its place in the mesh's order of axes, then its size."""
        return (*self.mesh.order(axis), self.mesh.size(axis))

    def _groups(self, axes: Axes) -> list[list[int]]:
        """Returns, for every group along ``axes``, the list of its global ranks."""
        return [[self._global_ranks[rank] for rank in group] for group in groups_of(self.mesh, axes)]

    def _make(self, axes: Axes) -> dist.ProcessGroup:
        """Returns this rank's group along ``axes``: one that the device mesh has, or else a new one. All ranks create
        the same groups in the same order.

        With stages, those of a stage do: the programs of stages may differ in their groups.
        """
        if self.stages:
            # Inside a stage, the axis of stages has one coordinate.
            inside = tuple(axis for axis in axes if axis != self.stages)
            if len(inside) == 1 and inside[0] in self.mesh.axes:  # a whole axis, and not a part of it
                return self.device_mesh.get_group(inside[0])
            # By its members only: other stages need not create it.
            return _compat.new_group(self.ranks(inside), members_only=True)
        groups = self._groups(axes)
        everyone = list(range(dist.get_world_size()))
        if groups == [everyone] and not _world_is_shared(self.device_mesh):
            return _world()
        # The device mesh has groups of whole axes. Torch orders the ranks of a group by number, and graphs count them
        # in mesh order: both must be the same.
        if axes[0] in self.mesh.axes and len(axes) == 1 and all(group == sorted(group) for group in groups):
            return self.device_mesh.get_group(axes[0])
        return self._new(axes)

    def _new(self, axes: Axes) -> dist.ProcessGroup:
        """Creates a new process group along ``axes``, although the device mesh may have one of the same ranks. All
        ranks must call this in the same order.
        """
        groups, everyone = self._groups(axes), list(range(dist.get_world_size()))
        if sorted(self._global_ranks) != everyone:
            # Ranks that are not on the mesh do not take part.
            return _compat.new_group(self.ranks(axes), members_only=True)
        # Torch requires that all ranks of the world create each group, also those that are not in it.
        handles = [_compat.new_group(group) for group in groups]
        return next(group for group, ranks in zip(handles, groups, strict=True) if dist.get_rank() in ranks)


# Per world: the meshes with groups, by names, shape and ranks. Like c10d's registry, whose names it tracks, it is
# global to the process; it ends with its world.
_known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Groups]] = WeakKeyDictionary()


def _prefix(tag: int) -> str:
    """Returns the prefix of the names of groups on the mesh with number ``tag``."""
    return GROUP_PREFIX if tag == 0 else GROUP_PREFIX.replace(":", f".{tag}:")


def _world() -> dist.ProcessGroup:
    """Returns the default process group, of all ranks."""
    world = dist.group.WORLD
    assert world is not None
    return world


def _world_is_shared(device_mesh: DeviceMesh) -> bool:
    """Whether threads other than the one that runs steps may use the world's process group: they may on CPU ranks.

    Gloo matches collectives of a group by their order on each rank. ``torch.distributed.checkpoint.async_save`` calls
    them in a thread, in the world's group by default. Among those of steps their order differs from rank to rank, and
    ranks would hang, end or read each other's numbers. (NCCL's are in order of a stream, and saving uses gloo.)
    """
    return device_mesh.device_type == "cpu" and dist.get_world_size() > 1


def _without_world_group(device_mesh: DeviceMesh) -> DeviceMesh:
    """Returns a mesh equal to ``device_mesh`` that does not use the world's process group, in which other threads may
    run collectives meanwhile. The axis of all ranks, for which DeviceMesh takes that group, gets a new one.

    Returns ``device_mesh`` itself if it has no such axis, or if no other thread uses that group (`_world_is_shared`).
    """
    groups, world = [device_mesh.get_group(dim) for dim in range(device_mesh.ndim)], _world()
    if world not in groups or not _world_is_shared(device_mesh):
        return device_mesh
    world_copy = _compat.new_group(range(dist.get_world_size()))
    return DeviceMesh.from_group(
        [world_copy if group == world else group for group in groups],
        device_mesh.device_type,
        mesh=device_mesh.mesh,
        mesh_dim_names=device_mesh.mesh_dim_names,
    )


class Cause(Protocol):
    """Why a collective exists, for errors: the plan entry that led to it, and the source line in the model."""

    @property
    def entry(self) -> str:
        """The plan entry that led to the collective, as text; "" if unknown."""

    @property
    def source(self) -> str:
        """Source line in the model that the failed collective comes from, as ``file:line``; "" if it is unknown."""


def as_collective_error(
    error: Exception,
    gm: fx.GraphModule,
    which: str,
    groups: Groups,
    cause: Callable[[fx.Node], Cause],
    segment: Segment | None = None,
) -> CollectiveError | None:
    """Converts ``error``, raised while running ``gm``, to a CollectiveError that names the collective. Returns None
    if the error was not raised in a collective.

    Raises:
        MeshError: the collective failed because ranks differ, or because another rank raised.

    Args:
        which: "forward", "backward", "inference" or "reduction".
        cause: maps a collective of ``gm`` to its plan entry and source line.
        segment: the part of ``gm`` that ran; by default all of it.
    """
    node = collective_of(error, gm, segment)
    if node is None:
        return None
    # The lowered graph has the name by which torch knows the group; its name in captured graphs tells the axes.
    name = next(key for key, value in groups.rename.items() if value == arguments_of(node)["group_name"])
    axes = group_axes(name, groups.mesh) or ()
    ranks, why = groups.ranks(axes), cause(node)
    text, rank = str(error).partition("\n")[0], dist.get_rank()
    return CollectiveError(
        f"rank {groups.consistency.place(rank)} was in {collective_kind(node)} over {','.join(axes)} of "
        f"{results_of(node)}, in {which}, when it failed: {text}",
        plan_entry=why.entry or None,
        source=why.source or None,
        fix=groups.consistency.advice_on_lost([peer for peer in ranks if peer != rank]),
    )


def collective_of(error: Exception, gm: fx.GraphModule, segment: Segment | None = None) -> fx.Node | None:
    """Finds the collective that raised ``error``, at its start or in its wait, by the traceback. Returns the node in
    ``gm`` that starts it; None if no collective failed.

    Args:
        segment: the part of ``gm`` that ran; by default all of it.
    """
    collective: fx.Node | None = None
    step = error.__traceback__
    while step is not None:  # from the outermost frame to the innermost, whose collective counts
        frame, line = step.tb_frame, step.tb_lineno
        # Either a frame of fx.Interpreter, at node `n`, or one of Inductor's code (`call`), at a line of it.
        at = frame.f_locals.get("n") if frame.f_code.co_name == "run_node" else None
        if isinstance(at, fx.Node):
            collective = _start(at)
        elif frame.f_code.co_name == "call":
            # `index`: which collective this line starts or waits for. The code has them in the graph's order.
            index = collective_at(linecache.getlines(frame.f_code.co_filename), line)
            starts = [node for node in gm.graph.nodes if collective_kind(node) is not None]
            # `first`: collectives of `gm` before the segment. `takes`: names of the nodes that are its arguments.
            first, takes = (segment.collective, segment.takes) if segment is not None else (0, ())
            if index is not None and 0 <= index < len(starts) - first:
                collective = starts[first + index]
            # Index -1 - i: the wait for argument i of the segment, which an earlier segment has started.
            elif index is not None and -1 - index in range(len(takes)):
                collective = next(_start(node) for node in gm.graph.nodes if node.name == takes[-1 - index])
        step = step.tb_next
    return collective


def _start(node: fx.Node) -> fx.Node | None:
    """Returns the node that starts the collective that ``node`` starts or waits for; None if ``node`` does neither."""
    while collective_kind(node) is None:
        # With several results, a `getitem` of one of them is between the start and the wait.
        waits = node.target in (WAIT, getitem)
        if not waits or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return node


def results_of(start: fx.Node) -> str:
    """Returns the names of the results of the collective that node ``start`` starts, as text: ``%a, %b, %c and 2
    more``.
    """
    # Its results are those of its waits; with several, a `getitem` of each comes before the wait.
    users = [user for x in start.users for user in (x.users if x.target is getitem else (x,))]
    names = [f"%{ir.info(user).name}" for user in users]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
