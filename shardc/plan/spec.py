"""Specs: how people write where a tensor lies, read into a `Layout` once mesh and shape are known.

    ("dp", None)                   an axis, axes or nothing for each dim; "None" is nothing too
    (("tp", "dp"), None)           dim 0 split over tp first, then dp
    (Shard(0), Replicate())        DTensor placements, one for each mesh axis
    "16@dp, 8"   "@dp, _"          a layout as it prints; `_` is whatever size is left
    "(3 _@tp), _"                  split inside each of three pieces
    "..., _@tp"                    as many whole dims in front as there are; "~..." leaves them as they are
    "~, _@tp, _"                   `~` leaves the dim as the base layout has it
    "_, _{sum:tp}"                 a pending sum over tp

A *form* is a spec as the user wrote it, made hashable: a string, or a tuple of axes or placements.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from math import prod
from typing import Any, Literal

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardc.errors import LayoutError, PlanError, ShardcWarning
from shardc.ir.layout import REDUCE_OPS, Digit, Layout, parse_dim, split_top
from shardc.ir.mesh import Mesh

Form = str | tuple[Any, ...]
Uneven = Literal["error", "drop"]
_LAYOUT_SYNTAX = re.compile(r"[@~()\s,\d]|^_$|\.\.\.")


@dataclass(frozen=True)
class DimSpec:
    """One dim: sub-dims ``(size or None for what is left, axes)``, or ``keep`` for the base's dim."""

    subs: tuple[tuple[int | None, tuple[str, ...]], ...] = ((None, ()),)
    keep: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for _, axes in self.subs for axis in axes)


