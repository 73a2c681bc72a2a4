"""How the operands of an op lie in memory on one rank.

A kernel is known to take the strides that were traced, at global shapes. A shard may have others, after a gather for
instance. Ops whose rule says that they compute the same at any strides (`Rule.strides`) take it as it is. Other ops get
their operands as they lay in the trace.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

_VECTOR = 16  # bytes that a kernel may load at a time where strides are multiples of that


def lies_like(x: Tensor, traced: Tensor | None) -> bool:
    """Whether a kernel that takes ``traced`` also takes ``x``, of the same rank and of another size.

    Where ``traced`` is contiguous (or unknown: None) ``x`` is. Otherwise their dims follow each other in the same order
    in memory, a dim of stride 1 keeps it, as do multiples of a vector, and no other dims are expanded.
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
    """The dims of ``traced`` as they lie in memory, the slowest first; expanded ones where a copy would have them."""
    if traced is None:
        return []
    strides = torch.empty_like(torch.empty_strided(traced.shape, traced.stride(), device="meta")).stride()
    return sorted(range(traced.ndim), key=lambda dim: (-strides[dim], dim))
