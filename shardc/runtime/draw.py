"""Random fills of a sharded tensor with the values of a single device, without holding the whole tensor.

Each rank draws all chunks from the same CPU generator and keeps its own elements, so the generator's state afterwards
is that of one device too. torch's CPU fills are sequential in the flat index, but ``normal_`` works in blocks of 16 and
redraws the last 16 elements if the size is no multiple of 16. So chunks are multiples of 16, and the last one has at
least 16 elements.
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
    """This rank's part of a tensor of global ``shape``: indices per dim, and the local tensor (None if it has none)."""

    shape: tuple[int, ...]
    indices: tuple[Sequence[int], ...]
    local: torch.Tensor | None

    @property
    def numel(self) -> int:
        return prod(self.shape)


def draw(piece: Piece, fill: Fill, dtype: torch.dtype, limit: int) -> None:
    """Fills ``piece`` as ``fill`` fills the whole contiguous CPU tensor; draws at most ``limit`` elements at once."""
    for start, values in drawn(piece.numel, fill, dtype, limit):
        place(piece, start, values)


def drawn(numel: int, fill: Fill, dtype: torch.dtype, limit: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Draws a whole tensor by ``fill`` in chunks; yields (first flat index, values), in a buffer that is reused."""
    step = max(limit // BLOCK, 1) * BLOCK
    buffer = torch.empty(min(numel, step + BLOCK), dtype=dtype)
    start = 0
    while start < numel:
        # The last chunk includes the remainder, so that it has at least one block.
        size = numel - start if numel - start < step + BLOCK else step
        fill(buffer[:size])
        yield start, buffer[:size]
        start += size


def place(piece: Piece, start: int, values: torch.Tensor) -> None:
    """Copies this rank's elements of ``values``, the whole tensor's from flat index ``start``, into ``piece``."""
    if piece.local is None or piece.local.numel() == 0:
        return
    if not piece.shape:
        piece.local.copy_(values[0])
        return
    row = prod(piece.shape[1:])
    while values.numel():
        index, offset = divmod(start, row)
        if offset or values.numel() < row:
            # Part of one row: recurse into its dims.
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
    """Subtracts ``by`` from each index; a `range` stays a `range`."""
    if isinstance(index, range):
        return range(index.start - by, index.stop - by)
    return [i - by for i in index]


def scatter(piece: Piece, flat: torch.Tensor, values: torch.Tensor) -> None:
    """Writes ``values`` at the whole tensor's flat indices ``flat`` into ``piece``, skipping those of other ranks."""
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
