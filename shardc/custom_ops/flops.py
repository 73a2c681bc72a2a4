"""Counts the floating-point operations (FLOPs) of dense ops from the shapes of their arguments. The choice of layouts
and the prediction of step times use these counts.

Dense ops are matrix products, attention, convolution and recurrent layers. Counts are those of torch's counter, which
does not know all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Size, fx
from torch.utils.flop_counter import flop_registry

from shardc._compat import OpOverload, pytree
from shardc.custom_ops import (
    attention_ops,
    expert_ops,
    flex_ops,
    float8_ops,
    function_ops,
    recurrent_ops,
    window_ops,
)
from shardc.custom_ops.expert_functions import body_of

aten = torch.ops.aten


def _steps(gates: Size, weight: Size) -> int:
    """Return the FLOPs of a recurrent layer's products over all time steps, in forward or in backward. ``gates`` is
    [time, batch, gates].
    """
    return 2 * prod(gates[:2]) * prod(weight)


def _attention(q: Size, k: Size, v: Size, *_: object) -> int:
    """Return the FLOPs of attention: those of the scores and of the weighted sums. ``k`` and ``v`` may have fewer heads
    than ``q``.
    """
    return 2 * prod(q[:3]) * k[2] * (q[3] + v[3])


def _attention_gradient(grad: Size, q: Size, k: Size, v: Size, *_: object) -> int:
    """Return the FLOPs of attention's backward: those of the scores and of the gradients of weights, q, k and v."""
    return 2 * prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])


def _flex(
    q: Size, k: Size, v: Size, captured: object, body: str, scale: float, keys: int, *_: object, rows: object = None,
    **__: object,
) -> int:  # fmt: skip
    """Return the FLOPs of flex_attention: those of attention, times the share of scores that the mask function leaves
    visible.

    That share is known unless the mask depends on values. A rank's queries are taken to have that of all.
    """
    return int(_attention(q, k, v) * flex_ops.seen_share(body, q[2] if rows is None else keys, keys))


def _flex_gradient(
    grad: Size, q: Size, k: Size, v: Size, out: object, sums: object, grad_sums: object, wanted: object,
    captured: object, body: str, scale: float, keys: int, *_: object, rows: object = None, **__: object,
) -> int:  # fmt: skip
    """Return the FLOPs of the backward of flex_attention: those of attention's backward, times the share of visible
    scores.
    """
    share = flex_ops.seen_share(body, q[2] if rows is None else keys, keys)
    return int(_attention_gradient(grad, q, k, v) * share)


def _function(operands: list[Size], body: str, *_: object) -> int:
    """Return the FLOPs of an op that runs functions (``cond``, ``scan``, ``while_loop``): of all steps of a scan, but
    of a single step of a while loop.
    """
    function = function_ops.function_of(body)
    carries, sequences = function.counts
    return function.flops * (operands[carries][0] if function.kind == "scan" and sequences else 1)


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
# Ops that torch's counter does not know, or not with fewer heads of keys than of queries (torch 2.11).
_OTHERS: dict[object, Callable[..., int]] = {
    **{getattr(aten, f"_scaled_dot_product_{name}").default: _attention for name in _KERNELS},
    **{getattr(aten, f"_scaled_dot_product_{name}_backward").default: _attention_gradient for name in _KERNELS},
    recurrent_ops.STEPS: lambda gates, state, weight, *_: _steps(gates, weight),
    recurrent_ops.STEPS_BACKWARD: lambda grad, state, weight, *_: _steps(grad, weight),
    expert_ops.CALL: lambda x, index, weight, params, body, *_: prod(index) * body_of(body).flops[0],
    expert_ops.GRADIENT: lambda grad, x, index, weight, params, body, *_: prod(index) * body_of(body).flops[1],
    expert_ops.RUN: lambda x, take, scale, ends, params, expected, waits, body: expected * body_of(body).flops[0],
    expert_ops.RUN_GRADIENT: lambda grad, x, take, scale, ends, params, saved, expected, waits, body: (
        expected * body_of(body).flops[1]
    ),
    attention_ops.CALL: _attention,
    attention_ops.GRADIENT: _attention_gradient,
    flex_ops.FLEX: _flex,
    flex_ops.FLEX_GRADIENT: _flex_gradient,
    window_ops.CONVOLVE: lambda x, weight, *_: 2 * x[0] * x[2] * prod(weight),
    window_ops.CONVOLVE_WEIGHT: lambda grad, x, weight, *_: 2 * x[0] * x[2] * prod(weight),
    float8_ops.MM: lambda a, b, *_: 2 * prod(a) * b[1],
    **dict.fromkeys(function_ops.OPS.values(), _function),
    aten._int_mm.default: lambda a, b: 2 * prod(a) * b[1],
}


_FLEX = (flex_ops.FLEX, flex_ops.FLEX_GRADIENT)  # whose count depends on arguments by name


def is_dense(target: object) -> bool:
    """Return whether an op is a matrix product, an attention, a convolution or a recurrent layer."""
    return target in _OTHERS or getattr(target, "overloadpacket", None) in flop_registry


@lru_cache(maxsize=4096)
def is_attention(target: object) -> bool:
    """Return whether an op is an attention kernel. Its fraction of peak FLOP/s differs from that of a matrix
    product.
    """
    return is_dense(target) and "attention" in str(target)


@lru_cache(maxsize=4096)
def flops(
    target: OpOverload[..., object], args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...], result: object
) -> int:
    """Return the floating-point operations of a dense op.

    Args:
        args, kwargs: its arguments, with shapes in place of tensors.
        result: shape of its result, or a tuple of those of several.
    """
    if target in _OTHERS:
        return int(_OTHERS[target](*args, **(dict(kwargs) if target in _FLEX else {})))
    formula = flop_registry[target.overloadpacket]
    if not hasattr(formula, "__wrapped__"):  # it takes tensors (``get_raw=True``)
        args, kwargs, result = pytree.tree_map_only(
            Size, partial(torch.empty, device="meta"), (args, kwargs, result), is_leaf=lambda x: isinstance(x, Size)
        )
    return int(formula(*args, **dict(kwargs), out_val=result))


def function_flops(kind: str, graphs: tuple[fx.Graph, ...]) -> int:
    """Return the FLOPs of a `Function` with these ``graphs``, whose nodes have fake values: of one step or, for "cond",
    of the larger branch.
    """

    def shape(x: fx.Node) -> Any:
        val = x.meta["val"]
        return val.shape if isinstance(val, torch.Tensor) else tuple(y.shape for y in val)

    def count(node: fx.Node) -> int:
        args, kwargs = fx.map_arg((node.args, node.kwargs), shape)
        return flops(node.target, args, tuple(kwargs.items()), shape(node))

    counts = [sum(count(node) for node in graph.nodes if is_dense(node.target)) for graph in graphs]
    return max(counts) if kind == "cond" else sum(counts)
