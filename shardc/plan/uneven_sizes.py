"""Sizes that axes do not divide: how far each dim must be padded, and whether a DTensor can represent the result.

A DTensor splits a dim over one axis after the other, each time by ``torch.chunk``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod

from shardc.errors import LayoutError, PlanError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.view import seen_on
from shardc.plan.spec_forms import Form
from shardc.plan.spec_layout import to_layout


def grown_layout(
    spec: Form, mesh: Mesh, shape: Sequence[int], *, what: str, entry: str, padded: Sequence[int] | None = None
) -> Layout | None:
    """Return the layout of ``spec`` with every dim that does not divide padded to the next size that does.

    Args:
        shape: the tensor's global shape.
        padded: the size of each dim after earlier padding; it remains a multiple of what it was padded to.
        what, entry: as for `to_layout`.

    Returns:
        None if all dims divide, if one that does not has a single element, or if the spec gives sizes.
    """
    padded = tuple(shape if padded is None else padded)
    # The number of parts of each dim does not depend on its size, as long as that divides.
    try:
        easy = to_layout(spec, mesh, [size * mesh.ranks for size in shape], what=what, entry=entry)
    except (PlanError, LayoutError):
        return None
    counts = [prod(mesh.size(axis) for axis in easy.dim_axes(dim)) for dim in range(len(shape))]
    if easy.partial or all(size % count == 0 for size, count in zip(padded, counts, strict=True)):
        return None
    grown = []
    for size, now, count in zip(shape, padded, counts, strict=True):
        step = count if now == size else lcm(now, count)
        grown.append(now if now % count == 0 or size <= 1 else -(-size // step) * step)
    if any(size % count for size, count in zip(grown, counts, strict=True)):
        return None
    return to_layout(spec, mesh, grown, what=what, entry=entry)


def as_dtensor(storage: Layout, shape: Sequence[int], view: Mesh) -> bool:
    """Return whether a DTensor of ``shape`` has the same elements on each rank as ``storage`` has at padded sizes.

    Example where it has not: 5 elements over 2 x 2 ranks are padded to 8, of which the ranks have 2, 2, 1 and 0; a
    DTensor splits them into 3 and 2, and these into 2, 1, 1 and 1.

    Args:
        view: the mesh of the DTensor, a view of the storage's mesh.
    """
    for digits, size, grown in zip(seen_on(storage, view).dims, shape, storage.shape, strict=True):
        if size == grown:
            continue
        chunks, shard = [size], grown
        for digit in digits:
            if digit.axis is not None:
                shard //= digit.radix
                chunks = [n for before in chunks for n in _chunks(before, digit.radix)]
        if chunks != [min(max(size - at * shard, 0), shard) for at in range(len(chunks))]:
            return False
    return True


def _chunks(size: int, count: int) -> list[int]:
    """Return the sizes of the chunks into which ``torch.chunk`` (padded with empty ones) cuts ``size`` elements."""
    chunk = -(-size // count)
    return [min(max(size - at * chunk, 0), chunk) for at in range(count)]
