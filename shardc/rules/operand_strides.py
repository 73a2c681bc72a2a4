"""The strides of an op's operands on one rank.

A kernel accepts the strides that were traced, at global shapes. A shard may have others, after a gather for instance.
Ops that accept any strides (`Rule.strides`) take the shard as it is; other ops get a copy with the dims in the traced
memory order.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

_VECTOR = 16  # bytes: the width of vectorized loads, which kernels use if strides are multiples of it


def lies_like(x: Tensor, traced: Tensor | None) -> bool:
    """Return whether a kernel that accepts ``traced`` also accepts ``x`` of the same rank, maybe of another size.

    If ``traced`` is contiguous (or None: unknown), ``x`` must be. Otherwise the dims must have the same memory order,
    a dim of stride 1 must keep it, strides must stay as aligned to vectors as they were, and no further dim may be
    expanded.
    """
    if traced is None or traced.is_contiguous() or not x.numel():
        return x.is_contiguous()
    order = memory_order(traced)
    if x.permute(order).is_contiguous():
        return True
    below, itemsize = 0, x.element_size()
    for dim in reversed(order):
        step, before = x.stride(dim), traced.stride(dim)
        if x.shape[dim] == 1 or before == 0:
            continue
        if step < max(below, 1) or (before == 1 and step != 1):
            return False
        if gcd(step * itemsize, _VECTOR) < gcd(before * itemsize, _VECTOR):
            return False
        below = step
    return True


def memory_order(traced: Tensor | None) -> list[int]:
    """Return the dims of ``traced`` in memory order, the slowest first; expanded dims are ordered as in a copy."""
    if traced is None:
        return []
    strides = torch.empty_like(torch.empty_strided(traced.shape, traced.stride(), device="meta")).stride()
    return sorted(range(traced.ndim), key=lambda dim: (-strides[dim], dim))
