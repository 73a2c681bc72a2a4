"""Emits index arithmetic for the rules of ops that index a split dim: global indices of this rank's elements, local
indices of its shard from global ones, and range checks.

``shardc_checks::in_range(index, size)`` returns ``index``, and raises IndexError if an entry is below 0 or >= ``size``:
a rank with a shard of a table would take a wrong id for another rank's. On an accelerator it is a device assertion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardc.custom_ops.op_library import OpLibrary
from shardc.ir.layout import Layout, strides
from shardc.rules.rule import Emitted, Local

aten = torch.ops.aten


def _in_range(index: Tensor, size: int) -> Tensor:
    """Return a copy of ``index``; raise IndexError if an entry is not in ``range(size)``."""
    if index.numel():
        low, high = torch.aminmax(index)
        if index.device.type == "cpu":
            if low < 0 or high >= size:
                wrong = int(low) if low < 0 else int(high)
                raise IndexError(f"index {wrong} is out of range for a dim of {size} elements")
        else:
            torch._assert_async((low >= 0) & (high < size))
    return index.clone()


_library = OpLibrary("shardc_checks")
IN_RANGE = _library.define(
    "in_range(Tensor index, SymInt size) -> Tensor",
    _in_range,
    lambda index, size: torch.empty_like(index),
    tags=(torch.Tag.pt2_compliant_tag,),
)


def coordinate(local: Local, axis: str) -> Emitted:
    """Return this rank's index along ``axis``: int64 []."""
    return local.builder.call(aten.squeeze.dim, local.builder.coordinate((axis,)), 0)


def positions(
    local: Local, layout: Layout, dim: int, device: torch.device | None, at: Mapping[str, Emitted] | None = None
) -> Emitted:
    """Return the global index along ``dim`` of each of the n elements that this rank (or the one that ``at`` names)
    holds: int64 [n].

    Args:
        device: device of the result; None for that of coordinates.
        at: axis -> index (int, or int64 [1]) of another rank; axes that are missing have this rank's index.
    """
    call = local.builder.call
    out, device = None, device or local.builder.device
    digits = layout.dims[dim]
    # A layout writes a global index in mixed radix: it is the sum of digit * stride. A local digit takes all its values
    # on each rank; the value of a digit that an axis splits is the rank's coordinate along it.
    for (radix, axis), stride in zip(digits, strides(digits), strict=True):
        if axis is None:
            terms = call(aten.arange.start_step, 0, radix * stride, stride, dtype=torch.int64, device=device)
        else:
            index = at[axis] if at and axis in at else local.builder.coordinate((axis,))
            if isinstance(index, int):
                terms = call(aten.full.default, [1], index * stride, dtype=torch.int64, device=device)
            else:
                terms = call(aten.mul.Tensor, index, stride)
        # Each sum of the digits above with each term of this one; the minor digit changes fastest.
        out = terms if out is None else call(aten.add.Tensor, call(aten.unsqueeze.default, out, 1), terms)
        out = call(aten.reshape.default, out, [-1])
    # A dim of size 1 has no digits.
    return call(aten.arange.default, 1, dtype=torch.int64, device=device) if out is None else out


def split(layout: Layout, dim: int) -> bool:
    """Return whether ``layout`` splits ``dim``. It does not for a tensor without dims, which torch lets one index along
    dim 0.
    """
    return layout.ndim > 0 and bool(layout.dim_axes(dim))


def in_range(local: Local, layout: Layout, dim: int, index: Emitted, wraps: bool = False) -> Emitted:
    """Return ``index``, with a range check where the local op would not detect an entry out of range (the dim is split
    or padded). ``wraps``: the op accepts negative entries, which are made positive before the check.

    The end of a shard or of a padded dim is not the end of the tensor, so a negative entry must not count from it.
    ``layout`` is that of the indexed tensor, the call's first operand.
    """
    if not layout.ndim:
        return index
    size = local.true_size(dim, layout.shape[dim])
    if size == layout.shape[dim] and not split(layout, dim):  # the op itself finds such entries
        return index
    call = local.builder.call
    if wraps:
        index = call(aten.where.self, call(aten.lt.Scalar, index, 0), call(aten.add.Scalar, index, size), index)
    return call(IN_RANGE, index, size)


def locate(
    local: Local, layout: Layout, dim: int, index: Emitted, wraps: bool = False
) -> tuple[Emitted, Emitted | None]:
    """Check ``index``, global indices along ``dim``, and translate them into local ones of this rank's shard. Return
    (local indices, mask of the entries that this rank holds); the mask is None if ``layout`` does not split ``dim``.
    Arguments are as of `in_range`.
    """
    index = in_range(local, layout, dim, index, wraps)
    return to_local_indices(local, layout, dim, index) if split(layout, dim) else (index, None)


