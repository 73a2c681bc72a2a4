"""``nn.init.trunc_normal_`` shard by shard.

torch 2.13 samples by rejection: it draws the whole tensor, then draws it again for as long as any element lay
outside of the bounds. Here every rank follows all elements that are still outside, wherever they are held.
Older versions invert the distribution in place, which `shardc.runtime.virtual` runs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from shardc import _compat
from shardc.runtime.draw import Fill, Piece, drawn, place, scatter
from shardc.runtime.virtual import Virtual, piece_of, unsupported

# Below this share of the normal distribution inside of the bounds, torch draws from another distribution.
_LEAST_SHARE = 0.3


@contextmanager
def shardwise_trunc_normal() -> Iterator[None]:
    """While open, ``nn.init.trunc_normal_`` fills a `Virtual` as it would fill the whole tensor."""
    original = nn.init._no_grad_trunc_normal_

    def trunc_normal(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        in_place = not _compat.trunc_normal_rejects()
        if not isinstance(tensor, Virtual) or tensor.made.whole or in_place:
            return original(tensor, mean, std, a, b, generator=generator)
        piece = piece_of(nn.init.trunc_normal_, tensor)
        if not tensor.meta.is_contiguous():
            raise unsupported(nn.init.trunc_normal_, tensor, "through a view that is not contiguous")
        if piece.numel <= tensor.made.limit:
            values = torch.empty(piece.shape, dtype=tensor.dtype)
            place(piece, 0, original(values, mean, std, a, b, generator=generator).flatten())
        elif _share((a - mean) / std, (b - mean) / std) <= _LEAST_SHARE:
            raise unsupported(nn.init.trunc_normal_, tensor, f"with bounds so far out: ({a}, {b})")
        else:
            bounds = [torch.tensor(bound, dtype=tensor.dtype).item() for bound in (a, b)]
            fill = partial(torch.Tensor.normal_, mean=mean, std=std, generator=generator)
            _reject(piece, bounds, fill, tensor.dtype, tensor.made.limit)
        tensor.made.mark(tensor)
        return tensor

    nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


def _share(low: float, high: float) -> float:
    """How much of the standard normal distribution lies between ``low`` and ``high``."""
    return (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2


def _reject(piece: Piece, bounds: Sequence[float], fill: Fill, dtype: torch.dtype, limit: int) -> None:
    """Draws the whole tensor again until no element of it, held here or not, is outside of ``bounds``."""
    low, high = bounds
    # First flat index of a chunk -> the offsets in it of the elements that are outside.
    outside: dict[int, torch.Tensor] = {}
    for start, values in drawn(piece.numel, fill, dtype, limit):
        place(piece, start, values)
        outside[start] = ((values < low) | (values > high)).nonzero().flatten().int()
    while any(len(offsets) for offsets in outside.values()):
        for start, values in drawn(piece.numel, fill, dtype, limit):
            offsets = outside[start]
            again = values[offsets]
            scatter(piece, offsets + start, again)
            outside[start] = offsets[(again < low) | (again > high)]
