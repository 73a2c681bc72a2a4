"""`Ddp` and `Fsdp`, of ``ddp``, ``fsdp`` and ``hsdp``: split the batch, and the storage of parameters, over axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal

from shardc.errors import PlanError
from shardc.ir.mesh import Mesh, split_part
from shardc.plan.entries.entry import BY_GLOB, Call, CheckedEntry, Entry
from shardc.plan.layout_spec import show_sizes
from shardc.plan.match import matching, must_match
from shardc.plan.placed import ParamPlan, Placed, as_dtensor, grown, warn
from shardc.validate import Bytes, Range, checked

ShardSize = Annotated[int, Range(1, also=(-1,))]
Level = Annotated[int, Literal[1, 2, 3]]
KeptSize = Annotated[int, Range(2, also=(-1,))]


class Data(CheckedEntry):
    """An entry of data parallelism: it splits the batch over all of its axes. Written without axes, it means the mesh's
    only axis (`on`).
    """

    @property
    def key(self) -> tuple[object, ...]:
        return ("data", frozenset(self.axes))

    @property
    def batch(self) -> tuple[str, ...]:
        return self.axes

    def only_axis(self, mesh: Mesh) -> str:
        """Return the only axis of ``mesh``; PlanError if it has several.

        Raises:
            PlanError: ``mesh`` has several axes.
        """
        if len(mesh.axes) > 1:
            name = self.call[0]
            raise self.error(
                f"{name}() takes the mesh's only axis, and the mesh {mesh} has {len(mesh.axes)}",
                fix=f"name the axes that split the batch: {' or '.join(f'{name}({axis!r})' for axis in mesh.axes)}",
            )
        return mesh.axes[0]


@dataclass(frozen=True)
class Ddp(Data):
    """Splits the batch over ``axis``; parameters are replicated."""

    axis: str | None

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.axis is None else (self.axis,)

    def on(self, mesh: Mesh) -> Entry:
        return self if self.axes else Ddp(self.only_axis(mesh))

    @property
    def call(self) -> Call:
        return "ddp", {"axis": self.axis} if self.axes else {}

    @property
    def row(self) -> tuple[str, str, str]:
        return "data parallel", "inputs", f"dim 0 over {self.axis or 'the only axis'}"


@dataclass(frozen=True)
class Fsdp(Data):
    """Splits the batch over ``shard`` and ``replicate`` (often empty), and the storage of parameters over ``shard``.

    The other fields are those of `shardc.fsdp`.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()
    level: Level = 3
    threshold: Annotated[int, Bytes()] = 0
    shard_size: ShardSize = -1
    overrides: tuple[tuple[str, ShardSize], ...] = ()
    levels: tuple[tuple[str, Level], ...] = ()
    thresholds: tuple[tuple[str, Annotated[int, Bytes()]], ...] = ()
    reshard_after_forward: tuple[tuple[str, KeptSize], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reshard_after_forward and 3 not in (self.level, *dict(self.levels).values()):
            raise self.error(
                "reshard_after_forward applies to parameters of level 3; others stay unsharded for backward",
                fix="write level=3, or leave it out",
            )
        if self.replicate and not self.shard:
            raise PlanError("hsdp needs an axis to split parameters over", fix='write hsdp(shard="dp")')
        for axis in self.axes:
            if self.axes.count(axis) > 1:
                raise self.error(f"axis {axis!r} is used twice", fix="name each axis once")

    @property
    def axes(self) -> tuple[str, ...]:
        return self.replicate + self.shard

    def on(self, mesh: Mesh) -> Entry:
        return self if self.shard else replace(self, shard=(self.only_axis(mesh),))

    @property
    def storage(self) -> tuple[tuple[str, ...], int]:
        return self.shard, self.level

    def check(self, mesh: Mesh, batch: Mapping[str, Entry]) -> None:
        super().check(mesh, batch)
        ranks = prod(mesh.size(axis) for axis in self.shard)
        named = (self.shard_size, *dict(self.overrides).values(), *dict(self.reshard_after_forward).values())
        sizes = sorted({ranks, *((ranks if size == -1 else size) for size in named)})
        for size in sizes:
            if _minor(mesh, self.shard, size) is None or ranks % size:
                over = " and ".join(f"{axis}={mesh.size(axis)}" for axis in self.shard)
                divisors = [n for n in range(1, ranks + 1) if not ranks % n and _minor(mesh, self.shard, n) is not None]
                raise self.error(
                    f"parameters cannot be split over {size} of the {ranks} ranks of {over}",
                    fix=f"use one of {divisors}",
                )
        for smaller, larger in pairwise(sizes):
            if larger % smaller:
                raise self.error(
                    f"parameters cannot be split over {smaller} and over {larger} ranks of one axis",
                    fix="use shard sizes of which one divides the other",
                )

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> dict[str, Placed]:
        for glob, _ in (*self.overrides, *self.levels, *self.thresholds, *self.reshard_after_forward):
            must_match(glob, names, "parameter", str(self))
        return {}

    def level_of(self, param: Placed) -> int:
        return next((level for glob, level in reversed(self.levels) if matching(glob, param.names)), self.level)

    def regather_axes(self, param: Placed) -> tuple[str, ...]:
        sizes = [size for glob, size in self.reshard_after_forward if matching(glob, param.names)]
        return () if not sizes or sizes[-1] == -1 else _minor(param.layout.mesh, self.shard, sizes[-1]) or ()

    def store(self, stored: ParamPlan, param: Placed, view: Mesh | None) -> ParamPlan:
        chosen = [size for glob, size in self.overrides if matching(glob, param.names)]
        axes = _minor(param.layout.mesh, self.shard, chosen[-1] if chosen else self.shard_size)
        assert axes is not None, f"{self} was not checked"
        least = [size for glob, size in self.thresholds if matching(glob, param.names)]
        if param.nbytes < (least[-1] if least else 0 if chosen else self.threshold):
            return replace(stored, storage_cause=f"{self}: {param.nbytes} B stay whole")
        if not axes:
            stored = replace(stored, storage_cause=f"{self}: split over 1 rank")
        for axis in axes:
            if split_part(axis)[0] not in param.compute_axes:
                stored = self._split(stored, param, axis, view)
        return stored

    def _split(self, stored: ParamPlan, param: Placed, axis: str, view: Mesh | None) -> ParamPlan:
        """Return ``stored`` with its storage also split over ``axis``: at the first dim that the axis divides, else at
        a padded dim. If no dim can be split, storage stays whole, with a warning. ``view`` is the mesh of the
        parameters' DTensors.
        """
        storage, size = stored.storage, stored.storage.mesh.size(axis)
        if not storage.ndim or size == 1 or storage.numel == 0:
            return stored
        # A DTensor can split a dim that is padded for compute over one axis only.
        free = [dim for dim in range(storage.ndim) if dim not in param.odd]
        for dim in free:
            split = storage.split(dim, axis)
            if split is not None and (view is None or as_dtensor(split, param.shape, view)):
                return replace(stored, storage=split, storage_cause=str(self))
        for dim in free:
            if not stored.compute.dim_axes(dim):
                padded = grown(storage, dim, axis, stored.compute.shape[dim])
                assert padded is not None, f"dim {dim} of {storage} is split inside of pieces, and not for compute"
                if view is None or as_dtensor(padded, param.shape, view):
                    return replace(stored, storage=padded, padded=padded.shape, storage_cause=str(self))
        warn(
            f"no dim of parameter {param.name!r} of shape {param.shape} can be split over axis {axis!r} of size {size} "
            f"beside {storage}; its storage stays whole on {axis}",
            str(self),
        )
        return replace(stored, storage_cause=f"{self}: no dim divides, stays whole")

    @property
    def call(self) -> Call:
        options: dict[str, Any] = {"level": self.level} | super().call[1]
        shard, replicate = options.pop("shard"), options.pop("replicate", None)
        options |= {name: dict(options[name]) for name in BY_GLOB if name in options}
        if (sizes := options.get("reshard_after_forward")) and list(sizes) == ["*"]:
            options["reshard_after_forward"] = sizes["*"]
        if replicate:
            return "hsdp", {"shard": shard, "replicate": replicate} | options
        return "fsdp", ({"axis": shard} if shard else {}) | options

    @property
    def row(self) -> tuple[str, str, str]:
        replicated = f", whole over {', '.join(self.replicate)}" if self.replicate else ""
        small = f", under {self.threshold} B whole" if self.threshold else ""
        over = f"{self.shard_size} ranks of " if self.shard_size != -1 else ""
        other = f", {show_sizes(dict(self.overrides))}" if self.overrides else ""
        levels = "".join(f", {glob} level {level}" for glob, level in self.levels)
        levels += "".join(f", {glob} under {size} B whole" for glob, size in self.thresholds)
        levels += "".join(f", {glob} kept over {size}" for glob, size in self.reshard_after_forward)
        where = f"storage over {over}{', '.join(self.shard) or 'the only axis'}{replicated}{small}{other}{levels}"
        return f"fsdp level {self.level}", "inputs, params", where


def _minor(mesh: Mesh, axes: tuple[str, ...], size: int) -> tuple[str, ...] | None:
    """Return the innermost of ``axes`` whose sizes multiply to ``size``; None if there are no such axes.

    The outermost of these may be a part of an axis. A ``size`` of -1 means all axes.
    """
    if size == -1:
        return axes
    out: list[str] = []
    for axis in reversed(axes):
        have = mesh.size(axis)
        if size == 1:
            break
        if size % have == 0:
            out.append(axis)
            size //= have
        elif have % size == 0:
            out.append(mesh.cut(axis, have // size)[1])
            size = 1
        else:
            return None
    return tuple(reversed(out)) if size == 1 else None


def by_glob(tables: Mapping[str, object], entry: str) -> dict[str, Any]:
    """Return ``tables``, the arguments of a constructor that map a glob to a number, as entries store them: argument
    name -> ((glob, number), ...).

    ``entry`` is the plan entry, for errors.
    """
    return {
        what: tuple(checked(table or {}, Mapping[str, Any], what, PlanError, plan_entry=entry).items())
        for what, table in tables.items()
    }


def gathered_in(gather: object, level: int, entry: str) -> int:
    """Return the FSDP level that the plan entry asks for by its arguments ``gather`` ("step", "microbatch" or None) and
    ``level``.
    """
    if gather is None:
        return level
    wanted = {"step": 2, "microbatch": 3}.get(checked(gather, str, "gather", PlanError, plan_entry=entry))
    if wanted is None:
        raise PlanError(f"gather is {gather!r}", plan_entry=entry, fix='write gather="step" or gather="microbatch"')
    if level != 3:
        raise PlanError(
            f"gather={gather!r} is level {wanted}, and level is {level}", plan_entry=entry, fix="leave level out"
        )
    return wanted


def regathered(reshard: object, level: int, levels: object, entry: str) -> tuple[int, dict[str, Any]]:
    """Return the FSDP levels that the arguments ``reshard_after_forward`` and ``levels`` ask for, as (default level,
    {argument name: its table by parameter glob}).

    Args:
        reshard: True, False or a number of ranks, or a table parameter glob -> one of these.
        level: the argument ``level``.
        levels: parameter glob -> level.
        entry: the plan entry, for errors.
    """
    level_of = dict(checked(levels or {}, Mapping[str, Any], "levels", PlanError, plan_entry=entry))
    if reshard is True and level != 3:
        raise PlanError(
            f"reshard_after_forward=True is level 3, and level is {level}", plan_entry=entry, fix="leave level out"
        )
    if isinstance(reshard, bool) or reshard is None:
        return level if reshard is not False else min(level, 2), {"levels": level_of, "reshard_after_forward": {}}
    fix = "write True, False or a number of ranks, or one of these by parameter glob"
    table = (
        {"*": reshard}
        if isinstance(reshard, int)
        else checked(reshard, Mapping[str, bool | int], "reshard_after_forward", PlanError, plan_entry=entry, fix=fix)
    )
    level_of |= {glob: 3 if size else 2 for glob, size in table.items() if isinstance(size, bool)}
    sizes = {glob: -1 if size is True else size for glob, size in table.items() if size is not False}
    return level, {"levels": level_of, "reshard_after_forward": sizes}


def axis_names(axis: object, entry: str) -> tuple[str, ...]:
    """Return ``axis``, the name of a mesh axis or a sequence of names, as a tuple; PlanError for anything else."""
    names = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    for name in names:
        if not isinstance(name, str) or not name:
            raise PlanError(f"{name!r} is not the name of a mesh axis", plan_entry=entry, fix='name axes like "dp"')
    return names


def check_apart(entries: Sequence[Entry]) -> None:
    """Raise PlanError if two data-parallel entries have an axis in common."""
    data = [entry for entry in entries if isinstance(entry, Data)]
    for at, entry in enumerate(data):
        for earlier in data[:at]:
            if shared := set(entry.axes) & set(earlier.axes):
                raise PlanError(
                    f"axis {sorted(shared)[0]!r} is given to two data-parallel entries: {earlier} and {entry}",
                    plan_entry=str(entry),
                    fix="give each axis to one entry",
                )