def to_local_indices(local: Local, layout: Layout, dim: int, index: Emitted) -> tuple[Emitted, Emitted]:
    """Translate global indices along ``dim`` (an integer tensor of any shape) into local ones of this rank's shard.
    Return (local indices, mask of the entries that this rank holds), both of that shape.

    Every index is in ``range(size of the dim)``. The local index of an entry that another rank holds is 0.
    """
    call, mask, local_index = local.builder.call, None, None
    # Local digits make up the local index; digits that axes split must be this rank's coordinates.
    for axis, radix, digit in digits_of(local, layout, dim, index):
        if axis is None:
            local_index = (
                digit
                if local_index is None
                else call(aten.add.Tensor, call(aten.mul.Tensor, local_index, radix), digit)
            )
        else:
            is_local = call(aten.eq.Tensor, digit, coordinate(local, axis))
            mask = is_local if mask is None else call(aten.logical_and.default, mask, is_local)
    assert mask is not None, f"{layout} does not split dim {dim}"
    if local_index is None:
        return call(aten.full_like.default, index, 0), mask
    return zero_unless(local, mask, local_index), mask


def digits_of(local: Local, layout: Layout, dim: int, index: Emitted) -> Iterator[tuple[str | None, int, Emitted]]:
    """Yield (axis, radix, value in ``index``) of each digit of ``dim``, the major one first; the axis is None for a
    local digit. ``index``: global indices along the dim, an integer tensor of any shape.
    """
    call, digits = local.builder.call, layout.dims[dim]
    for (radix, axis), stride in zip(digits, strides(digits), strict=True):
        digit = index if stride == 1 else call(aten.div.Tensor_mode, index, stride, rounding_mode="floor")
        # The major digit needs no remainder.
        yield axis, radix, digit if radix * stride == layout.shape[dim] else call(aten.remainder.Scalar, digit, radix)


def to_local_index(local: Local, layout: Layout, dim: int, index: int) -> tuple[int, Emitted]:
    """Locate ``index``, one global index along ``dim`` that is known when the graph is built. Return (its local index
    on the rank that holds it, bool [] mask that is true on that rank).
    """
    mask, local_index = None, 0
    digits = layout.dims[dim]
    # Local digits make up the local index; digits that axes split say which rank holds it.
    for (radix, axis), stride in zip(digits, strides(digits), strict=True):
        digit = index % layout.shape[dim] // stride % radix
        if axis is None:
            local_index = local_index * radix + digit
            continue
        is_local = local.builder.call(aten.eq.Scalar, coordinate(local, axis), digit)
        mask = is_local if mask is None else local.builder.call(aten.logical_and.default, mask, is_local)
    assert mask is not None, f"{layout} does not split dim {dim}"
    return local_index, mask


def zero_unless(local: Local, mask: Emitted, x: Emitted) -> Emitted:
    """Return ``x`` if ``mask`` is true, else 0, per element; the mask broadcasts."""
    return local.builder.call(aten.where.self, mask, x, local.builder.call(aten.full_like.default, x, 0))


def align(local: Local, mask: Emitted, dims: int) -> Emitted:
    """Return ``mask`` with ``dims`` (a number) dims of size 1 appended. The mask of an index then broadcasts over the
    dims of the tensor that follow the indexed dim.
    """
    return local.builder.call(aten.reshape.default, mask, [*local.builder.shape(mask), *[1] * dims]) if dims else mask


def once_per_sum(local: Local, x: Emitted) -> Emitted:
    """Return ``x`` on the first rank and zero on the other ranks, along each axis over which the op's result is partial
    and its operand 0 is not.

    Every rank holds ``x`` and would add its entries to it, so the sum over ranks would count ``x`` once per rank.
    """
    for axis, _ in local.results[0].partial:
        if axis not in {a for a, _ in local.operands[0].partial}:
            first = local.builder.call(aten.eq.Scalar, coordinate(local, axis), 0)
            x = zero_unless(local, first, x)
    return x


def past_end(
    local: Local, x: Emitted, layout: Layout, dim: int, index: Emitted, mask: Emitted
) -> tuple[Emitted, Emitted]:
    """Return (``x`` with one element appended along ``dim``, ``index`` pointing at that element where ``mask`` is
    false). A write by index then puts there what belongs to other ranks' shards, and the caller cuts the element off.

    Args:
        layout: layout of ``x``.
        index, mask: local indices along ``dim``, and whether this rank holds them (`to_local_indices`).
    """
    call, size = local.builder.call, layout.local_shape[dim]
    # (before, after) of each dim from the last, as ``constant_pad_nd`` takes them: 1 behind ``dim``.
    pad = [edge for i in reversed(range(layout.ndim)) for edge in (0, int(i == dim))]
    index = call(aten.where.self, mask, index, call(aten.full_like.default, index, size))
    return call(aten.constant_pad_nd.default, x, pad, 0), index
