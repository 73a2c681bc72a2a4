"""One capture for several plans and meshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from shardc.capture.tags import Tag
from shardc.capture.trace import Captured, Dtypes, Loss, capture
from shardc.ir import graph as ir


class CaptureOnce:
    """Called as `capture`; what was captured before alike is copied instead of being captured again.

    For one model and loss: of these it looks at names, shapes and dtypes alone. A plan that names activations, or
    traces in another precision, is captured by itself.

    Attributes:
        count: how often a model was captured.
    """

    def __init__(self) -> None:
        self.count = 0
        self._known: dict[Any, Captured] = {}

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
        """As `capture`."""
        leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
        held = (*model.named_parameters(), *model.named_buffers())
        inputs = [_described(x) if isinstance(x, Tensor) else repr(x) for x in leaves]
        modes = tuple(module.training for module in model.modules())
        key = (
            tuple((name, *_described(x)) for name, x in held), modes, tuple(inputs), str(spec), device, loss is None,
            tuple(tags), dtypes,
        )  # fmt: skip
        if key not in self._known:
            self.count += 1
            made = capture(model, args, kwargs, device=device, loss=loss, tags=tags, dtypes=dtypes)
            self._known[key] = replace(made, graph=_copy(made.graph))
            return made
        known = self._known[key]
        return replace(known, graph=_copy(known.graph))


def _described(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.requires_grad


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes have meta of their own; example values are shared."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    output = graph.output(graph.graph_copy(gm.graph, env))
    output.meta = dict(ir.output_node(gm.graph).meta)
    for node, twin in env.items():
        twin.meta = dict(node.meta)
    return fx.GraphModule(gm, graph)
