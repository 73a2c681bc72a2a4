"""Applies a spec (`shardc.plan.spec_forms`) to a tensor of known mesh and shape, and returns its `Layout`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch.distributed.tensor import Partial, Shard

from shardc._compat import StridedShard
from shardc.errors import LayoutError, PlanError, ShardcWarning
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh
from shardc.ir.placements import from_placements
from shardc.plan.spec_forms import DimSpec, DimsSpec, Form, OnAxes, freeze, is_placements, read, show
from shardc.validate import near

Uneven = Literal["error", "drop"]


def check_axis(axis: str, mesh: Mesh, entry: str) -> None:
    """Raise PlanError, with suggestions, if ``axis`` is neither an axis of ``mesh`` nor a part of one."""
    name, colon, part = axis.partition(":")
    if name not in mesh.axes:
        fix = near(axis, mesh.axes, f"use one of {list(mesh.axes)}")
        raise PlanError(f"unknown mesh axis {axis!r}; the mesh is {mesh}", plan_entry=entry or None, fix=fix)
    sizes = [int(size) if size.isdecimal() else 0 for size in part.split("x")]
    ranks = mesh.size(name)
    if colon and (len(sizes) != 2 or not all(sizes) or not 1 < sizes[1] < ranks or ranks % prod(sizes)):
        raise PlanError(
            f"{axis!r} is not a part of axis {name!r}, which has {ranks} ranks",
            plan_entry=entry or None,
            fix=f'write {name!r}, or a part of it as "{name}:2x4": 4 ranks, in each of 2 blocks before them',
        )


def to_layout(
    spec: Any,
    mesh: Mesh,
    shape: Sequence[int],
    base: Layout | None = None,
    *,
    what: str,
    entry: str,
    uneven: Uneven = "error",
) -> Layout:
    """Return the layout that ``spec`` describes.

    Args:
        spec: any form of `shardc.plan.spec_forms`.
        shape: the tensor's global shape.
        base: the layout whose dims ``~`` keeps, without the axes that the spec uses itself; by default not split.
        what: the tensor, for messages, e.g. ``parameter 'up.weight'``.
        entry: the plan entry, for messages.
        uneven: if a size does not divide over an axis: "error" raises, "drop" leaves the axis off with a
            `ShardcWarning`.

    Raises:
        PlanError: an axis is unknown or used twice, or rank or sizes are not the tensor's.
        LayoutError: a size does not divide.
    """
    form = freeze(spec, entry)
    tensor = _Tensor(mesh, tuple(shape), form, what, entry, uneven)
    base = base or Layout.whole(mesh, shape)
    if isinstance(form, OnAxes):
        return tensor.on_axes(form, base.without_partial())
    if is_placements(form):
        read_as = tensor.read_placements()
        if isinstance(read_as, Layout):
            return read_as
    else:
        read_as = read(form, entry)
    for axis in read_as.axes:
        check_axis(axis, mesh, entry)
    dims = tensor.fill(read_as)
    base = base.unbind(read_as.axes)
    digits = [base.dims[at] if dim.keep else tensor.digits(at, dim) for at, dim in enumerate(dims)]
    return Layout(mesh, digits, [(axis, op) for axis, op in read_as.partial if mesh.size(axis) > 1])


@dataclass(frozen=True)
class _Tensor:
    """A tensor, and the spec that is applied to it."""

    mesh: Mesh
    shape: tuple[int, ...]
    form: Form
    what: str
    entry: str
    uneven: Uneven

    def __str__(self) -> str:
        return f"{self.what} of shape {self.shape}"

    def fill(self, spec: DimsSpec) -> list[DimSpec]:
        """Return one spec per dim of the tensor; a spec that starts with ``...`` is extended to the leading dims."""
        dims = list(spec.dims)
        if spec.leading is not None and len(dims) <= len(self.shape):
            dims = [spec.leading] * (len(self.shape) - len(dims)) + dims
        if len(dims) != len(self.shape):
            raise PlanError(
                f"spec {show(self.form)} has {len(dims)} dims, {self} has {len(self.shape)}",
                plan_entry=self.entry,
                fix="give one item for each dim of the tensor",
            )
        return dims

    def digits(self, dim: int, spec: DimSpec) -> list[Digit]:
        """Return the digits of ``dim`` as the spec splits it."""
        size = self.shape[dim]
        explicit = prod(sub for sub, _ in spec.subs if sub is not None)
        rest = size // explicit if explicit else size
        fits = rest * explicit == size if any(sub is None for sub, _ in spec.subs) else size == explicit
        if not fits:
            raise PlanError(
                f"spec {show(self.form)} gives dim {dim} {explicit} elements, {self} has {size}",
                plan_entry=self.entry,
                fix="write _ for whatever size is left",
            )
        out: list[Digit] = []
        for sub, axes in spec.subs:
            left = rest if sub is None else sub
            for axis in axes:
                if left % self.mesh.size(axis):
                    self._report_uneven(dim, left, axis)
                else:
                    left //= self.mesh.size(axis)
                    out.append(Digit(self.mesh.size(axis), axis))
            out.append(Digit(left))
        return out

    def _report_uneven(self, dim: int, left: int, axis: str, pieces: int = 1) -> None:
        size = self.mesh.size(axis)
        inside = f" inside each of {pieces} pieces" if pieces > 1 else ""
        text = f"dim {dim} of {self}: {left} elements do not divide over axis {axis!r} of size {size}{inside}"
        fix = f"make the size a multiple of {size * pieces}, or leave {axis} off"
        if self.uneven == "error":
            raise LayoutError(text, plan_entry=self.entry, fix=fix)
        error = LayoutError(f"{text}; the dim stays whole on {axis}", plan_entry=self.entry, fix=fix)
        warnings.warn(str(error), ShardcWarning, stacklevel=4)

    def on_axes(self, form: OnAxes, base: Layout) -> Layout:
        """Return ``base`` with each axis of ``form`` placed anew: at the most major digit that fits, below the chunks
        of its split factor.
        """
        layout = base.unbind(axis for axis, _ in form.placements if axis in self.mesh)
        for axis, placement in form.placements:
            check_axis(axis, self.mesh, self.entry)
            if isinstance(placement, Partial):
                layout = layout.with_partial([axis] if self.mesh.size(axis) > 1 else [], placement.reduce_op)
            elif isinstance(placement, Shard | StridedShard):
                layout = self._bind(layout, self._dim(placement), axis, getattr(placement, "split_factor", 1))
        return layout

    def _bind(self, layout: Layout, dim: int, axis: str, pieces: int) -> Layout:
        size = self.mesh.size(axis)
        for at, (radix, bound) in enumerate(layout.dims[dim]):
            if bound is None and radix % (pieces * size) == 0:
                cut = (Digit(pieces), Digit(size, axis), Digit(radix // (pieces * size)))
                digits = [*layout.dims[dim][:at], *cut, *layout.dims[dim][at + 1 :]]
                return layout.replace(dims=[*layout.dims[:dim], digits, *layout.dims[dim + 1 :]])
        self._report_uneven(dim, layout.local_shape[dim], axis, pieces)
        return layout

    def _dim(self, placement: Shard | StridedShard) -> int:
        if not -len(self.shape) <= placement.dim < len(self.shape):
            raise PlanError(
                f"{show(self.form)} shards dim {placement.dim}, {self} has {len(self.shape)} dims",
                plan_entry=self.entry,
                fix="shard a dim that the tensor has",
            )
        return placement.dim % len(self.shape)

    def read_placements(self) -> DimsSpec | Layout:
        """Read DTensor placements (one per mesh axis, earlier axes are major) as dims."""
        form = self.form
        assert isinstance(form, tuple)
        if len(form) != len(self.mesh.axes):
            raise PlanError(
                f"{show(form)} has {len(form)} placements, the mesh {self.mesh} has {len(self.mesh.axes)} axes",
                plan_entry=self.entry,
                fix="give one placement for each mesh axis",
            )
        axes: list[list[str]] = [[] for _ in self.shape]
        partial: list[tuple[str, str]] = []
        for axis, placement in zip(self.mesh.axes, form, strict=True):
            if isinstance(placement, Partial):
                partial.append((axis, placement.reduce_op))
            elif isinstance(placement, Shard | StridedShard):
                axes[self._dim(placement)].append(axis)
        if any(isinstance(placement, StridedShard) for placement in form):
            return self._from_placements()
        return DimsSpec(tuple(DimSpec(((None, tuple(names)),)) for names in axes), None, tuple(partial))

    def _from_placements(self) -> Layout:
        assert isinstance(self.form, tuple)
        try:
            return from_placements(self.mesh, self.shape, self.form)
        except LayoutError as error:
            raise LayoutError(f"{self}: {error.what}", plan_entry=self.entry, fix=error.fix) from None
