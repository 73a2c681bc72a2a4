"""Conversion of layouts to and from placements of ``torch.distributed.tensor``.

Placements are applied mesh dim by mesh dim. ``Shard`` splits the remaining dim at its major end; ``_StridedShard`` with
a split factor f splits inside each of f blocks. So the split factor of a digit bound to a mesh dim is the product of
the digits above it that are not split yet: local digits, and those of later mesh dims.

Placements have no parts of axes. A layout with parts is converted on a *view* of the mesh (`view_of`), in which these
parts are axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardc._compat import StridedShard
from shardc.errors import LayoutError
from shardc.ir.layout import Digit, Layout, cut_digits
from shardc.ir.mesh import Mesh


def parts_of(mesh: Mesh, layouts: Iterable[Layout]) -> tuple[str, ...]:
    """Return the axes of ``mesh`` in order. An axis that ``layouts`` use in parts is replaced by these parts.

    Raises:
        LayoutError: two layouts cut an axis such that no common cut exists, as 6 ranks by 2 and by 3.

    >>> mesh = Mesh(dp=4, tp=2)
    >>> parts_of(mesh, [Layout.parse("[8@dp:2x2]", mesh)])
    ('dp:1x2', 'dp:2x2', 'tp')
    """
    edges: dict[str, set[int]] = {name: {1, size} for name, size in mesh.shape}
    for name, used in mesh.edges({axis for layout in layouts for axis in layout.axes}).items():
        edges[name] |= used
    for name, boundaries in edges.items():
        for low, high in pairwise(sorted(boundaries)):
            if high % low:
                raise LayoutError(
                    f"axis {name!r} of size {mesh.size(name)} is cut before {low} and before {high} of its ranks, "
                    "which have no common view",
                    fix="use sizes one of which divides the other",
                )
    return tuple(part for name in mesh for part in mesh.parts(name, edges) or [name])


def view_of(mesh: Mesh, parts: Iterable[str]) -> Mesh:
    """Return a view of ``mesh``: the `Mesh` whose axes are ``parts``, each an axis of ``mesh`` or a part of one. A part
    ``dp:2x2`` becomes an axis named ``dp_2x2``.
    """
    return Mesh((part.replace(":", "_"), mesh.size(part)) for part in parts)


def seen_on(layout: Layout, view: Mesh) -> Layout:
    """Convert ``layout`` to ``view``, a view of its mesh (`view_of`). Return the layout on ``view`` that splits a
    tensor in the same way.

    Raises:
        LayoutError: it uses a part that is no axis of the view.
    """
    mesh = layout.mesh
    if view == mesh:
        return layout
    # An axis of the view that is none of the mesh is a part: ``dp_2x2`` is ``dp:2x2``.
    seen_part = {seen if seen in mesh.axes else ":".join(seen.rsplit("_", 1)): seen for seen in view}
    edges = dict.fromkeys(mesh, set[int]()) | mesh.edges(seen_part)

    def parts(axis: str) -> list[str]:
        covering = mesh.parts(axis, edges)
        if prod(map(mesh.size, covering)) != mesh.size(axis) or not seen_part.keys() >= {*covering}:
            raise LayoutError(
                f"layout {layout} uses {axis!r}, which the view {view} of the mesh {mesh} does not cut off"
            )
        return [seen_part[part] for part in covering]

    dims = [cut_digits(view, digits, parts) for digits in layout.dims]
    return Layout(view, dims, [(seen, op) for axis, op in layout.partial for seen in parts(axis)])


def to_placements(layout: Layout, view: Mesh | None = None) -> tuple[Placement, ...]:
    """Return the DTensor placements of ``layout``: one for each axis of its mesh or, if given, of ``view``, a view of
    the mesh (`view_of`).

    Raises:
        LayoutError: the layout uses a part of an axis that is no axis of the view; DTensor cannot express it.
    """
    layout = layout if view is None else seen_on(layout, view)
    mesh = layout.mesh
    for axis in layout.axes:
        if ":" in axis:
            raise LayoutError(
                f"layout {layout} uses {axis!r}, a part of a mesh axis, which DTensor placements cannot say",
                fix="split the axis in the mesh, or reshard before handing the tensor out",
            )
    partial = dict(layout.partial)
    out: list[Placement] = []
    for position, axis in enumerate(mesh.axes):
        dim = layout.dim_of(axis)
        if axis in partial:
            out.append(Partial(partial[axis]))
        elif dim is None:
            out.append(Replicate())
        else:
            factor = _split_factor(layout, dim, axis, position)
            out.append(Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor))
    return tuple(out)


def _split_factor(layout: Layout, dim: int, axis: str, position: int) -> int:
    """Return DTensor's split factor of ``axis``, the mesh dim at ``position``: into how many blocks ``dim`` is divided
    before ``axis`` splits each block.
    """
    later = layout.mesh.axes[position + 1 :]
    factor = 1
    for radix, bound in layout.dims[dim]:
        if bound == axis:
            return factor
        if bound is None or bound in later:
            factor *= radix
    raise AssertionError(f"{axis} does not split dim {dim} of {layout}")


def from_placements(mesh: Mesh, shape: Sequence[int], placements: Sequence[Placement]) -> Layout:
    """Convert DTensor placements to the layout of a tensor of global ``shape``. DTensor's mesh dims are the axes of
    ``mesh``, in order.

    Raises:
        LayoutError: a dim does not divide, a split factor does not fit its dim, a placement is of an unknown kind, or
            there is not one placement for each axis.
    """
    if len(placements) != len(mesh.axes):
        raise LayoutError(f"{len(placements)} placements for the {len(mesh.axes)} axes of {mesh!r}")
    dims = [[Digit(size)] for size in shape]
    partial = {}
    for axis, placement in zip(mesh.axes, placements, strict=True):
        size = mesh.size(axis)
        if isinstance(placement, Shard | StridedShard):
            dim = placement.dim % len(shape)
            factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            if size > 1:
                dims[dim] = _bind(dims[dim], factor, Digit(size, axis), f"{placement} on {axis}", tuple(shape))
        elif placement.is_partial():
            partial[axis] = str(getattr(placement, "reduce_op", "sum"))
        elif not placement.is_replicate():
            raise LayoutError(f"placement {placement} on axis {axis!r} is of a kind that layouts do not have")
    return Layout(mesh, dims, {axis: op for axis, op in partial.items() if mesh.size(axis) > 1})


def _bind(digits: list[Digit], factor: int, digit: Digit, what: str, shape: tuple[int, ...]) -> list[Digit]:
    """Insert ``digit`` (of a mesh axis) into the ``digits`` of a dim, so that it splits each of ``factor`` local
    blocks; return the new digits. LayoutError, which calls the placement ``what``, if the dim cannot be divided so.
    """
    above = factor
    for at, (radix, axis) in enumerate(digits):
        if axis is not None:
            continue
        if above % radix == 0 and above > 1:
            above //= radix
            continue
        if radix % (above * digit.radix):
            break
        rest = radix // (above * digit.radix)
        cut = [Digit(above), digit, Digit(rest)]
        return [*digits[:at], *(d for d in cut if d.radix != 1), *digits[at + 1 :]]
    local = prod(d.radix for d in digits if d.axis is None)
    raise LayoutError(
        f"{what} cannot split a tensor of shape {shape}: {local} local elements, {factor} pieces of {digit.radix}",
        fix="shapes must divide; uneven tensors are padded in storage",
    )
