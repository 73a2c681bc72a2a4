"""Sizes that axes do not divide: how far each dim must grow so that they do, and what DTensor can say of it.

DTensor cuts a dim over one axis after the other, each time anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod

from shardc.errors import LayoutError, PlanError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.view import seen_on
from shardc.plan.forms import Form
from shardc.plan.spec import to_layout


def grown_layout(
    spec: Form, mesh: Mesh, shape: Sequence[int], *, what: str, entry: str, held: Sequence[int] | None = None
) -> Layout | None:
    """What ``spec`` makes of the tensor with every dim that does not divide grown to the next size that does.

    Args:
        shape: the tensor's global shape.
        held: the size that each dim has already, where it was grown before; dims keep what divides it.
        what, entry: as for `to_layout`.

    Returns:
        None where all dims divide, where one that does not has a single element, and where the spec gives sizes.
    """
    held = tuple(shape if held is None else held)
    # How far a spec splits each dim does not depend on its size, as long as it divides.
    try:
        easy = to_layout(spec, mesh, [size * mesh.ranks for size in shape], what=what, entry=entry)
    except (PlanError, LayoutError):
        return None
    counts = [prod(mesh.size(axis) for axis in easy.dim_axes(dim)) for dim in range(len(shape))]
    if easy.partial or all(size % count == 0 for size, count in zip(held, counts, strict=True)):
        return None
    grown = []
    for size, now, count in zip(shape, held, counts, strict=True):
        step = count if now == size else lcm(now, count)
        grown.append(now if now % count == 0 or size <= 1 else -(-size // step) * step)
    if any(size % count for size, count in zip(grown, counts, strict=True)):
        return None
    return to_layout(spec, mesh, grown, what=what, entry=entry)


def as_dtensor(storage: Layout, shape: Sequence[int], view: Mesh) -> bool:
    """Whether a DTensor of ``shape`` has on each rank the elements that ``storage``, at padded sizes, has there.

    5 elements over 2 x 2 ranks are padded to 8, of which the ranks have 2, 2, 1 and 0; DTensor cuts them to 3 and 2,
    and these to 2, 1, 1 and 1.

    Args:
        view: of the storage's mesh, on which the DTensor is.
    """
    for digits, size, grown in zip(seen_on(storage, view).dims, shape, storage.shape, strict=True):
        if size == grown:
            continue
        cut, each = [size], grown
        for digit in digits:
            if digit.axis is not None:
                each //= digit.radix
                cut = [n for before in cut for n in _chunks(before, digit.radix)]
        if cut != [min(max(size - at * each, 0), each) for at in range(len(cut))]:
            return False
    return True


def _chunks(size: int, count: int) -> list[int]:
    each = -(-size // count)
    return [min(max(size - at * each, 0), each) for at in range(count)]
