"""The layouts of one parameter while the plan's entries are applied: `Placed` (compute), `ParamPlan` (storage, too)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from math import prod

from shardc.errors import PlanError, ShardcWarning
from shardc.ir.layout import Digit, Layout
from shardc.plan.spec_forms import Form, leaves_dims
from shardc.plan.spec_layout import to_layout
from shardc.plan.uneven_sizes import grown_layout


@dataclass(frozen=True)
class ParamPlan:
    """One parameter's layouts.

    Args:
        storage: layout between steps; its shape is ``padded``.
        compute: layout for its consumers, at the parameter's own shape.
        padded: the parameter's shape, with dims padded if storage could not be split otherwise.
        level: level of the ``fsdp`` entry that stores it; 0 if none does.
        storage_cause: the entry that decided storage, and why if it is replicated; "" if none did.
        compute_cause: the same for compute; several entries are joined by " | ".
        split: if entries split a dim for compute that they do not divide, the compute layout at ``padded`` sizes;
            ``compute`` then does not split that dim.
        host: the entry that keeps it on the host; "" if none does.
        pinned: whether its host memory is pinned.
        regather_axes: for level 3, the axes (or parts of axes) over which it stays split from forward to backward, and
            over which backward gathers it; () for all.
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
    regather_axes: tuple[str, ...] = ()

    @property
    def regather_level(self) -> int:
        """Return the FSDP level: at 3 (ZeRO-3, and offloaded without FSDP) backward gathers or copies it again."""
        return self.level or (3 if self.host else 0)


@dataclass(frozen=True)
class Placed:
    """A parameter with its layout, and where it is stored, by the plan entries applied so far.

    Args:
        names: all of its names (tied parameters have several), its own first.
        shape, nbytes: of the unsharded parameter.
        layout: the layout for compute, and for storage before entries split that further; sizes are the parameter's, or
            padded to what its axes divide.
        causes: the entries that decided the layout.
        host, pinned: as in `ParamPlan`.
        compute_axes: axes that split it for compute, even if entries split storage over them.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    nbytes: int
    layout: Layout
    causes: tuple[str, ...] = ()
    host: str = ""
    pinned: bool = True
    compute_axes: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def odd(self) -> set[int]:
        """Return the dims that are padded for compute."""
        return {dim for dim, size in enumerate(self.shape) if self.layout.shape[dim] != size}

    def by_spec(self, spec: Form, entry: str) -> Placed:
        """Return the parameter with the layout of ``spec``."""
        what, base = f"parameter {self.name!r}", self.layout
        mesh, padded = base.mesh, base.shape
        larger = grown_layout(spec, mesh, self.shape, what=what, entry=entry, padded=padded)
        if larger is not None:
            dims = zip(base.dims, padded, larger.shape, strict=True)
            base = Layout(mesh, [dim if size == now else (Digit(now),) for dim, size, now in dims])
        layout = to_layout(spec, mesh, base.shape, base, what=what, entry=entry, uneven="drop")
        if layout.partial:
            raise PlanError(
                f"parameter {self.name!r} cannot be a partial reduction {layout.partial_text()}",
                plan_entry=entry,
                fix="split it, or leave it whole",
            )
        causes = (*(self.causes if leaves_dims(spec) else ()), entry)
        return replace(self, layout=layout, causes=causes)

    def keeping(self, axis: str) -> Placed:
        """Return the parameter split over ``axis`` for compute, even if entries split storage over that axis."""
        return replace(self, compute_axes=self.compute_axes | {axis})

    def split(self, dim: int, axis: str, entry: str) -> Placed:
        """Return the parameter with ``dim`` also split over ``axis``; the dim is padded if it does not divide."""
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
    """Return ``layout`` split over ``axis``, too, with ``dim`` (of ``size`` elements) padded until that divides.

    None if an axis splits the dim inside of chunks, each of which would need padding.
    """
    mesh, axes = layout.mesh, (*layout.dim_axes(dim), axis)
    if any(digit.axis is None for digit in layout.dims[dim][:-1]):
        return None
    count = prod(mesh.size(a) for a in axes)
    digits = [*(Digit(mesh.size(a), a) for a in axes), Digit(-(-size // count))]
    return layout.replace(dims=[*layout.dims[:dim], digits, *layout.dims[dim + 1 :]])


def warn(text: str, entry: str) -> None:
    """Warn that a parameter cannot have what an entry asks for."""
    warnings.warn(str(PlanError(text, plan_entry=entry)), ShardcWarning, stacklevel=3)
