"""Operations of matrix products, attention and convolution, as torch counts them, by the shapes of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
# Attention on a CPU, of which torch's counter knows nothing: (formula of shapes, how many leading operands it takes).
_CPU_ATTENTION: dict[Any, tuple[Callable[..., int], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (sdpa_flop_count, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (sdpa_backward_flop_count, 4),
}


def is_dense(target: Any) -> bool:
    """Whether an op is a matrix product, an attention or a convolution."""
    return target in _CPU_ATTENTION or getattr(target, "overloadpacket", None) in flop_registry


@lru_cache(maxsize=4096)
def flops(target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], made: Any) -> int:
    """Operations of a dense op.

    Args:
        args, kwargs: the call's, with shapes in the place of tensors.
        made: the shape of its result, or those of its results.
    """
    if target in _CPU_ATTENTION:
        count, operands = _CPU_ATTENTION[target]
        return int(count(*args[:operands]))
    return int(flop_registry[target.overloadpacket](*args, **dict(kwargs), out_val=made))
