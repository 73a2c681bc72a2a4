"""Fingerprints of tensors: different values very rarely have the same one."""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch
from torch import Tensor

_WORDS = 1 << 16  # 8-byte words per block, which fits in a core's cache
_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15  # odd


def bytes_of(x: Tensor) -> Tensor:
    """Returns the values of ``x`` as uint8 in one dim: a view if ``x`` is contiguous."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a tensor of one element may have any stride


def fingerprint(x: Tensor) -> int:
    """Hashes values, dtype and shape of ``x`` to 64 bits, on its device; several GB/s on one core.

    Each 8-byte word is multiplied by its own odd number and the products are summed modulo 2^64, per block. A change of
    a single word always changes the result.
    """
    flat = bytes_of(x)
    # A view as int64 needs an aligned start.
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    blocks = flat[:whole].view(torch.int64).split(_WORDS) if whole else ()
    weights = _weights(x.device)
    products = torch.empty_like(weights)
    sums = [torch.mul(block, weights[: len(block)], out=products[: len(block)]).sum() for block in blocks]
    total = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode())
    for value in (*(torch.stack(sums).tolist() if sums else ()), *flat[whole:].tolist()):
        total = ((total ^ value) * _MIX) & _MASK
    return total


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (_WORDS,), generator=generator) * 2 + 1).to(device)
