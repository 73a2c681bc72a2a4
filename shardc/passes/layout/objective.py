"""Objective: scales the gradients that enter a program (tangents) and the gradients of inputs that leave it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.layout import Layout
from shardc.ir.rewriter import GraphRewriter


@dataclass(frozen=True)
class Objective:
    """Scales the gradients that enter a program, so that it differentiates the mean (or sum) of the ranks' losses;
    scales the gradients of inputs back.

        %t = tangent                        %t = tangent
        %g = mm(%t, %w)                 ->  %t.scaled = mul(%t, 0.5)          (mean over 2 ranks)
                                            %g = mm(%t.scaled, %w)

    The tangent of an output that is split over the batch axes is the gradient of this rank's own loss. The tangent of
    an output that is replicated over an axis is averaged (or summed) over it already, by its layout (`Propagate`). An
    input's gradient leaves in the unit in which tangents enter, so that it can be the tangent of another module. For a
    split input this is the gradient of this rank's own loss; for a replicated input, a value whose mean (or sum) over
    the ranks is the gradient. If no output is split over an axis, the ranks share one loss, and nothing is scaled.

    *Requires:* tangents have layouts. *Ensures:* each value keeps its layout.

    Args:
        batch_axes: axes over which the ranks' losses are averaged or summed.
        reduce: "mean" or "sum".
        grad_scale: a further factor on parameters' gradients.
        own_losses: True if tangents are of each rank's own loss, False if of one global loss.
    """

    batch_axes: tuple[str, ...]
    reduce: str = "mean"
    grad_scale: float = 1.0
    own_losses: bool = True
    name = "objective"
    requires = ("propagate",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        rewriter, graph = GraphRewriter(gm.graph), gm.graph
        tangents = ir.placeholders(graph, "tangent")
        # Along an axis that splits an output, each tangent is split or partial, and ranks have different losses.
        # Along other axes they share one loss.
        axes = {axis for node in tangents for axis in (*ir.layout(node).bound, *dict(ir.layout(node).partial))}
        loss_axes = [axis for axis in self.batch_axes if axis in axes and self.own_losses]
        for tangent in tangents:
            layout = ir.layout(tangent)
            # A tangent is the gradient of this rank's own loss, which is one of so many terms of the mean.
            over = [axis for axis in loss_axes if axis in layout.bound] if self.reduce == "mean" else []
            scale = self.grad_scale / _size(layout, over)
            if scale == 1.0 or not tangent.users:
                continue
            first_use = next(node for node in graph.nodes if node in tangent.users)
            rewriter.redirect(tangent, self._scaled(rewriter, first_use, tangent, scale))
        output = ir.output_node(graph)
        input_layouts = {
            ir.role(node).name: ir.layout(node) for node in ir.placeholders(graph, "input") if ir.is_tensor(node)
        }

        def scaled_back(role: ir.Role, node: fx.Node) -> fx.Node:
            """Returns the output ``node``. If it is the gradient of an input, it is scaled so that it is a gradient of
            this rank's own loss, not of the objective.
            """
            if role.kind != "grad" or role.name not in input_layouts:
                return node
            scale = unit(input_layouts[role.name], loss_axes, self.reduce) / self.grad_scale
            return node if scale == 1.0 else self._scaled(rewriter, output, node, scale)

        ir.change_outputs(graph, scaled_back)
        return gm

    def _scaled(self, rewriter: GraphRewriter, before: fx.Node, node: fx.Node, scale: float) -> fx.Node:
        """Inserts ``node * scale`` before node ``before``; returns it."""
        cause = f"reduce={self.reduce!r}, grad_scale={self.grad_scale}"
        at = rewriter.before(before, like=node, suffix="scaled", cause=cause)
        return at.typed(ir.value(node), torch.ops.aten.mul.Tensor, node, scale)


def unit(layout: Layout, losses: Collection[str], reduce: str) -> float:
    """Returns the factor that turns an input's gradient of the objective into a gradient of this rank's own loss;
    ``losses``: the axes along which ranks have different losses.
    """
    # Mean: tangents were divided by the number of ranks, which is undone for a split input. Sum: the gradient of a
    # replicated input is divided, so that its sum over the ranks is the gradient.
    size = _size(layout, [axis for axis in losses if (axis in layout.bound) == (reduce == "mean")])
    return size if reduce == "mean" else 1 / size


def unit_of(
    plan_axes: Collection[str], reduce: str, own_losses: bool, outputs: Iterable[ir.Role], layout: Layout
) -> float:
    """Returns the factor by which the gradient of an input with ``layout`` is scaled when it leaves the program (see
    `unit`). ``plan_axes``: batch axes of the plan; ``outputs``: roles of the program's outputs; ``reduce`` and
    ``own_losses`` as in `Objective`.
    """
    # Along an axis that splits no output, ranks share one loss, as in `Objective`.
    bound = {axis for role in outputs if role.kind == "output" and role.layout for axis in role.layout.bound}
    return unit(layout, [axis for axis in plan_axes if axis in bound and own_losses], reduce)


def _size(layout: Layout, axes: Collection[str]) -> int:
    """Returns the number of ranks along ``axes`` together."""
    return prod(layout.mesh.size(axis) for axis in axes)
