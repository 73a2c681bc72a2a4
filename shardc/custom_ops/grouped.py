"""Rewrites the function of one expert so that it computes the rows of all experts at once, sorted by expert, by grouped
matrix products.

A function of products with the expert's weights and of row-wise ops becomes a few kernels for all experts, whatever the
routing, without a synchronization of host and device.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc import _compat

aten = torch.ops.aten
_ROWS, _TRANSPOSED, _EXPERTS, _SHARED = "rows", "transposed", "experts", "shared"
_SAME = {aten.detach.default, aten._to_copy.default, aten.clone.default}
_AT = {  # position of the argument ``dim`` of row-wise ops
    aten.slice.Tensor: 1, aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.cat.default: 1,
    aten.unsqueeze.default: 1,
}  # fmt: skip


def suits(x: Tensor, params: list[Tensor]) -> bool:
    """Return whether grouped kernels support these tensors: on a GPU, in bf16, with sizes of parameters in steps of 16
    bytes.
    """
    even = all(size % 8 == 0 for param in params for size in param.shape[1:])
    return x.is_cuda and even and {x.dtype, *(param.dtype for param in params)} == {torch.bfloat16}


def grouped(graph: fx.Graph, experts_from: int) -> Callable[..., Any] | None:
    """Rewrite ``graph``, of a `Body` (the function of one expert), to compute the rows of all experts at once. Return
    it as a function, or None if that is not possible.

    Args:
        experts_from: index of the first result with a dim of experts; earlier results have one of rows.

    Returns:
        A function of the ends of each expert's rows (int32 [e]) and the arguments of ``graph``; weights and their
        gradients have experts as dim 0.
    """
    out = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    kinds: dict[fx.Node, str] = {}
    ends = out.placeholder("ends")
    for node in graph.nodes:
        if node.op == "output":
            results = node.args[0]
            expected = [_ROWS if at < experts_from else _EXPERTS for at in range(len(results))]
            if any(x is not None and kinds[x] != kind for x, kind in zip(results, expected, strict=True)):
                return None
            out.output(fx.map_arg(results, lambda x: env[x]))
        elif node.op == "placeholder":
            env[node] = out.placeholder(node.name)
            kinds[node] = _SHARED if node.name == "n" else _EXPERTS if node.name[1:].isdigit() else _ROWS
        elif (kind := _kind(node, kinds)) is None:
            return None
        else:
            kinds[node] = kind
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: env[x])
            if node.target is aten.mm.default:
                env[node] = out.call_function(_compat.grouped_mm, (*args, ends))
            elif node.target is aten.t.default and kind == _EXPERTS:
                env[node] = out.call_function(aten.transpose.int, (*args, 1, 2))
            else:
                env[node] = out.call_function(node.target, args, kwargs)
    forward: Callable[..., Any] = fx.GraphModule({}, out).forward
    return forward


def _kind(node: fx.Node, kinds: dict[fx.Node, str]) -> str | None:
    """Return what dim 0 of the result of ``node`` is, given what dim 0 of each operand is (``kinds``): "rows",
    "experts" or "shared" (neither). For "transposed", the rows are dim 1.

    None if the op mixes rows and is no product that a grouped one can replace.
    """
    operands = [kinds[x] for x in node.all_input_nodes]
    if node.target is aten.mm.default:
        return {(_ROWS, _EXPERTS): _ROWS, (_TRANSPOSED, _ROWS): _EXPERTS}.get((operands[0], operands[-1]))
    if node.target is aten.t.default:
        return {_ROWS: _TRANSPOSED, _TRANSPOSED: _ROWS, _EXPERTS: _EXPERTS}.get(operands[0])
    if node.target in _SAME:
        return operands[0]
    if not set(operands) <= {_ROWS, _SHARED}:
        return None
    if node.target in _AT:
        dim = node.args[_AT[node.target]] if len(node.args) > _AT[node.target] else 0
        alone = dim != 0
    elif node.target in (aten.view.default, aten.reshape.default):
        sizes = node.args[1]
        alone = len(sizes) > 1 and isinstance(sizes[0], fx.Node)
    elif node.target is aten.sum.dim_IntList:
        alone = list(node.args[1:]) in ([[1], True], [[-1], True])
    else:
        alone = node.target is getitem or _ROWS not in operands or torch.Tag.pointwise in node.target.tags
    return (_ROWS if _ROWS in operands else _SHARED) if alone else None
