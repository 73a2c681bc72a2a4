"""Operations of dense ops by the shapes of their arguments: the one count that layouts and predictions go by.

Dense are matrix products, attention, convolution and recurrent layers. They count as in torch, whose counter does not
know all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Size
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardc.ir import attention, experts, recurrent
from shardc.ir.bodies import body_of

aten = torch.ops.aten


def _steps(gates: Size, weight: Size) -> int:
    """Of the product of each step of a recurrent layer, forward or backward; ``gates`` is [time, rows, gates]."""
    return 2 * prod(gates[:2]) * prod(weight)


# What torch's counter knows nothing of.
_OTHERS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda q, k, v, *_: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda grad, q, k, v, *_: (
        sdpa_backward_flop_count(grad, q, k, v)
    ),
    recurrent.STEPS: lambda gates, state, weight, *_: _steps(gates, weight),
    recurrent.STEPS_BACKWARD: lambda grad, state, weight, *_: _steps(grad, weight),
    experts.CALL: lambda x, index, weight, params, body, *_: prod(index) * body_of(body).flops[0],
    experts.GRADIENT: lambda grad, x, index, weight, params, body, *_: prod(index) * body_of(body).flops[1],
    experts.RUN: lambda x, take, scale, ends, params, expected, body: expected * body_of(body).flops[0],
    experts.RUN_GRADIENT: lambda grad, x, take, scale, ends, params, saved, expected, body: (
        expected * body_of(body).flops[1]
    ),
    attention.CALL: lambda q, k, v, *_: sdpa_flop_count(q, k, v),
    attention.GRADIENT: lambda grad, q, k, v, *_: sdpa_backward_flop_count(grad, q, k, v),
    aten._int_mm.default: lambda a, b: 2 * prod(a) * b[1],
}


def is_dense(target: Any) -> bool:
    """Whether an op is a matrix product, an attention, a convolution or a recurrent layer."""
    return target in _OTHERS or getattr(target, "overloadpacket", None) in flop_registry


@lru_cache(maxsize=4096)
def is_attention(target: Any) -> bool:
    """Whether a dense op is an attention, which reaches another share of the peak."""
    return is_dense(target) and "attention" in str(target)


@lru_cache(maxsize=4096)
def flops(target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], made: Any) -> int:
    """Operations of a dense op.

    Args:
        args, kwargs: the call's, with shapes in the place of tensors.
        made: the shape of its result, or those of its results.
    """
    if target in _OTHERS:
        return int(_OTHERS[target](*args))
    return int(flop_registry[target.overloadpacket](*args, **dict(kwargs), out_val=made))
