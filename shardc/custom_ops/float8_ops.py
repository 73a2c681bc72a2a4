"""Matrix products in float8 of scaled operands. The scale of a tensor follows from its largest absolute value
(``amax``).

``quantise(x, amax, dtype)`` is ``x * scale`` in float8, and ``mm`` multiplies two such matrices and divides by their
scales. With one scale for a tensor, ``amax`` has no dims, and the scale brings it to the largest number of the dtype.
With one for each row or column, ``amax`` is a matrix in which the other dim has size 1, and scales are rounded down to
powers of two. With one for each block of a row (or column), ``amax`` is that of ``x`` cut to [rows, blocks, block],
with 1 in place of the last (or to [blocks, block, columns], with 1 in the middle), and scales are those of MX (OCP
Microscaling Formats 1.0, 2023): powers of two with the exponent of ``amax``. A maximum is exact, so that scales and
operands in float8 do not depend on how tensors are split.

GPUs from compute capability 8.9 on multiply in float8. Elsewhere the same operands are multiplied in float32, or in
float64 if the result is. So are operands with a scale for each block, on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from shardc.custom_ops.op_library import OpLibrary
from shardc.ir.op_traits import communicates, is_view

aten = torch.ops.aten

_LEAST = 1e-12  # of amax, so that scales are finite
_MANTISSA, _BIAS = 23, 127  # bits of a float32's mantissa; bias of its exponent
_EXPONENT = -(1 << _MANTISSA)  # mask of sign and exponent
UNIT = 16  # the kernel takes columns of a, and rows and columns of b, in multiples of this
BLOCK = 32  # numbers with a scale of their own, by MX


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the float32 scale by which a tensor is multiplied before its conversion to ``dtype``. ``amax`` is the
    largest absolute value of the tensor, or of each of its rows, columns or blocks.
    """
    if amax.ndim == 3:
        exponent = amax.to(torch.float32).view(torch.int32) >> _MANTISSA
        top = math.frexp(torch.finfo(dtype).max)[1] - 1
        return (((2 * _BIAS + top - exponent).clamp(max=2 * _BIAS)) << _MANTISSA).view(torch.float32)
    scale = torch.finfo(dtype).max / amax.to(torch.float32).clamp_min(_LEAST)
    return (scale.view(torch.int32) & _EXPONENT).view(torch.float32) if amax.ndim else scale


def quantise(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` times its scale (`scale_of`), converted to the float8 ``dtype``. ``amax`` is the largest absolute
    value of ``x``, or of each of its rows, columns or blocks.
    """
    most = torch.finfo(dtype).max
    return _scaled(x.to(torch.float32), amax, scale_of(amax, dtype)).clamp(-most, most).to(dtype)


def _scaled(x: Tensor, amax: Tensor, scale: Tensor) -> Tensor:
    """Return ``x`` times ``scale``, which has the shape of ``amax``: one number for ``x``, or one for each row, column
    or block.
    """
    if amax.ndim < 3:
        return x * scale
    dim = dim_of_blocks(x.shape, amax.shape)
    return (x.unflatten(dim, (amax.shape[dim], -1)) * scale).flatten(dim, dim + 1)


def dim_of_blocks(x: Sequence[int], amax: Sequence[int]) -> int:
    """Return which dim of a matrix is divided into blocks, 0 or 1, given the shape ``x`` of the matrix and the shape
    ``amax`` of the blocks' maxima.
    """
    return int(amax[2] == 1 and amax[0] == x[0])


def multiply(a: Tensor, b: Tensor, amax_a: Tensor, amax_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix product of two float8 operands, divided by their scales, in ``dtype``. The scales follow from
    the maxima (`scale_of`) ``amax_a``, of shape [], [rows of a, 1] or [rows of a, blocks, 1], and ``amax_b``, of shape
    [], [1, columns of b] or [blocks, 1, columns of b].
    """
    inverse_a, inverse_b = scale_of(amax_a, a.dtype).reciprocal(), scale_of(amax_b, b.dtype).reciprocal()
    blocks = amax_a.ndim == 3
    if _has_kernel(a.device) and not blocks and dtype != torch.float64:
        return _by_kernel(a, b, inverse_a, inverse_b, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if blocks:
        operands = _scaled(a.to(wide), amax_a, inverse_a), _scaled(b.to(wide), amax_b, inverse_b)
        return torch.mm(*operands).to(dtype)
    product = torch.mm(a.to(wide), b.to(wide))
    return (product * inverse_a * inverse_b).to(dtype)


def _has_kernel(device: torch.device) -> bool:
    """Return whether products in float8 have a kernel on ``device``."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _by_kernel(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of ``a`` and ``b`` by torch's float8 kernel, times ``inverse_a`` and ``inverse_b`` (inverse
    scales). The operands are padded and laid out as the kernel needs them.
    """
    (_, inner), (_, columns) = a.shape, b.shape
    more_inner, more_columns = -inner % UNIT, -columns % UNIT
    a = aten.constant_pad_nd(a, [0, more_inner]) if more_inner else a
    b = aten.constant_pad_nd(b, [0, more_columns, 0, more_inner]) if more_inner or more_columns else b
    a, b = a.contiguous(), b.t().contiguous().t()
    if not inverse_a.ndim:
        out = aten._scaled_mm(a, b, inverse_a, inverse_b, out_dtype=dtype)
        return out[:, :columns] if more_columns else out
    unscaled = torch.ones((), device=a.device)
    out = aten._scaled_mm(a, b, unscaled, unscaled, out_dtype=torch.float32)
    out = out[:, :columns] if more_columns else out
    return (out * inverse_a * inverse_b).to(dtype)


def _fake_quantise(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _fake_mm(a: Tensor, b: Tensor, amax_a: Tensor, amax_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


_library = OpLibrary("shardc_float8")
QUANTISE = _library.define(
    "quantise(Tensor x, Tensor amax, ScalarType dtype) -> Tensor",
    quantise,
    _fake_quantise,
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise),
)
MM = _library.define(
    "mm(Tensor a, Tensor b, Tensor amax_a, Tensor amax_b, ScalarType dtype) -> Tensor",
    multiply,
    _fake_mm,
    tags=(torch.Tag.pt2_compliant_tag,),
)
WRITTEN_OUT = {QUANTISE: quantise, MM: multiply}  # in torch's ops, which Inductor fuses


def data_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of ``node`` whose elements it converts or combines: all, except for the maximum from which a
    `quantise` op takes its scale.
    """
    return node.all_input_nodes[:1] if node.target is QUANTISE else node.all_input_nodes


def is_scale(node: fx.Node) -> bool:
    """Return whether ``node`` is read, and only to scale the operand of a float8 op: directly, or after views and
    collectives.
    """
    return bool(node.users) and all(
        (user.target is QUANTISE and node is not user.args[0])
        or (user.target is MM and node not in user.args[:2])
        or ((communicates(user.target) or is_view(user.target)) and is_scale(user))
        for user in node.users
    )
