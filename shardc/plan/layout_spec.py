"""Specs: the forms in which users write the layout of a tensor; `to_layout` applies one to a tensor of known shape.

    ("dp", None)                   an axis, axes or nothing for each dim; "None" is nothing, too
    (("tp", "dp"), None)           dim 0 split over tp first, then dp
    (Shard(0), Replicate())        DTensor placements, one for each mesh axis
    "16@dp, 8"   "@dp, _"          a layout as it prints; `_` is the remaining size
    "(3 _@tp), _"                  split inside each of three chunks
    "..., _@tp"                    any number of leading dims that are not split; "~..." keeps them as they are
    "~, _@tp, _"                   `~` keeps the dim of the base layout
    "_, _{sum:tp}"                 a partial sum over tp
    {"tp": Shard(-1)}              DTensor's placement on this axis; other axes as in the base layout
    per_rank(dim=1)                for inputs only: the concatenated values of the ranks that split the batch

The *base layout* is the one that the value would have without the spec. A *form* is a spec in hashable form: a string,
a tuple of axes or placements, or `OnAxes`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, TypeGuard

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from shardc._compat import StridedShard
from shardc.errors import LayoutError, PlanError, ShardcWarning
from shardc.ir.layout import REDUCE_OPS, Digit, Layout, parse_dim, split_top
from shardc.ir.mesh import Mesh
from shardc.ir.placements import from_placements
from shardc.validate import near, typed


@dataclass(frozen=True)
class OnAxes:
    """A spec of DTensor placements on some mesh axes. The base layout stays on all other axes."""

    placements: tuple[tuple[str, Placement], ...]


@dataclass(frozen=True)
class PerRank:
    """The spec of an input whose rows belong to each rank, such as edge lists. Its fields are the arguments of
    `per_rank`, which creates it.
    """

    dim: int
    relative_to: str | None


Form = str | tuple[Any, ...] | OnAxes | PerRank


@typed(PlanError)
def per_rank(dim: int = -1, relative_to: str | None = "0") -> PerRank:
    """Declare an input that belongs to each rank's own part of the batch, such as an edge list, offsets or
    ``cu_seqlens``. Returns a spec for ``Plan(inputs=...)``.

    The global input is the concatenation of the ranks' inputs along ``dim``. Values of int32 or int64 are row numbers
    in the rank's own part of the input ``relative_to``: the number of rows of earlier ranks is added to them, which
    makes them row numbers in the global input. Negative, floating-point and bool values are unchanged.

    Args:
        dim: the dim along which the ranks' values are concatenated.
        relative_to: name or position of the input whose rows are numbered, by default the model's first one. None:
            add nothing.

    >>> from shardc import Plan, per_rank
    >>> Plan(inputs={"edges": per_rank(dim=1, relative_to="nodes")})
    Plan(inputs={"edges": per_rank(dim=1, relative_to="nodes")})
    """
    return PerRank(dim, relative_to)


@dataclass(frozen=True)
class DimSpec:
    """The parsed spec of one dim: its sub-dims, as (size or None, axes), or ``keep`` if the base layout of the dim
    stays.
    """

    subs: tuple[tuple[int | None, tuple[str, ...]], ...] = ((None, ()),)
    keep: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes that split the dim."""
        return tuple(axis for _, axes in self.subs for axis in axes)


