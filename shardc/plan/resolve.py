"""A plan against a mesh and a model's parameters: how each is stored, and how it is computed with.

The compute layout is what TP and raw entries say; storage is that, split further over the axes of the ``fsdp``
entries. Their disagreement is what makes FSDP's gathers and reduce-scatters.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardc.errors import LayoutError, PlanError, ShardcWarning
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh, split_part
from shardc.ir.view import parts_of, view_of
from shardc.plan.entries import Data, Entry, Fsdp, Offload, Param, Tp
from shardc.plan.forms import leaves_dims, spec_axes
from shardc.plan.match import must_match
from shardc.plan.shard_size import Split, check_sizes, split_over
from shardc.plan.spec import check_axis, to_layout
from shardc.plan.stored import as_dtensor
from shardc.plan.uneven import grown_layout
from shardc.plan.value import Plan

Sizes = Mapping[str, tuple[Sequence[int], int]]


@dataclass(frozen=True)
class ParamPlan:
    """One parameter's layouts.

    Args:
        storage: between steps; its shape is ``padded``.
        compute: for its consumers, at the parameter's own shape.
        padded: the parameter's shape, a dim grown where storage could not be split otherwise.
        level: of the ``fsdp`` entry that stores it, 0 where none does.
        storage_cause: the entry that made storage what it is, and why where it kept it whole; "" if none did.
        compute_cause: the same for compute, several entries joined by " | ".
        split: where the entries split a dim for compute that they do not divide, the compute layout at ``padded``
            sizes; ``compute`` then leaves that dim whole.
        offload: the entry that keeps it on the host; None where none does.
    """

    storage: Layout
    compute: Layout
    padded: tuple[int, ...]
    level: int
    storage_cause: str
    compute_cause: str
    split: Layout | None = None
    offload: Offload | None = None

    @property
    def host(self) -> str:
        """The entry that keeps it on the host, "" where none does."""
        return str(self.offload) if self.offload is not None else ""

    @property
    def again(self) -> int:
        """The level by which it is kept from forward to backward: one that is moved there whole is moved again."""
        return self.level or (3 if self.offload is not None else 0)


def resolve_params(
    plan: Plan, mesh: Mesh, params: Sizes, aliases: Mapping[str, str] | None = None
) -> dict[str, ParamPlan]:
    """The layouts of every parameter.

    Args:
        params: name -> (shape, bytes of one element).
        aliases: other names of tied parameters -> the name in ``params``; globs match these too.

    Raises:
        PlanError: an unknown axis, a glob that matches nothing, a spec of the wrong rank, an axis that is given to
            data parallelism and to TP. Nothing is changed before all entries are checked.
        LayoutError: an entry that splits a dim as no DTensor can be.

    Warns:
        ShardcWarning: a dim that does not divide, with what is done instead.
    """
    check_axes(plan, mesh)
    names = {name: name for name in params} | dict(aliases or {})
    said = {name: _Said(name, tuple(shape), Layout.whole(mesh, shape)) for name, (shape, _) in params.items()}
    for entry in plan.entries:
        if isinstance(entry, Param):
            for name in dict.fromkeys(names[found] for found in must_match(entry.glob, names, "parameter", str(entry))):
                said[name] = said[name].by_spec(entry)
        elif isinstance(entry, Tp):
            for name, dim in _tp_targets(entry, names).items():
                said[name] = said[name].by_tp(entry, dim)
    over = {name: split_over(plan, mesh, name, names) for name in params}
    host = resolve_offload(plan, names)

    def resolved(view: Mesh | None) -> dict[str, ParamPlan]:
        return {
            name: replace(_resolve_one(plan, said[name], itemsize, over[name], view), offload=host.get(name))
            for name, (_, itemsize) in params.items()
        }

    with warnings.catch_warnings():  # a first look: which parts of axes there will be
        warnings.simplefilter("ignore")
        first = resolved(None)
    view = view_of(mesh, parts_of(mesh, (found.storage for found in first.values())))
    out = resolved(view)
    for name, found in out.items():
        if not as_dtensor(found.storage, params[name][0], view):
            raise LayoutError(
                f"parameter {name!r} of shape {tuple(params[name][0])} cannot be stored as {found.storage}: DTensor "
                "cuts a dim that does not divide over one axis after the other",
                plan_entry=found.storage_cause,
                fix="split that dim over one axis only, or over axes that divide it",
            )
    return out


def resolve_offload(plan: Plan, names: Mapping[str, str]) -> dict[str, Offload]:
    """The entry that keeps each parameter on the host, of those that are.

    Args:
        names: every name of every parameter -> the first.

    Raises:
        PlanError: a glob that matches no parameter.
    """
    last: dict[str, Offload] = {}
    for entry in plan.entries:
        if isinstance(entry, Offload):
            last |= {names[found]: entry for found in must_match(entry.glob, names, "parameter", str(entry))}
    return {name: entry for name, entry in last.items() if entry.to == "host"}


@dataclass(frozen=True)
class _Said:
    """What raw and TP entries say of one parameter so far: its layout, and the entries that made it.

    The layout's sizes are the parameter's, or grown to what its axes divide.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    causes: tuple[str, ...] = ()

    def by_spec(self, entry: Param) -> _Said:
        what, base = f"parameter {self.name!r}", self.layout
        mesh, held = base.mesh, base.shape
        grown = grown_layout(entry.spec, mesh, self.shape, what=what, entry=str(entry), held=held)
        if grown is not None:
            kept = zip(base.dims, held, grown.shape, strict=True)
            base = Layout(mesh, [dim if size == now else (Digit(now),) for dim, size, now in kept])
        layout = to_layout(entry.spec, mesh, base.shape, base, what=what, entry=str(entry), uneven="drop")
        if layout.partial:
            raise PlanError(
                f"parameter {self.name!r} cannot lie as a pending reduction {layout.partial_text()}",
                plan_entry=str(entry),
                fix="split it, or leave it whole",
            )
        causes = (*(self.causes if leaves_dims(entry.spec) else ()), str(entry))
        return replace(self, layout=layout, causes=causes)

    def by_tp(self, entry: Tp, dim: int) -> _Said:
        if dim >= self.layout.ndim:
            raise PlanError(
                f"parameter {self.name!r} of shape {self.shape} has no dim {dim} for {entry.style} to split",
                plan_entry=str(entry),
                fix="match only modules whose weight is a matrix",
            )
        free = self.layout.unbind([entry.axis])
        split = free.split(dim, entry.axis)
        if split is None and self.shape[dim] > 1:
            split = _grown(free, dim, entry.axis, self.shape[dim])
        if split is None:
            _warn(
                f"dim {dim} of parameter {self.name!r} of shape {self.shape} does not divide over axis {entry.axis!r} "
                f"of size {free.mesh.size(entry.axis)}; the parameter stays whole on {entry.axis}",
                str(entry),
            )
        return replace(self, layout=split or free, causes=(*self.causes, str(entry)))


