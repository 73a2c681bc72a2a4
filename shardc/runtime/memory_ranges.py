"""`MemoryRanges`: the memory of some tensors, to copy a tensor that shares it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from torch import Tensor


class MemoryRanges:
    """The memory of some tensors, from the first to the last element of each. Ranges of one storage count apart, as
    the gradients of a bucket share one.

    Args:
        tensors: these tensors, which may overlap.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Addresses of ranges in ascending order, which do not overlap.
        self._starts: list[int] = []
        self._ends: list[int] = []
        # In order, most are behind the last; the time is that of each backward, for all of its parameters.
        for start, end in sorted(map(range_of, tensors)):
            self._add(start, end)

    def unaliased(self, x: Tensor) -> Tensor:
        """Returns ``x`` and adds its memory. Returns a copy if some of its memory is in a range, or is that of several
        of its elements (an expanded tensor).
        """
        start, end = range_of(x)
        at = bisect_right(self._ends, start)  # the first range that ends after `start`
        shared = at < len(self._starts) and self._starts[at] < end
        if start < end and (shared or end - start < x.nbytes):
            return x.clone()
        self._add(start, end)
        return x

    def _add(self, start: int, end: int) -> None:
        """Adds a range of addresses, joined with those that it overlaps."""
        if start == end:
            return
        if not self._ends or start >= self._ends[-1]:
            self._starts.append(start)
            self._ends.append(end)
            return
        low, high = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high], self._ends[low:high] = [start], [end]


def range_of(x: Tensor) -> tuple[int, int]:
    """Returns the addresses of the first byte of ``x`` and of that after its last one; equal if it has no elements."""
    start = x.data_ptr()
    if x.is_contiguous() or not x.numel():
        return start, start + x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.itemsize
