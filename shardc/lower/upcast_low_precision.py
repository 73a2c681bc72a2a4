"""Computes 16-bit matrix products, convolutions and attention in float32 on CPUs without units for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardc.custom_ops import attention_ops

aten = torch.ops.aten
_FORWARD_ATTENTION = (aten._scaled_dot_product_flash_attention_for_cpu.default, attention_ops.CALL)
_DENSE = (
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten.convolution_backward.default, *_FORWARD_ATTENTION,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default, attention_ops.GRADIENT,
)  # fmt: skip


def widened(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions ``table`` with float32 versions of 16-bit products, convolutions and attention.

    On a CPU without 16-bit units torch takes 3 to 50 times as long for them, by layout. The sums have the same terms.
    """
    casts: dict[int, tuple[Tensor, Tensor]] = {}  # casts, by the tensor's identity; the tensor is held with it

    def wide(x: Any) -> Any:
        if not _is_slow(x):
            return x
        if id(x) not in casts:
            casts[id(x)] = x, x.to(torch.float32)
        return casts[id(x)][1]

    def decomposition(op: Any) -> Callable[..., Any]:
        # The others of a forward's results, as the log-sum-exp, have float32 and counters.
        narrowed = 1 if op in _FORWARD_ATTENTION else None

        def decomposed(*args: Any, **kwargs: Any) -> Any:
            low = next((x for x in pytree.arg_tree_leaves(*args, **kwargs) if _is_slow(x)), None)
            if low is None:
                return table[op](*args, **kwargs) if op in table else NotImplemented
            result = op(*pytree.tree_map(wide, args), **pytree.tree_map(wide, kwargs))
            if isinstance(result, Tensor):
                return result.to(low.dtype)
            back = [x.to(low.dtype) if isinstance(x, Tensor) else x for x in result[:narrowed]]
            return (*back, *result[len(back) :])

        return decomposed

    return {**table, **{op: decomposition(op) for op in _DENSE}}


def _is_slow(x: Any) -> bool:
    """Return whether ``x`` has a dtype for which this CPU has no fast matrix products."""
    return isinstance(x, Tensor) and x.device.type == "cpu" and x.dtype in slow_dtypes()


@cache
def slow_dtypes() -> frozenset[torch.dtype]:
    """Return the 16-bit dtypes that torch's CPU library does not compute in on this machine."""
    mkldnn = torch.ops.mkldnn
    has = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return frozenset(dtype for dtype, asked in has.items() if not (hasattr(mkldnn, asked) and getattr(mkldnn, asked)()))
