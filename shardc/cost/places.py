"""The state space of a redistribution search: the location of each mesh-axis part in the source and target layouts.

A *place* is a factor of one dim that an axis part can split. It is given by an interval of strides. The *location* of
an axis part is a place, `WHOLE` (it splits nothing), or a pending reduction, encoded as an integer. A layout is a tuple
of locations, one per axis part, and a redistribution changes locations.

Example: from ``[8@x, 4]`` to ``[8, 4@x]`` axis x moves from place (dim 0, strides 4 to 8) to (dim 1, strides 2 to 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from shardc.errors import LayoutError
from shardc.ir.layout import REDUCE_OPS, Digit, Layout, canonical_partial
from shardc.ir.mesh import Mesh, split_part

WHOLE = 0  # location of a part that splits nothing; places count up from 1, reductions down from -1


class Place(NamedTuple):
    """A factor of dim ``dim`` that an axis part (a mesh axis or a factor of one) can split: ``high // low`` indices,
    which are ``low`` elements of the dim apart.
    """

    dim: int
    low: int
    high: int

    @property
    def radix(self) -> int:
        """Return the number of indices along this factor of a dim: the number of ranks of an axis part that
        splits it.
        """
        return self.high // self.low

    def fits(self, other: Place) -> bool:
        """Return whether one axis part can split a tensor at this place while another splits it at ``other``: the two
        factors do not overlap.
        """
        if self.dim != other.dim:
            return True
        return self.low % other.high == 0 or other.low % self.high == 0


def bound_places(layout: Layout) -> list[tuple[str, Place]]:
    """Return (axis or axis part, the `Place` that it splits) for each sharded digit of ``layout``."""
    out = []
    for dim, digits in enumerate(layout.dims):
        low = 1
        for radix, axis in reversed(digits):
            if axis is not None:
                out.append((axis, Place(dim, low, low * radix)))
            low *= max(radix, 1)
    return out


@dataclass(frozen=True)
class Places:
    """The source and the target layout of a redistribution, encoded as the location of each axis part.

    Args:
        mesh: the mesh of both layouts.
        shape: the global shape of the tensor.
        parts: names of the axis parts. A part of the source may overlap one of the target, if the two layouts cut an
            axis in ways that have no common refinement.
        sizes: number of ranks along each part.
        places: the places at which a part can be. Location ``k + 1`` is ``places[k]``.
        source, target: the location of each part in the source and in the target layout.
        temporary: for each part, the locations at which it may wait until its target is free.
        neutral: bit mask of the locations that overlap no place of the target layout.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    places: tuple[Place, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    temporary: tuple[tuple[int, ...], ...]
    neutral: int
    clashes: tuple[int, ...]
    """``clashes[k]``: bit mask of the locations that overlap location ``k``, itself included."""
    rivals: tuple[tuple[int, ...], ...]
    """For each part, the indices of the other parts of the same axis that overlap it."""

    def layout(self, state: tuple[int, ...]) -> Layout:
        """Return the layout whose axis parts have the locations ``state``."""
        dims: list[list[tuple[Place, str]]] = [[] for _ in self.shape]
        partial = []
        for part, at in zip(self.parts, state, strict=True):
            if at > WHOLE:
                place = self.places[at - 1]
                dims[place.dim].append((place, part))
            elif at < WHOLE:
                partial.append((part, REDUCE_OPS[-1 - at]))
        return Layout(
            self.mesh,
            [_digits(size, bound) for size, bound in zip(self.shape, dims, strict=True)],
            partial,
        )


def _digits(size: int, bound: list[tuple[Place, str]]) -> list[Digit]:
    """Return the digits of a dim of ``size`` elements. ``bound`` has its factors that are split, as (place,
    axis part).
    """
    if size == 0:
        return [*(Digit(place.radix, part) for place, part in sorted(bound, reverse=True)), Digit(0)]
    out, above = [], size
    for place, part in sorted(bound, reverse=True):
        out += [Digit(above // place.high), Digit(place.radix, part)]
        above = place.low
    return [*out, Digit(above)]


def join_axes(mesh: Mesh, parts: list[str]) -> tuple[str, ...]:
    """Return the axis parts ``parts`` in mesh order, with adjacent parts of one axis joined (``tp:1x2`` and ``tp:2x2``
    to ``tp``).
    """
    return tuple(axis for axis, _ in canonical_partial(mesh, [(part, "") for part in parts]))


# --- cutting axes into parts


def common_places(src: Layout, dst: Layout) -> Places:
    """Return the state space of the search for a redistribution from ``src`` to ``dst``: places, and the location of
    each axis part in both layouts.

    Raises:
        LayoutError: the layouts have different meshes or global shapes.
    """
    if src.mesh != dst.mesh:
        raise LayoutError(f"cannot go from {src} on {src.mesh!r} to {dst} on {dst.mesh!r}", fix="use one mesh for both")
    if src.shape != dst.shape:
        raise LayoutError(f"cannot go from {src} to {dst}: global shapes {src.shape} and {dst.shape} differ")
    mesh = src.mesh
    used = (*src.axes, *dst.axes)
    idle = [axis for axis in mesh.axes if mesh.size(axis) > 1 and not any(mesh.overlap(axis, a) for a in used)]
    src_cuts, dst_cuts = mesh.edges(src.axes), mesh.edges(dst.axes)
    _cut_at_edges(src, dst, src_cuts, dst_cuts)
    source = located(src, src_cuts)
    target = located(dst, dst_cuts)
    parts = tuple(sorted({*source, *target, *idle}, key=lambda part: (mesh.order(part), mesh.size(part))))
    sizes = tuple(mesh.size(part) for part in parts)
    places = [p for p in dict.fromkeys([*source.values(), *target.values()]) if isinstance(p, Place)]
    ends = [p for p in source.values() if isinstance(p, Place)], [p for p in target.values() if isinstance(p, Place)]
    parked = [park for occupied in (places, *ends) for park in _temporary_places(src.shape, occupied, sizes)]
    places += [p for p in dict.fromkeys(parked) if p not in places]
    number: dict[Place | int, int] = {place: at + 1 for at, place in enumerate(places)}
    number |= {code: code for code in range(-len(REDUCE_OPS), 1)}
    start = tuple(number[source.get(part, WHOLE)] for part in parts)
    goal = tuple(number[target.get(part, WHOLE)] for part in parts)
    clashes = (0, *(sum(1 << (j + 1) for j, q in enumerate(places) if not p.fits(q)) for p in places))
    target_mask = sum(1 << at for at in set(goal) if at > WHOLE)
    neutral = sum(1 << at for at, mask in enumerate(clashes) if at and not mask & target_mask)
    return Places(
        mesh=mesh,
        shape=src.shape,
        parts=parts,
        sizes=sizes,
        places=tuple(places),
        source=start,
        target=goal,
        temporary=tuple(
            tuple(at + 1 for at, place in enumerate(places) if place.radix == size and at + 1 != goal[k])
            for k, size in enumerate(sizes)
        ),
        neutral=neutral,
        clashes=clashes,
        rivals=tuple(tuple(j for j, q in enumerate(parts) if q != p and mesh.overlap(p, q)) for p in parts),
    )


def _is_chain(cuts: set[int]) -> bool:
    """Return whether each of ``cuts`` divides the next larger one."""
    return all(upper % lower == 0 for lower, upper in pairwise(sorted(cuts)))


def _cut_at_edges(src: Layout, dst: Layout, src_cuts: dict[str, set[int]], dst_cuts: dict[str, set[int]]) -> None:
    """Refine, in place, the parts into which mesh axes are cut for a redistribution. Fewer places (factors of dims) of
    ``src`` and ``dst`` then overlap in part.

    Each layout's axes are cut where the other layout cuts them, and where a place of the other layout begins or ends
    inside a place of theirs.

    Args:
        src_cuts, dst_cuts: axis -> the prefix products at which it is cut into parts (as in `Mesh.edges`).
    """
    shared = {
        name
        for name in src_cuts.keys() | dst_cuts.keys()
        if _is_chain(src_cuts.get(name, set()) | dst_cuts.get(name, set()))
    }
    for name in shared:
        src_cuts[name] = dst_cuts[name] = src_cuts.get(name, set()) | dst_cuts.get(name, set())
    edges = [_edges(src, src_cuts), _edges(dst, dst_cuts)]
    changed = True
    while changed:
        changed = False
        for layout, other in ((src, 1), (dst, 0)):
            for axis, place in bound_places(layout):
                name, pre, _ = split_part(axis)
                if name not in shared:
                    continue
                for edge in edges[other][place.dim]:
                    if not place.low < edge < place.high or edge % place.low or place.high % edge:
                        continue
                    cut = pre * (place.high // edge)
                    if cut not in src_cuts[name] and _is_chain(src_cuts[name] | {cut}):
                        src_cuts[name].add(cut)
                        changed = True
        if changed:
            edges = [_edges(src, src_cuts), _edges(dst, dst_cuts)]


def _edges(layout: Layout, cuts: dict[str, set[int]]) -> list[set[int]]:
    """Return, for each dim, the strides (in elements) at which a factor that ``layout`` splits begins or ends, if axes
    are cut into parts by ``cuts``.

    Args:
        cuts: axis -> the prefix products at which it is cut into parts.
    """
    out: list[set[int]] = [set() for _ in layout.dims]
    for place in located(layout, cuts).values():
        if isinstance(place, Place):
            out[place.dim].update((place.low, place.high))
    return out


def located(layout: Layout, cuts: dict[str, set[int]]) -> dict[str, Place | int]:
    """Return axis part -> the `Place` that it splits in ``layout``, or the negative code of its reduce op if ``layout``
    is partial over it. ``cuts``: axis -> the prefix products at which it is cut into parts.
    """
    mesh = layout.mesh
    out: dict[str, Place | int] = {}
    for axis, place in bound_places(layout):
        high = place.high
        for part in mesh.parts(axis, cuts):
            low = high // mesh.size(part)
            out[part] = Place(place.dim, low, high)
            high = low
    for axis, op in layout.partial:
        for part in mesh.parts(axis, cuts):
            out[part] = -1 - REDUCE_OPS.index(op)
    return out


def _temporary_places(shape: tuple[int, ...], places: list[Place], sizes: tuple[int, ...]) -> list[Place]:
    """Return the free places (factors of a dim) where axis parts of ``sizes`` ranks may lie for some steps. Each place
    is at an end of a factor that ``places`` do not occupy.

    Args:
        shape: the global shape.
        places: the occupied places, which leave the other factors free.
    """
    out = []
    for dim, size in enumerate(shape):
        edges = sorted({1, size, *(e for p in places if p.dim == dim for e in (p.low, p.high))})
        occupied = [p for p in places if p.dim == dim]
        for low, high in pairwise(edges):
            if low and high % low == 0 and all(Place(dim, low, high).fits(p) for p in occupied):
                for radix in dict.fromkeys(sizes):
                    if (high // low) % radix == 0:
                        out += [Place(dim, high // radix, high), Place(dim, low, low * radix)]
    return list(dict.fromkeys(out))