@dataclass(frozen=True)
class DimsSpec:
    """The parsed spec of a tensor: one `DimSpec` per dim, and its partial reductions.

    Args:
        dims: the spec of each dim.
        leading: the spec of further leading dims; None if there must be none.
        partial: (axis, reduce op) of partial reductions.
    """

    dims: tuple[DimSpec, ...]
    leading: DimSpec | None = None
    partial: tuple[tuple[str, str], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the mesh axes that the spec names: first the axes that split dims, then the axes of partial
        reductions.
        """
        return (*(axis for dim in self.dims for axis in dim.axes), *(axis for axis, _ in self.partial))


def freeze(spec: object, entry: str = "") -> Form:
    """Return ``spec`` in hashable form: a string, a tuple of axes or of placements, or `OnAxes`.

    Args:
        entry: the plan entry, for errors.

    Raises:
        PlanError: it is not one of the forms above, or uses an axis twice.
    """
    if isinstance(spec, Layout):
        spec = str(spec)
    if isinstance(spec, str):
        form: Form = spec
    elif isinstance(spec, list | tuple) and spec and all(isinstance(item, Placement) for item in spec):
        return tuple(spec)
    elif isinstance(spec, OnAxes):
        return spec
    elif isinstance(spec, PerRank) or spec is per_rank:
        raise PlanError("per_rank is a spec for inputs only", plan_entry=entry, fix="give it a layout")
    elif isinstance(spec, dict) and is_one(spec):
        return OnAxes(tuple(spec.items()))
    elif isinstance(spec, list | tuple):
        form = tuple(_freeze_dim(item, spec, entry) for item in spec)
    else:
        raise _malformed(spec, entry)
    _check_once(read(form, entry), form, entry)
    return form


def is_one(spec: object) -> bool:
    """Return whether ``spec`` is the spec of one tensor, and not a list or dict of specs.

    A tuple is for one tensor if it can be read that way; a list only if it has at most one axis per dim; a dict if its
    values are placements.
    """
    if isinstance(spec, str | Layout | OnAxes | PerRank) or spec is per_rank:
        return True
    if isinstance(spec, dict):
        return bool(spec) and all(isinstance(value, Placement) for value in spec.values())
    if not isinstance(spec, list | tuple):
        return False
    if spec and all(isinstance(item, Placement) for item in spec):
        return True
    if all(_is_axis(item) for item in spec):
        return True
    groups = (_is_axis(item) or isinstance(item, list | tuple) and all(map(_is_name, item)) for item in spec)
    return isinstance(spec, tuple) and all(groups)


def _is_name(item: object) -> TypeGuard[str]:
    """Return whether ``item`` can be the name of an axis."""
    return isinstance(item, str) and item.isidentifier() and item != "_"


def _is_axis(item: object) -> bool:
    """Return whether ``item`` is the name of an axis or None."""
    return item is None or _is_name(item)


def _freeze_dim(item: object, spec: object, entry: str) -> str | tuple[str, ...] | None:
    """Return ``item``, the entry for one dim in the tuple ``spec``, as an axis, a tuple of axes, or None. Raises
    PlanError for anything else.
    """
    if item is None or item == "None":
        return None
    if _is_name(item):
        return item
    if isinstance(item, list | tuple):
        axes = tuple(axis for axis in item if axis is not None and axis != "None")
        if all(_is_name(axis) for axis in axes):
            return axes[0] if len(axes) == 1 else axes or None
    raise _malformed(spec, entry)


def _malformed(spec: object, entry: str) -> PlanError:
    """Return the error for a value that is not a spec."""
    return PlanError(
        f"{spec!r} is not a spec",
        plan_entry=entry or None,
        fix='write ("dp", None), (Shard(0), Replicate()) or "@dp, _"',
    )


def show(form: Form) -> str:
    """Return ``form``, a spec in hashable form, as Python source."""
    if isinstance(form, str):
        return quote(form)
    if isinstance(form, OnAxes):
        return "{" + ", ".join(f"{quote(axis)}: {show_placement(item)}" for axis, item in form.placements) + "}"
    if isinstance(form, PerRank):
        dim = [] if form.dim == -1 else [f"dim={form.dim}"]
        to = form.relative_to if form.relative_to is None else quote(form.relative_to)
        return f"per_rank({', '.join(dim if to == quote('0') else [*dim, f'relative_to={to}'])})"
    items = [_show_item(item) for item in form]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def quote(text: str) -> str:
    """Return ``text`` as a double-quoted Python string."""
    return json.dumps(text, ensure_ascii=False)


def show_sizes(sizes: dict[str, int]) -> str:
    """Return a table glob -> size as Python source."""
    return "{" + ", ".join(f"{quote(glob)}: {size}" for glob, size in sizes.items()) + "}"


def _show_item(item: Placement | str | tuple[str, ...] | None) -> str:
    """Return one item of a tuple form as Python source."""
    if isinstance(item, Placement):
        return show_placement(item)
    if isinstance(item, tuple):
        return show(item)
    return "None" if item is None else quote(item)


def show_placement(placement: Placement) -> str:
    """Return ``placement`` as Python source."""
    if isinstance(placement, Partial):
        return "Partial()" if placement.reduce_op == "sum" else f"Partial({quote(placement.reduce_op)})"
    if isinstance(placement, StridedShard):
        return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"


def is_placements(form: Form) -> TypeGuard[tuple[Placement, ...]]:
    """Return whether ``form`` is a tuple of DTensor placements, whose meaning depends on the mesh."""
    return isinstance(form, tuple) and bool(form) and all(isinstance(item, Placement) for item in form)


@lru_cache(maxsize=4096)
def read(form: Form, entry: str = "") -> DimsSpec:
    """Parse a plan spec, given as a string (``"@dp, _"``) or a tuple of axes, and return it as `DimsSpec`.

    Raises:
        PlanError: the string is not a layout.
    """
    if isinstance(form, str):
        return _read_text(form, entry)
    assert isinstance(form, tuple)
    groups = (() if axis is None else axis if isinstance(axis, tuple) else (axis,) for axis in form)
    return DimsSpec(tuple(DimSpec(((None, axes),)) for axes in groups))


def _read_text(text: str, entry: str) -> DimsSpec:
    """Return the `DimsSpec` of a layout in text form, such as ``"@dp, _"``."""
    match = re.fullmatch(r"\s*(\[)?(.*?)(?(1)\])\s*(?:\{(.*)\})?\s*", text)
    if not match:
        raise _bad_layout(text, entry)
    partial = tuple(_read_partial(item, text, entry) for item in (match[3] or "").split(",") if item.strip())
    if not match[2].strip():
        if not match[1]:
            raise _bad_layout(text, entry)
        return DimsSpec((), None, partial)
    parts = split_top(match[2])
    leading = {"...": DimSpec(), "~...": DimSpec(keep=True)}.get(parts[0])
    return DimsSpec(tuple(_read_dim(p, text, entry) for p in parts[leading is not None :]), leading, partial)


def _read_partial(item: str, text: str, entry: str) -> tuple[str, str]:
    """Parse ``op:axis``, a partial reduction in the layout ``text``; return (axis, op)."""
    op, _, axis = (part.strip() for part in item.partition(":"))
    if op not in REDUCE_OPS or not axis:
        raise _bad_layout(text, entry)
    return axis, op


def _read_dim(part: str, text: str, entry: str) -> DimSpec:
    """Parse ``part``, one dim of the layout ``text``; return its `DimSpec`."""
    if part == "~":
        return DimSpec(keep=True)
    subs: list[tuple[int | None, tuple[str, ...]]] = []
    for size, axes in parse_dim(part):
        if not (size == "_" or size.isdigit()) or not all(re.fullmatch(r"\w+(:\d+x\d+)?", axis) for axis in axes):
            raise _bad_layout(text, entry)
        subs.append((None if size == "_" else int(size), axes))
    if not subs or sum(size is None for size, _ in subs) > 1:
        raise _bad_layout(text, entry)
    return DimSpec(tuple(subs))


def _bad_layout(text: str, entry: str) -> PlanError:
    """Return the error for a text that is not a layout."""
    hint = f'"@{text.strip()}"' if text.strip().isidentifier() else '"16@dp, 8", "@dp, _" or "(3 _@tp), _"'
    return PlanError(f"{text!r} is not a layout", plan_entry=entry or None, fix=f"write it like {hint}")


def _check_once(spec: DimsSpec, form: Form, entry: str) -> None:
    """Raise PlanError if ``spec`` uses an axis twice. ``form`` is the spec as the user wrote it."""
    axes = spec.axes
    for axis in axes:
        if axes.count(axis) > 1:
            raise PlanError(
                f"spec {show(form)} uses axis {axis!r} twice",
                plan_entry=entry or None,
                fix="split or reduce over each axis once; give the specs of several tensors as a list",
            )


def spec_axes(form: Form) -> tuple[str, ...]:
    """Return the mesh axes that the spec ``form`` names; () for a tuple of DTensor placements and for `per_rank`, which
    name none.
    """
    if isinstance(form, OnAxes):
        return tuple(axis for axis, _ in form.placements)
    return () if is_placements(form) or isinstance(form, PerRank) else read(form).axes


def leaves_dims(form: Form) -> bool:
    """Return whether the spec ``form`` keeps the base layout of some dims: written as ``~``, or by placements on some
    axes only.
    """
    if isinstance(form, OnAxes) or is_placements(form):
        return isinstance(form, OnAxes)
    spec = read(form)
    return any(dim.keep for dim in (*spec.dims, *filter(None, [spec.leading])))


Uneven = Literal["error", "drop"]


def check_axis(axis: str, mesh: Mesh, entry: str) -> None:
    """Raise PlanError, with suggestions, if ``axis`` is neither an axis of ``mesh`` nor a part of one."""
    name, colon, part = axis.partition(":")
    if name not in mesh.axes:
        fix = near(axis, mesh.axes, f"use one of {list(mesh.axes)}" if mesh.axes else f"shardc.Mesh({name}=2)")
        what = f"the mesh is {mesh}" if mesh.axes else "the mesh has no axes"
        raise PlanError(f"unknown mesh axis {axis!r}; {what}", plan_entry=entry or None, fix=fix)
    sizes = [int(size) if size.isdecimal() else 0 for size in part.split("x")]
    ranks = mesh.size(name)
    if colon and (len(sizes) != 2 or not all(sizes) or not 1 < sizes[1] < ranks or ranks % prod(sizes)):
        raise PlanError(
            f"{axis!r} is not a part of axis {name!r}, which has {ranks} ranks",
            plan_entry=entry or None,
            fix=f'write {name!r}, or a part of it as "{name}:2x4": 4 ranks, in each of 2 blocks before them',
        )


def to_layout(
    spec: object,
    mesh: Mesh,
    shape: Sequence[int],
    base: Layout | None = None,
    *,
    what: str,
    entry: str,
    uneven: Uneven = "error",
) -> Layout:
    """Return the layout that a plan spec, such as ``"@dp, _"``, gives a tensor of the global ``shape``.

    Args:
        spec: any form of `shardc.plan.layout_spec`.
        mesh: the mesh.
        shape: the tensor's global shape.
        base: the base layout, whose dims ``~`` keeps, without the axes that the spec uses itself; by default not split.
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
    """A tensor and the plan spec that is applied to it. The fields are the arguments of `to_layout`."""

    mesh: Mesh
    shape: tuple[int, ...]
    form: Form
    what: str
    entry: str
    uneven: Uneven

    def __str__(self) -> str:
        return f"{self.what} of shape {self.shape}"

    def fill(self, spec: DimsSpec) -> list[DimSpec]:
        """Return the spec of each dim of the tensor. A spec that starts with ``...`` gives all leading dims the same
        spec.
        """
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
        """Return the digits of ``dim``, major first: factors of its size, each bound to an axis or local, as the spec
        splits it.
        """
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
        """Report that the axis does not divide ``left`` elements of a dim inside each of ``pieces`` chunks. Raises
        LayoutError if uneven dims are errors, else warns.
        """
        size = self.mesh.size(axis)
        inside = f" inside each of {pieces} pieces" if pieces > 1 else ""
        text = f"dim {dim} of {self}: {left} elements do not divide over axis {axis!r} of size {size}{inside}"
        fix = f"make the size a multiple of {size * pieces}, or leave {axis} off"
        if self.uneven == "error":
            raise LayoutError(text, plan_entry=self.entry, fix=fix)
        error = LayoutError(f"{text}; the dim stays whole on {axis}", plan_entry=self.entry, fix=fix)
        warnings.warn(str(error), ShardcWarning, stacklevel=4)

    def on_axes(self, form: OnAxes, base: Layout) -> Layout:
        """Return ``base`` with the placements of ``form``: each axis splits the most major local digit that it divides.

        A `StridedShard` splits the digit inside each of its ``split_factor`` chunks.
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
        """Return ``layout`` with ``dim`` also split over ``axis``, inside each of ``pieces`` chunks: at the first local
        digit that chunks and ranks divide. If there is none, raise or warn as `_report_uneven` does, and return
        ``layout``.
        """
        size = self.mesh.size(axis)
        for at, (radix, bound) in enumerate(layout.dims[dim]):
            if bound is None and radix % (pieces * size) == 0:
                cut = (Digit(pieces), Digit(size, axis), Digit(radix // (pieces * size)))
                digits = [*layout.dims[dim][:at], *cut, *layout.dims[dim][at + 1 :]]
                return layout.replace(dims=[*layout.dims[:dim], digits, *layout.dims[dim + 1 :]])
        self._report_uneven(dim, layout.local_shape[dim], axis, pieces)
        return layout

    def _dim(self, placement: Shard | StridedShard) -> int:
        """Return the dim that ``placement`` splits; raise PlanError if the tensor has no such dim."""
        if not -len(self.shape) <= placement.dim < len(self.shape):
            raise PlanError(
                f"{show(self.form)} shards dim {placement.dim}, {self} has {len(self.shape)} dims",
                plan_entry=self.entry,
                fix="shard a dim that the tensor has",
            )
        return placement.dim % len(self.shape)

    def read_placements(self) -> DimsSpec | Layout:
        """Return the DTensor placements of a plan entry (one per mesh axis, earlier axes are major) as a parsed spec,
        or if a placement is strided, as the `Layout` that they describe.
        """
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
        """Return the layout that the DTensor placements of the spec describe. An error names the tensor and the plan
        entry.
        """
        assert isinstance(self.form, tuple)
        try:
            return from_placements(self.mesh, self.shape, self.form)
        except LayoutError as error:
            raise LayoutError(f"{self}: {error.what}", plan_entry=self.entry, fix=error.fix) from None
