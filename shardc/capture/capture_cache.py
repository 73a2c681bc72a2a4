"""`CaptureOnce`: a cache of captures, so that several plans and meshes share one."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from shardc._compat import PyTree
from shardc.capture.dtypes import Dtypes
from shardc.capture.markers import Tag
from shardc.capture.trace import Captured, Loss, capture
from shardc.ir import graph as ir
from shardc.ir.guards import Values


class CaptureOnce:
    """Callable like `capture` that caches what it captures, for one model and loss. An equal call returns a copy of the
    cached graph.

    Calls are equal if they have equal arguments up to the values of tensors, states of torch (autocast, default dtype),
    tags and dtypes, and if the attributes and globals that the capture read have equal values.

    Attributes:
        count: number of captures.
    """

    def __init__(self) -> None:
        self.count = 0
        self._cache: dict[Hashable, list[tuple[Values, Captured]]] = {}

    def __call__(
        self,
        model: nn.Module,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        *,
        device: torch.device,
        loss: Loss | None = None,
        tags: Sequence[Tag] = (),
        dtypes: Dtypes,
        lengths: Collection[int] = (),
    ) -> Captured:
        """Return the captured model. After an equal call it comes from the cache; arguments are those of `capture`."""
        leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
        tensors = (*model.named_parameters(), *model.named_buffers())
        inputs = [_metadata(x) if isinstance(x, Tensor) else repr(x) for x in leaves]
        modes = tuple(module.training for module in model.modules())
        key = (
            tuple((name, *_metadata(x)) for name, x in tensors), modes, tuple(inputs), str(spec), device, loss is None,
            tuple(tags), dtypes, frozenset(lengths),
        )  # fmt: skip
        # Several captures may have this key: which attributes and globals a capture reads is known only after it, so
        # their values are compared here.
        for values, cached in self._cache.get(key, ()):
            if cached.reads.values(model, loss) == values:
                return replace(cached, graph=_copied(cached.graph))
        self.count += 1
        captured = capture(model, args, kwargs, device=device, loss=loss, tags=tags, dtypes=dtypes, lengths=lengths)
        copy = replace(captured, graph=_copied(captured.graph))
        self._cache.setdefault(key, []).append((captured.reads.values(model, loss), copy))
        return captured


def _metadata(x: Tensor) -> tuple[object, ...]:
    """Return what a capture depends on of the tensor ``x``: its shape, stride, dtype and ``requires_grad``."""
    return x.shape, x.stride(), x.dtype, x.requires_grad


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``gm``. Its nodes have meta dicts of their own, which share the fake values."""
    return fx.GraphModule(gm, ir.copied(gm.graph))