def check_axes(plan: Plan, mesh: Mesh) -> None:
    """What can be checked of a plan with the mesh alone.

    Raises:
        PlanError: an axis that is not on ``mesh``, one that is given to TP and to the batch, levels that differ, shard
            sizes that do not divide.
    """
    batch = {axis: entry for entry in plan.entries if isinstance(entry, Data) for axis in entry.axes}
    levels = {entry.level for entry in plan.entries if isinstance(entry, Fsdp)}
    if len(levels) > 1:
        raise PlanError(
            f"the plan has fsdp entries of levels {' and '.join(map(str, sorted(levels)))}",
            plan_entry=" | ".join(str(entry) for entry in plan.entries if isinstance(entry, Fsdp)),
            fix="give all of them the same level",
        )
    for entry in plan.entries:
        for axis in entry_axes(entry):
            check_axis(axis, mesh, str(entry))
        if isinstance(entry, Fsdp):
            check_sizes(entry, mesh)
        if isinstance(entry, Tp) and entry.axis in batch:
            raise PlanError(
                f"axis {entry.axis!r} is given to TP and to {batch[entry.axis]}",
                plan_entry=str(entry),
                fix="use one axis for the batch and another for TP",
            )


def entry_axes(entry: Entry) -> tuple[str, ...]:
    """The mesh axes that ``entry`` names."""
    if isinstance(entry, Data | Tp):
        return entry.axes
    spec = getattr(entry, "spec", None)
    return () if spec is None else spec_axes(spec)


def _tp_targets(entry: Tp, names: Mapping[str, str]) -> dict[str, int]:
    """Parameter -> dim to split, of the modules that ``entry`` matches."""
    modules = [name.rpartition(".")[0] for name in names if name.rpartition(".")[2] == "weight"]
    targets: dict[str, int] = {}
    for module in must_match(entry.glob, modules, "module with a weight", str(entry)):
        prefix = f"{module}." if module else ""
        targets[names[f"{prefix}weight"]] = 1 if entry.style == "rowwise" else 0
        if entry.style == "colwise" and f"{prefix}bias" in names:
            targets[names[f"{prefix}bias"]] = 0
    return targets


