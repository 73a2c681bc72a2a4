"""Where what a rank sends lies until its peers have read it: offsets in segments that are made once and used again.

`shardc.runtime.shared` puts messages there, `shardc.analysis.staged` predicts how much that takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from shardc.ir.arena import ALIGNMENT, aligned

_PAGE = 4096
_LEAST = 1 << 16  # bytes of a segment


class Part(NamedTuple):
    """Tensors that lie one after the other.

    Args:
        offsets: of each, in bytes; aligned where they are of several dtypes.
        size: bytes of all, so that what follows is aligned.
    """

    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[torch.dtype, int]]) -> Part:
        """Of tensors by (dtype, bytes)."""
        mixed = len({dtype for dtype, _ in tensors}) > 1
        ends = [0, *accumulate(aligned(size) if mixed else size for _, size in tensors)]
        return cls(tuple(ends[:-1]), aligned(ends[-1]))


class Block(NamedTuple):
    """``size`` bytes from ``offset`` of the segment of this number."""

    segment: int
    offset: int
    size: int


@dataclass
class Staging:
    """Which bytes are in use.

    Attributes:
        segments: bytes of each segment.
        used, peak: bytes in use, and the most that were.
    """

    segments: list[int] = field(default_factory=list)
    used: int = 0
    peak: int = 0
    _holes: list[Block] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(self.segments)

    def take(self, size: int) -> Block:
        """A free block: in the smallest hole that holds it, or in a new segment.

        >>> staging = Staging()
        >>> first = staging.take(100_000)
        >>> staging.give(first)
        >>> staging.take(90_000), staging.segments
        (Block(segment=0, offset=0, size=90048), [102400])
        """
        size = max(aligned(size), ALIGNMENT)
        fitting = [hole for hole in self._holes if hole.size >= size]
        if fitting:
            hole = min(fitting, key=lambda hole: (hole.size, hole.segment, hole.offset))
            self._holes.remove(hole)
        else:
            self.segments.append(max(-(-size // _PAGE) * _PAGE, _LEAST))
            hole = Block(len(self.segments) - 1, 0, self.segments[-1])
        if hole.size > size:
            self._holes.append(Block(hole.segment, hole.offset + size, hole.size - size))
        self.used += size
        self.peak = max(self.peak, self.used)
        return Block(hole.segment, hole.offset, size)

    def give(self, block: Block) -> None:
        """``block`` is free again; holes that touch become one."""
        self.used -= block.size
        segment, first, last = block.segment, block.offset, block.offset + block.size
        for hole in [hole for hole in self._holes if hole.segment == segment]:
            if hole.offset + hole.size == first or hole.offset == last:
                self._holes.remove(hole)
                first, last = min(first, hole.offset), max(last, hole.offset + hole.size)
        self._holes.append(Block(segment, first, last - first))
