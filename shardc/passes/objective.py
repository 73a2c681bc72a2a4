"""Objective: what the gradients that come in from outside mean for the global objective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.graph import NameScope


@dataclass(frozen=True)
class Objective:
    """Scales every tangent, so that the objective is the mean (or sum) of the ranks' losses.

    A tangent of an output that is split over the batch axes is the gradient of this rank's own loss alone;
    one of an output that is whole over an axis is already averaged over it by its layout (``propagate``).

    Args:
        batch_axes: the axes over which ranks' losses are averaged.
        reduce: "mean" or "sum".
        grad_scale: a further factor.
    """

    batch_axes: tuple[str, ...]
    reduce: str = "mean"
    grad_scale: float = 1.0
    name = "objective"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        names = NameScope.of(gm.graph)
        first = next(n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr"))
        for tangent in ir.placeholders(gm.graph, "tangent"):
            layout = ir.layout(tangent)
            over = [a for a in layout.bound if a in self.batch_axes] if self.reduce == "mean" else []
            scale = self.grad_scale / prod(layout.mesh.size(a) for a in over)
            if scale == 1.0 or not tangent.users:
                continue
            users = list(tangent.users)
            with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n in tangent.users) or first):
                node = gm.graph.call_function(torch.ops.aten.mul.Tensor, (tangent, scale))
            record = ir.info(tangent)
            cause = f"reduce={self.reduce!r}, grad_scale={self.grad_scale}"
            ir.set_info(node, replace(record, name=names.fresh(f"{record.name}.scaled"), role=None,
                                      origin=replace(record.origin, cause=cause), needs=(layout,)))  # fmt: skip
            for user in users:
                user.replace_input_with(tangent, node)
        return gm
