"""Random fills of a tensor that no process holds whole: drawn in chunks, in the single device's order.

Every rank draws all chunks from the same CPU generator and keeps the elements that it holds, so the values
and the generator's state afterwards equal those of the same fill of the whole tensor. torch's CPU fills are
sequential in the flat index; ``normal_`` works in blocks of 16 and draws the last 16 elements anew where
the size is no multiple of 16, so chunks are multiples of 16 and the last one has at least 16 elements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from shardc.runtime.storage import take

BLOCK = 16
Fill = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor of global ``shape``: per dim the indices, and the local tensor.

    ``local`` is None where the rank holds nothing of it.
    """

    shape: tuple[int, ...]
    indices: tuple[Sequence[int], ...]
    local: torch.Tensor | None

    @property
    def numel(self) -> int:
        return prod(self.shape)


def draw(piece: Piece, fill: Fill, dtype: torch.dtype, limit: int) -> None:
    """Fills ``piece`` as ``fill`` would fill the whole contiguous CPU tensor, at most ``limit`` elements at a time."""
    for start, values in drawn(piece.numel, fill, dtype, limit):
        place(piece, start, values)


def drawn(numel: int, fill: Fill, dtype: torch.dtype, limit: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first flat index, values) of each chunk of the whole fill; the buffer is reused from chunk to chunk."""
    step = max(limit // BLOCK, 1) * BLOCK
    buffer = torch.empty(min(numel, step + BLOCK), dtype=dtype)
    start = 0
    while start < numel:
        # The last chunk takes the remainder with it, so that it has a block at least.
        size = numel - start if numel - start < step + BLOCK else step
        fill(buffer[:size])
        yield start, buffer[:size]
        start += size


def place(piece: Piece, start: int, values: torch.Tensor) -> None:
    """Copies into ``piece`` what it holds of ``values``, the flat elements from ``start`` of the whole tensor."""
    if piece.local is None or piece.local.numel() == 0:
        return
    if not piece.shape:
        piece.local.copy_(values[0])
        return
    row = prod(piece.shape[1:])
    while values.numel():
        index, offset = divmod(start, row)
        if offset or values.numel() < row:
            # A part of one row.
            size = min(row - offset, values.numel())
            at = bisect_left(piece.indices[0], index)
            if at < len(piece.indices[0]) and piece.indices[0][at] == index:
                place(Piece(piece.shape[1:], piece.indices[1:], piece.local[at]), offset, values[:size])
        else:
            rows = values.numel() // row
            size = rows * row
            _place_rows(piece, index, values[:size].view(rows, *piece.shape[1:]))
        start, values = start + size, values[size:]


def _place_rows(piece: Piece, first: int, block: torch.Tensor) -> None:
    assert piece.local is not None
    rows = piece.indices[0]
    low, high = bisect_left(rows, first), bisect_left(rows, first + block.shape[0])
    block = take(block, 0, shifted(rows[low:high], first))
    for dim in range(1, block.dim()):
        block = take(block, dim, piece.indices[dim])
    piece.local[low:high].copy_(block)


def shifted(index: Sequence[int], by: int) -> Sequence[int]:
    """Each of ``index`` less ``by``; a `range` stays one."""
    if isinstance(index, range):
        return range(index.start - by, index.stop - by)
    return [i - by for i in index]


def scatter(piece: Piece, flat: torch.Tensor, values: torch.Tensor) -> None:
    """Writes ``values`` at the flat indices ``flat`` of the whole tensor, those of them that ``piece`` holds."""
    if piece.local is None or piece.local.numel() == 0:
        return
    mask = torch.ones_like(flat, dtype=torch.bool)
    position = []
    for index, coordinate in zip(piece.indices, torch.unravel_index(flat, piece.shape), strict=True):
        sorted_index = torch.as_tensor(index)
        at = torch.searchsorted(sorted_index, coordinate.contiguous()).clamp_(max=len(index) - 1)
        mask &= sorted_index[at] == coordinate
        position.append(at)
    piece.local[tuple(at[mask] for at in position)] = values[mask]
