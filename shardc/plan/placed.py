"""One parameter, as the entries of a plan place it: where it lies for compute, then where it is stored."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from math import prod

from shardc.errors import PlanError, ShardcWarning
from shardc.ir.layout import Digit, Layout
from shardc.plan.forms import Form, leaves_dims
from shardc.plan.spec import to_layout
from shardc.plan.uneven import grown_layout


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
        host: the entry that keeps it on the host, "" where none does.
        pinned: whether it is pinned there.
        kept: of level 3, the axes and parts of axes over which it stays split from forward to backward; all if none.
    """

    storage: Layout
    compute: Layout
    padded: tuple[int, ...]
    level: int
    storage_cause: str
    compute_cause: str
    split: Layout | None = None
    host: str = ""
    pinned: bool = True
    kept: tuple[str, ...] = ()

    @property
    def again(self) -> int:
        """The level by which it is kept from forward to backward: one that is moved there whole is moved again."""
        return self.level or (3 if self.host else 0)


@dataclass(frozen=True)
class Placed:
    """What entries say of one parameter so far.

    Args:
        names: all that it has, its own first.
        shape, nbytes: of all of it.
        layout: for compute, and for storage before that is split further; sizes are the parameter's, or grown to what
            its axes divide.
        causes: the entries that made the layout.
        host, pinned: as in `ParamPlan`.
        kept: axes that split it for compute even where entries split storage over them.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    nbytes: int
    layout: Layout
    causes: tuple[str, ...] = ()
    host: str = ""
    pinned: bool = True
    kept: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def odd(self) -> set[int]:
        """The dims that are padded for compute."""
        return {dim for dim, size in enumerate(self.shape) if self.layout.shape[dim] != size}

    def by_spec(self, spec: Form, entry: str) -> Placed:
        """It lies as ``spec`` says."""
        what, base = f"parameter {self.name!r}", self.layout
        mesh, held = base.mesh, base.shape
        larger = grown_layout(spec, mesh, self.shape, what=what, entry=entry, held=held)
        if larger is not None:
            kept = zip(base.dims, held, larger.shape, strict=True)
            base = Layout(mesh, [dim if size == now else (Digit(now),) for dim, size, now in kept])
        layout = to_layout(spec, mesh, base.shape, base, what=what, entry=entry, uneven="drop")
        if layout.partial:
            raise PlanError(
                f"parameter {self.name!r} cannot lie as a pending reduction {layout.partial_text()}",
                plan_entry=entry,
                fix="split it, or leave it whole",
            )
        causes = (*(self.causes if leaves_dims(spec) else ()), entry)
        return replace(self, layout=layout, causes=causes)

    def keeping(self, axis: str) -> Placed:
        """It is split over ``axis`` for compute, whatever else stores over that."""
        return replace(self, kept=self.kept | {axis})

    def split(self, dim: int, axis: str, entry: str) -> Placed:
        """``dim`` is split over ``axis`` too, padded where it does not divide."""
        free = self.layout.unbind([axis])
        if shared := [bound for bound in free.bound if free.mesh.overlap(bound, axis)]:
            raise PlanError(
                f"parameter {self.name!r} is split over {axis!r} and over {shared[0]!r}, which share ranks",
                plan_entry=" | ".join((*self.causes, entry)),
                fix="split it over the same axis, or over parts of it that share no ranks",
            )
        split = free.split(dim, axis)
        if split is None and self.shape[dim] > 1:
            split = grown(free, dim, axis, self.shape[dim])
        if split is None:
            warn(
                f"dim {dim} of parameter {self.name!r} of shape {self.shape} does not divide over axis {axis!r} "
                f"of size {free.mesh.size(axis)}; the parameter stays whole on {axis}",
                entry,
            )
        return replace(self, layout=split or free, causes=(*self.causes, entry))


def grown(layout: Layout, dim: int, axis: str, size: int) -> Layout | None:
    """``layout`` with ``dim``, of ``size`` elements, grown until its axes and ``axis`` divide it, and split over them.

    None where an axis splits the dim inside of pieces: these would have to grow each.
    """
    mesh, axes = layout.mesh, (*layout.dim_axes(dim), axis)
    if any(digit.axis is None for digit in layout.dims[dim][:-1]):
        return None
    count = prod(mesh.size(a) for a in axes)
    digits = [*(Digit(mesh.size(a), a) for a in axes), Digit(-(-size // count))]
    return layout.replace(dims=[*layout.dims[:dim], digits, *layout.dims[dim + 1 :]])


def warn(text: str, entry: str) -> None:
    """Warns of what an entry asks for and a parameter cannot have."""
    warnings.warn(str(PlanError(text, plan_entry=entry)), ShardcWarning, stacklevel=3)