@dataclass(frozen=True)
class DimsSpec:
    """A spec read: its dims, how to fill missing leading dims (None: not at all), pending reductions."""

    dims: tuple[DimSpec, ...]
    leading: DimSpec | None = None
    partial: tuple[tuple[str, str], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return (*(axis for dim in self.dims for axis in dim.axes), *(axis for axis, _ in self.partial))


def freeze(spec: Any, entry: str = "") -> Form:
    """``spec`` as a form.

    Raises:
        PlanError: it is none of the forms above, or uses an axis twice.
    """
    if isinstance(spec, Layout):
        spec = str(spec)
    if isinstance(spec, str):
        form: Form = spec
    elif isinstance(spec, list | tuple) and spec and all(isinstance(item, Placement) for item in spec):
        return tuple(spec)
    elif isinstance(spec, list | tuple):
        form = tuple(_freeze_dim(item, spec, entry) for item in spec)
    else:
        raise _malformed(spec, entry)
    _check_once(read(form, entry), form, entry)
    return form


def is_one(spec: Any) -> bool:
    """Whether ``spec`` is the spec of one tensor, rather than a list or a dict of such.

    A tuple is one where it can be read as one; a list is one only if it names at most one axis for each dim.
    """
    if isinstance(spec, str | Layout):
        return True
    if not isinstance(spec, list | tuple):
        return False
    if spec and all(isinstance(item, Placement) for item in spec):
        return True
    if all(_is_axis(item) for item in spec):
        return True
    groups = (_is_axis(item) or isinstance(item, list | tuple) and all(map(_is_name, item)) for item in spec)
    return isinstance(spec, tuple) and all(groups)


def _is_name(item: Any) -> bool:
    return isinstance(item, str) and not _LAYOUT_SYNTAX.search(item)


def _is_axis(item: Any) -> bool:
    return item is None or _is_name(item)


def _freeze_dim(item: Any, spec: Any, entry: str) -> str | tuple[str, ...] | None:
    if item is None or item == "None":
        return None
    if _is_name(item):
        return item
    if isinstance(item, list | tuple):
        axes = tuple(axis for axis in item if axis is not None and axis != "None")
        if all(_is_name(axis) for axis in axes):
            return axes[0] if len(axes) == 1 else axes or None
    raise _malformed(spec, entry)


def _malformed(spec: Any, entry: str) -> PlanError:
    return PlanError(
        f"{spec!r} is not a spec",
        plan_entry=entry or None,
        fix='write ("dp", None), (Shard(0), Replicate()) or "@dp, _"',
    )


def show(form: Form) -> str:
    """``form`` as Python source."""
    if isinstance(form, str):
        return quote(form)
    items = [_show_item(item) for item in form]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def quote(text: str) -> str:
    """``text`` as a double-quoted Python string."""
    return json.dumps(text, ensure_ascii=False)


def _show_item(item: Any) -> str:
    if isinstance(item, Placement):
        return show_placement(item)
    if isinstance(item, tuple):
        return show(item)
    return "None" if item is None else quote(item)


def show_placement(placement: Placement) -> str:
    """``placement`` as Python source."""
    if isinstance(placement, Partial):
        return "Partial()" if placement.reduce_op == "sum" else f"Partial({quote(placement.reduce_op)})"
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    return repr(placement)


@lru_cache(maxsize=4096)
def read(form: Form, entry: str = "") -> DimsSpec | None:
    """What ``form`` says, or None for placements, which need the mesh.

    Raises:
        PlanError: a string that is not a layout.
    """
    if isinstance(form, str):
        return _read_text(form, entry)
    if form and all(isinstance(item, Placement) for item in form):
        return None
    groups = (() if axis is None else axis if isinstance(axis, tuple) else (axis,) for axis in form)
    return DimsSpec(tuple(DimSpec(((None, axes),)) for axes in groups))


def _read_text(text: str, entry: str) -> DimsSpec:
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
    op, _, axis = (part.strip() for part in item.partition(":"))
    if op not in REDUCE_OPS or not axis:
        raise _bad_layout(text, entry)
    return axis, op


def _read_dim(part: str, text: str, entry: str) -> DimSpec:
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
    hint = f'"@{text.strip()}"' if text.strip().isidentifier() else '"16@dp, 8", "@dp, _" or "(3 _@tp), _"'
    return PlanError(f"{text!r} is not a layout", plan_entry=entry or None, fix=f"write it like {hint}")


def _check_once(spec: DimsSpec | None, form: Form, entry: str) -> None:
    axes = spec.axes if spec else ()
    for axis in axes:
        if axes.count(axis) > 1:
            raise PlanError(
                f"spec {show(form)} uses axis {axis!r} twice",
                plan_entry=entry or None,
                fix="split or reduce over each axis once",
            )


def check_axis(axis: str, mesh: Mesh, entry: str) -> None:
    """Raises PlanError, with near matches, where ``axis`` is not on ``mesh``."""
    if axis in mesh:
        return
    near = get_close_matches(axis, mesh.axes)
    fix = f"did you mean {near[0]!r}?" if near else f"use one of {list(mesh.axes)}"
    raise PlanError(f"unknown mesh axis {axis!r}; the mesh is {mesh}", plan_entry=entry or None, fix=fix)


def spec_axes(form: Form) -> tuple[str, ...]:
    """The axes that ``form`` names (placements name none)."""
    spec = read(form)
    return spec.axes if spec else ()


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
    """The layout that ``spec`` asks for.

    Args:
        spec: any form that the module's docstring shows.
        shape: the tensor's global shape.
        base: what ``~`` leaves as it is, less the axes that the spec itself uses; whole if not given.
        what: the tensor, for messages, e.g. ``parameter 'up.weight'``.
        entry: the plan entry, for messages.
        uneven: what to do where a size does not divide over an axis: raise, or leave that axis off with a
            `ShardcWarning` that names tensor, axis and dim.

    Raises:
        PlanError: an unknown axis, one used twice, a wrong rank, a size that is not the tensor's.
        LayoutError: a size that does not divide.
    """
    form = freeze(spec, entry)
    parsed = read(form, entry)
    if parsed is None:
        parsed = _read_placements(form, mesh, shape, what, entry)
    if isinstance(parsed, Layout):
        return parsed
    for axis in parsed.axes:
        check_axis(axis, mesh, entry)
    dims = list(parsed.dims)
    if parsed.leading is not None and len(dims) <= len(shape):
        dims = [parsed.leading] * (len(shape) - len(dims)) + dims
    if len(dims) != len(shape):
        raise PlanError(
            f"spec {show(form)} has {len(dims)} dims, {what} of shape {tuple(shape)} has {len(shape)}",
            plan_entry=entry,
            fix="give one item for each dim of the tensor",
        )
    base = (base or Layout.whole(mesh, shape)).unbind(parsed.axes)
    digits = []
    for dim, dim_spec in enumerate(dims):
        if dim_spec.keep:
            digits.append(list(base.dims[dim]))
        else:
            digits.append(_digits(dim_spec, mesh, shape, dim, form, what, entry, uneven))
    return Layout(mesh, digits, parsed.partial)


def _digits(
    spec: DimSpec, mesh: Mesh, shape: Sequence[int], dim: int, form: Form, what: str, entry: str, uneven: Uneven
) -> list[Digit]:
    given = prod(size for size, _ in spec.subs if size is not None)
    open_size = any(size is None for size, _ in spec.subs)
    if (shape[dim] % given if given else shape[dim]) if open_size else shape[dim] != given:
        raise PlanError(
            f"spec {show(form)} gives dim {dim} {given} elements, {what} of shape {tuple(shape)} has {shape[dim]}",
            plan_entry=entry,
            fix="write _ for whatever size is left",
        )
    digits: list[Digit] = []
    for size, axes in spec.subs:
        left = shape[dim] // given if size is None and given else size or 0
        for axis in axes:
            if left % mesh.size(axis):
                _report_uneven(left, axis, mesh, shape, dim, what, entry, uneven)
                continue
            left //= mesh.size(axis)
            digits.append(Digit(mesh.size(axis), axis))
        digits.append(Digit(left))
    return digits


def _report_uneven(
    left: int, axis: str, mesh: Mesh, shape: Sequence[int], dim: int, what: str, entry: str, uneven: Uneven
) -> None:
    text = (
        f"dim {dim} of {what}, shape {tuple(shape)}: "
        f"{left} elements do not divide over axis {axis!r} of size {mesh.size(axis)}"
    )
    if uneven == "error":
        raise LayoutError(text, plan_entry=entry, fix=f"make the size a multiple of {mesh.size(axis)}, or leave {axis} off")
    error = LayoutError(f"{text}; the dim stays whole on {axis}", plan_entry=entry)
    warnings.warn(str(error), ShardcWarning, stacklevel=2)


def _read_placements(form: Form, mesh: Mesh, shape: Sequence[int], what: str, entry: str) -> DimsSpec | Layout:
    if len(form) != len(mesh.axes):
        raise PlanError(
            f"{show(form)} has {len(form)} placements, the mesh {mesh} has {len(mesh.axes)} axes",
            plan_entry=entry,
            fix="give one placement for each mesh axis",
        )
    axes: list[list[str]] = [[] for _ in shape]
    partial: list[tuple[str, str]] = []
    for axis, placement in zip(mesh.axes, form, strict=True):
        if isinstance(placement, Partial):
            partial.append((axis, placement.reduce_op))
        elif type(placement) is Shard:
            if not -len(shape) <= placement.dim < len(shape):
                raise PlanError(
                    f"{show(form)} shards dim {placement.dim}, {what} of shape {tuple(shape)} has {len(shape)} dims",
                    plan_entry=entry,
                    fix="shard a dim that the tensor has",
                )
            axes[placement.dim].append(axis)
        elif not isinstance(placement, Replicate):
            from shardc.ir.placements import from_placements

            return from_placements(mesh, shape, form)
    return DimsSpec(tuple(DimSpec(((None, tuple(names)),)) for names in axes), None, tuple(partial))
