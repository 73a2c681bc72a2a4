"""Global indices on shards: which element of a split dim a rank holds, and where a global index lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardc.ir.checks import IN_RANGE
from shardc.ir.layout import Layout, strides
from shardc.rules.rule import Local

aten = torch.ops.aten


def coordinate(local: Local, axis: str) -> Any:
    """int64 []: this rank's index along ``axis``."""
    return local.builder.call(aten.squeeze.dim, local.builder.coordinate((axis,)), 0)


def positions(
    local: Local, layout: Layout, dim: int, device: torch.device | None, at: Mapping[str, Any] | None = None
) -> Any:
    """int64 [n]: the global index along ``dim`` of each of the n elements that this rank holds.

    Args:
        at: axis -> a number or int64 [1], the index along it of the rank to ask for, where that is not this one.
    """
    call = local.builder.call
    out = None
    digits = layout.dims[dim]
    for (radix, axis), stride in zip(digits, strides(digits), strict=True):
        if axis is None:
            step = call(aten.arange.start_step, 0, radix * stride, stride, dtype=torch.int64, device=device)
        else:
            index = at[axis] if at and axis in at else local.builder.coordinate((axis,))
            if isinstance(index, int):
                step = call(aten.full.default, [1], index * stride, dtype=torch.int64, device=device)
            else:
                step = call(aten.mul.Tensor, index, stride)
        out = step if out is None else call(aten.add.Tensor, call(aten.unsqueeze.default, out, 1), step)
        out = call(aten.reshape.default, out, [-1])
    return call(aten.arange.default, 1, dtype=torch.int64, device=device) if out is None else out


def split(layout: Layout, dim: int) -> bool:
    """Whether ``layout`` splits ``dim`` over some axis; a tensor without dims is indexed along dim 0 too."""
    return layout.ndim > 0 and bool(layout.dim_axes(dim))


def in_range(local: Local, layout: Layout, dim: int, index: Any, wraps: bool = False) -> Any:
    """``index``; where the op itself would not notice, an entry that is out of the true range raises when this runs.

    Args:
        layout: of what is indexed, the call's first operand.
        wraps: the op takes negative entries, which count from the end. Where this rank's end, or that of the
            padded dim, is another, they are counted from the beginning in what is returned.
    """
    if not layout.ndim:
        return index
    size = local.true_size(dim, layout.shape[dim])
    known = size == layout.shape[dim] and not split(layout, dim)
    if known:
        return index
    call = local.builder.call
    if wraps:
        index = call(aten.where.self, call(aten.lt.Scalar, index, 0), call(aten.add.Scalar, index, size), index)
    return call(IN_RANGE, index, size)


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


def owned_at(local: Local, layout: Layout, dim: int, index: int) -> tuple[int, Any]:
    """As `owned` for one index that is known: its local index on the rank that holds it, and a bool [] mask."""
    mask, found = None, 0
    digits = layout.dims[dim]
    for (radix, axis), stride in zip(digits, strides(digits), strict=True):
        digit = index % layout.shape[dim] // stride % radix
        if axis is None:
            found = found * radix + digit
            continue
        here = local.builder.call(aten.eq.Scalar, coordinate(local, axis), digit)
        mask = here if mask is None else local.builder.call(aten.logical_and.default, mask, here)
    assert mask is not None, f"{layout} does not split dim {dim}"
    return found, mask


def zero_unless(local: Local, mask: Any, x: Any) -> Any:
    """``x`` where ``mask`` holds, 0 elsewhere; the mask broadcasts."""
    return local.builder.call(aten.where.self, mask, x, local.builder.call(aten.full_like.default, x, 0))


def align(local: Local, mask: Any, dims: int) -> Any:
    """``mask`` with ``dims`` dims of size 1 after its own, so that it broadcasts over what follows an index."""
    return local.builder.call(aten.reshape.default, mask, [*local.builder.shape(mask), *[1] * dims]) if dims else mask


def once(local: Local, x: Any) -> Any:
    """``x``, which every rank holds and each would add its entries to, on the first of them only.

    The axes are those over which the result is pending though the operand was not.
    """
    for axis, _ in local.results[0].partial:
        if axis not in {a for a, _ in local.operands[0].partial}:
            first = local.builder.call(aten.eq.Scalar, coordinate(local, axis), 0)
            x = zero_unless(local, first, x)
    return x


def past_end(local: Local, x: Any, layout: Layout, dim: int, index: Any, mask: Any) -> tuple[Any, Any]:
    """``x`` with one more element along ``dim``, and ``index`` pointing there where ``mask`` does not hold."""
    call, size = local.builder.call, layout.local_shape[dim]
    pad = [edge for i in reversed(range(layout.ndim)) for edge in (0, int(i == dim))]
    index = call(aten.where.self, mask, index, call(aten.full_like.default, index, size))
    return call(aten.constant_pad_nd.default, x, pad, 0), index
