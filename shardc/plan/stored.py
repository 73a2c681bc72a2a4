"""What DTensor can say of a dim that its axes do not divide: it cuts over one axis after the other, each time anew."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.view import seen_on


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
