"""Ops on a sequence whose result at a position reads a few neighbours of that position. The dim of the sequence keeps
its size.

They are what shifts and convolutions of a sequence are in a graph (pass `Windows`), so that ranks which each have a
piece of the sequence need only the edges of their neighbours' pieces. Outside of the dim everything is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.custom_ops.op_library import OpLibrary

aten = torch.ops.aten


def _shift(x: Tensor, fill: Tensor | None, dim: int, by: int) -> Tensor:
    """Return ``x`` with its elements moved ``by`` places towards the end of ``dim`` (towards its beginning if ``by`` is
    negative). ``fill`` has the elements for the places that become free; None for zeros.

    Args:
        fill: the elements that come in, as many along ``dim``; None for zeros.
    """
    by = max(-x.shape[dim], min(by, x.shape[dim]))
    pad = [0, 0] * (x.dim() - 1 - dim) + [by, -by]
    moved = aten.constant_pad_nd.default(x, pad, 0).clone()
    if fill is not None:
        moved.narrow(dim, 0 if by > 0 else x.shape[dim] + by, abs(by)).copy_(fill)
    return moved


def _edge(x: Tensor, dim: int, begin: int, end: int) -> Tensor:
    """Return a copy of elements ``begin`` to ``end - 1`` of ``x`` along ``dim``: a slice of so few elements that ranks
    which split ``dim`` are sent all of it.
    """
    return aten.slice.Tensor(x, dim, begin, end).clone()


def _cumsum(x: Tensor, dim: int, reverse: bool) -> Tensor:
    """Return cumulative sums of ``x`` along ``dim``: at each element the sum up to it or, if ``reverse``, from it to
    the end.
    """
    return x.flip([dim]).cumsum(dim).flip([dim]) if reverse else x.cumsum(dim)


def _convolve(x: Tensor, weight: Tensor, before: int, after: int, dilation: int, groups: int) -> Tensor:
    """Return the convolution of ``x`` with ``weight`` over the last dim. The result has as many elements in that dim as
    ``x``.

    Args:
        x: [rows, channels in, elements].
        weight: [channels out, channels in / groups, k].
        before, after: number of neighbours that an element reads on each side; together ``dilation * (k - 1)``.
    """
    x = aten.constant_pad_nd.default(x, [before, after], 0)
    return aten.convolution.default(x, weight, None, [1], [0], [dilation], False, [0], groups)


def _convolve_weight(
    grad: Tensor, x: Tensor, weight: Tensor, before: int, after: int, dilation: int, groups: int
) -> Tensor:
    """Return the gradient of ``weight`` in `_convolve`, given ``grad``, the gradient of its result."""
    x = aten.constant_pad_nd.default(x, [before, after], 0)
    geometry = ([1], [0], [dilation], False, [0], groups)
    return aten.convolution_backward.default(grad, x, weight, None, *geometry, [False, True, False])[1]


def _like_x(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_edge(x: Tensor, dim: int, begin: int, end: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], end - begin, *x.shape[dim + 1 :]])


def _like_convolved(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], x.shape[2])


def _like_weight(grad: Tensor, x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return weight.new_empty(weight.shape)


_library = OpLibrary("shardc_window")
_WINDOW = "int before, int after, int dilation, int groups"
SHIFT = _library.define("shift(Tensor x, Tensor? fill, int dim, int by) -> Tensor", _shift, _like_x)
EDGE = _library.define("edge(Tensor x, int dim, int begin, int end) -> Tensor", _edge, _like_edge)
CUMSUM = _library.define("cumsum(Tensor x, int dim, bool reverse) -> Tensor", _cumsum, _like_x)
CONVOLVE = _library.define(f"convolve(Tensor x, Tensor weight, {_WINDOW}) -> Tensor", _convolve, _like_convolved)
CONVOLVE_WEIGHT = _library.define(
    f"convolve_weight(Tensor grad, Tensor x, Tensor weight, {_WINDOW}) -> Tensor", _convolve_weight, _like_weight
)
