"""Caches captures, so that several plans and meshes share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from shardc.capture.dtypes import Dtypes
from shardc.capture.tags import Tag
from shardc.capture.trace import Captured, Loss, capture
from shardc.ir import graph as ir
from shardc.ir.reads import Values


class CaptureOnce:
    """Callable like `capture` that caches captures of one model and loss; an equal call returns a copy.

    Calls are equal if torch's state (autocast, default dtype), the plan's tags and dtypes, and the values that the
    capture read of the model, those of tensors excepted, are.

    Attributes:
        count: how often a model was captured.
    """

    def __init__(self) -> None:
        self.count = 0
        self._cache: dict[Any, list[tuple[Values, Captured]]] = {}

    def __call__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        device: torch.device,
        loss: Loss | None = None,
        tags: Sequence[Tag] = (),
        dtypes: Dtypes,
    ) -> Captured:
        """Return the capture; arguments are those of `capture`."""
        leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
        tensors = (*model.named_parameters(), *model.named_buffers())
        inputs = [_described(x) if isinstance(x, Tensor) else repr(x) for x in leaves]
        modes = tuple(module.training for module in model.modules())
        key = (
            tuple((name, *_described(x)) for name, x in tensors), modes, tuple(inputs), str(spec), device, loss is None,
            tuple(tags), dtypes,
        )  # fmt: skip
        for values, cached in self._cache.get(key, ()):
            if cached.reads.values(model, loss) == values:
                return replace(cached, graph=_copied(cached.graph))
        self.count += 1
        captured = capture(model, args, kwargs, device=device, loss=loss, tags=tags, dtypes=dtypes)
        copy = replace(captured, graph=_copied(captured.graph))
        self._cache.setdefault(key, []).append((captured.reads.values(model, loss), copy))
        return captured


def _described(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.requires_grad


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose nodes have their own meta dicts; example values are shared."""
    return fx.GraphModule(gm, ir.copied(gm.graph))
