"""Global indices on shards: which element of a split dim a rank holds, and where a global index lies."""

from __future__ import annotations

from typing import Any

import torch

from shardc.ir.layout import Layout, strides
from shardc.rules.rule import Local

aten = torch.ops.aten


def coordinate(local: Local, axis: str) -> Any:
    """int64 []: this rank's index along ``axis``."""
    return local.builder.call(aten.squeeze.dim, local.builder.coordinate((axis,)), 0)


def positions(local: Local, layout: Layout, dim: int, device: torch.device | None) -> Any:
    """int64 [n]: the global index along ``dim`` of each of the n elements that this rank holds."""
    call = local.builder.call
    out = None
    digits = layout.dims[dim]
    for (radix, axis), stride in zip(digits, strides(digits), strict=True):
        if axis is None:
            step = call(aten.arange.start_step, 0, radix * stride, stride, dtype=torch.int64, device=device)
        else:
            step = call(aten.mul.Tensor, local.builder.coordinate((axis,)), stride)
        out = step if out is None else call(aten.add.Tensor, call(aten.unsqueeze.default, out, 1), step)
        out = call(aten.reshape.default, out, [-1])
    return call(aten.arange.default, 1, dtype=torch.int64, device=device) if out is None else out


def split(layout: Layout, dim: int) -> bool:
    """Whether ``layout`` splits ``dim`` over some axis."""
    return bool(layout.dim_axes(dim))


def owned(local: Local, layout: Layout, dim: int, index: Any) -> tuple[Any, Any]:
    """Where global indices along ``dim`` lie on this rank, which holds ``layout`` of the indexed tensor.

    Args:
        index: an integer tensor of any shape, every entry in ``range(size of the dim)``.

    Returns:
        (local index, bool mask) of that shape; the local index is 0 where the mask says that another rank holds it.
    """
    call = local.builder.call
    digits = layout.dims[dim]
    mask = found = None
    for (radix, axis), stride in zip(digits, strides(digits), strict=True):
        digit = index if stride == 1 else call(aten.div.Tensor_mode, index, stride, rounding_mode="floor")
        if radix * stride != layout.shape[dim]:
            digit = call(aten.remainder.Scalar, digit, radix)
        if axis is None:
            found = digit if found is None else call(aten.add.Tensor, call(aten.mul.Tensor, found, radix), digit)
        else:
            here = call(aten.eq.Tensor, digit, coordinate(local, axis))
            mask = here if mask is None else call(aten.logical_and.default, mask, here)
    assert mask is not None, f"{layout} does not split dim {dim}"
    if found is None:
        return call(aten.full_like.default, index, 0), mask
    return zero_unless(local, mask, found), mask


def zero_unless(local: Local, mask: Any, x: Any) -> Any:
    """``x`` where ``mask`` holds, 0 elsewhere; the mask broadcasts."""
    return local.builder.call(aten.where.self, mask, x, local.builder.call(aten.full_like.default, x, 0))