def _resolve_one(plan: Plan, said: _Said, itemsize: int, over: Mapping[Fsdp, Split], view: Mesh | None) -> ParamPlan:
    """What is said is of storage; the axes of ``fsdp`` entries leave it for compute.

    Args:
        view: the mesh that parameters are DTensors on, once it is known.
    """
    entries = [entry for entry in plan.entries if isinstance(entry, Fsdp)]
    shard = [axis for entry in entries for axis in entry.shard]
    level = max((entry.level for entry in entries), default=0)
    cause = " | ".join(said.causes)
    layout, free = said.layout, said.layout.unbind(shard)
    odd = {dim for dim, size in enumerate(said.shape) if layout.shape[dim] != size}
    dims = [(Digit(size),) if dim in odd else free.dims[dim] for dim, size in enumerate(said.shape)]
    out = ParamPlan(layout, free.replace(dims=dims), layout.shape, level, cause, cause)
    size = prod(said.shape) * itemsize
    for entry in entries if not set(layout.bound) & set(shard) else ():
        axes, chosen = over[entry]
        if size < entry.threshold and not chosen:
            out = replace(out, storage_cause=f"{entry}: {size} B stay whole")
            continue
        if not axes:
            out = replace(out, storage_cause=f"{entry}: split over 1 rank")
        for axis in axes:
            out = _split_storage(out, entry, axis, said, odd, view)
    split = out.storage.unbind(axis for axis in out.storage.bound if split_part(axis)[0] in shard)
    return replace(out, split=split) if any(split.dim_axes(dim) for dim in odd) else out


def _split_storage(plan: ParamPlan, entry: Fsdp, axis: str, said: _Said, odd: set[int], view: Mesh | None) -> ParamPlan:
    """``plan`` with ``axis`` bound in storage: at the first local digit that it divides, else by padding a dim.

    Args:
        odd: dims that are padded for compute already; DTensor cuts such over one axis only.
        view: as `_resolve_one`'s.
    """
    size = plan.storage.mesh.size(axis)
    if not plan.storage.ndim or size == 1 or plan.storage.numel == 0:
        return plan
    free = [dim for dim in range(plan.storage.ndim) if dim not in odd]
    for dim in free:
        split = plan.storage.split(dim, axis)
        if split is not None and (view is None or as_dtensor(split, said.shape, view)):
            return replace(plan, storage=split, storage_cause=str(entry))
    for dim in free:
        if not plan.compute.dim_axes(dim):
            padded = _pad_storage(plan, entry, axis, dim)
            if view is None or as_dtensor(padded.storage, said.shape, view):
                return padded
    _warn(
        f"no dim of parameter {said.name!r} of shape {said.shape} can be split over axis {axis!r} of size {size} "
        f"beside {plan.storage}; its storage stays whole on {axis}",
        str(entry),
    )
    return replace(plan, storage_cause=f"{entry}: no dim divides, stays whole")


def _pad_storage(plan: ParamPlan, entry: Fsdp, axis: str, dim: int) -> ParamPlan:
    """Storage's ``dim`` grown to the next multiple of its axes and ``axis``, and split over them."""
    storage = _grown(plan.storage, dim, axis, plan.compute.shape[dim])
    assert storage is not None, f"dim {dim} of {plan.storage} is split inside of pieces, and not for compute"
    return replace(plan, storage=storage, padded=storage.shape, storage_cause=str(entry))


def _grown(layout: Layout, dim: int, axis: str, size: int) -> Layout | None:
    """``layout`` with ``dim``, of ``size`` elements, grown until its axes and ``axis`` divide it, and split over them.

    None where an axis splits the dim inside of pieces: these would have to grow each.
    """
    mesh, axes = layout.mesh, (*layout.dim_axes(dim), axis)
    if any(digit.axis is None for digit in layout.dims[dim][:-1]):
        return None
    count = prod(mesh.size(a) for a in axes)
    digits = [*(Digit(mesh.size(a), a) for a in axes), Digit(-(-size // count))]
    return layout.replace(dims=[*layout.dims[:dim], digits, *layout.dims[dim + 1 :]])


def _warn(text: str, entry: str) -> None:
    warnings.warn(str(PlanError(text, plan_entry=entry)), ShardcWarning, stacklevel=3)
