"""Views of a mesh in which parts of an axis are axes, so that DTensor placements can express layouts with parts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from shardc.errors import LayoutError
from shardc.ir.layout import Layout, cut_digits
from shardc.ir.mesh import Mesh, split_part


def parts_of(mesh: Mesh, layouts: Iterable[Layout]) -> tuple[str, ...]:
    """Return the axes of ``mesh`` in order, each cut wherever a layout uses a part of it.

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
    """Return the mesh with axes ``parts``; a proper part is named like ``dp_2x2``."""
    return Mesh((part.replace(":", "_"), mesh.size(part)) for part in parts)


def seen_on(layout: Layout, view: Mesh) -> Layout:
    """Return ``layout`` on ``view``, a view of its mesh.

    Raises:
        LayoutError: it uses a part that is no axis of the view.
    """
    mesh = layout.mesh
    if view == mesh:
        return layout
    places: dict[str, list[tuple[int, int, str]]] = {}
    for seen in view:
        name, start, size = _place(seen, mesh)
        places.setdefault(name, []).append((start, start * size, seen))

    def parts(axis: str) -> list[str]:
        name, start, _ = split_part(axis)
        end = start * mesh.size(axis)
        covering = [place for place in places.get(name, ()) if start <= place[0] and place[1] <= end and place[0] < end]
        if not covering or covering[0][0] != start or covering[-1][1] != end:
            raise LayoutError(
                f"layout {layout} uses {axis!r}, which the view {view} of the mesh {mesh} does not cut off"
            )
        return [seen for *_, seen in covering]

    dims = [cut_digits(view, digits, parts) for digits in layout.dims]
    return Layout(view, dims, [(seen, op) for axis, op in layout.partial for seen in parts(axis)])


def _place(seen: str, mesh: Mesh) -> tuple[str, int, int]:
    """Return (axis, prefix, size) of an axis of a view."""
    if seen in mesh.axes:
        return seen, 1, mesh.size(seen)
    name, _, part = seen.rpartition("_")
    _, start, size = split_part(f"{name}:{part}")
    assert size is not None
    return name, start, size
