"""Objective: what the gradients that come in from outside mean for the global objective, and those that go out."""

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
    """Scales tangents, so that the objective is the mean (or sum) of the ranks' losses; scales inputs' gradients back.

    A tangent of an output that is split over the batch axes is the gradient of this rank's own loss alone;
    one of an output that is whole over an axis is already averaged (or summed) over it by its layout (``propagate``).
    The gradient of an input is handed out in the unit in which tangents come in, so that it can be the tangent of
    another module: of an input that is split, of this rank's own loss; of one that is whole, what the mean (or sum)
    over the ranks of what each is handed is the gradient. Where no output is split over an axis, the ranks' losses are
    one, and nothing is scaled.

    Args:
        batch_axes: the axes over which ranks' losses are averaged.
        reduce: "mean" or "sum".
        grad_scale: a further factor, on parameters' gradients.
        own: whether tangents are of each rank's own loss; else, of one global loss.
    """

    batch_axes: tuple[str, ...]
    reduce: str = "mean"
    grad_scale: float = 1.0
    own_losses: bool = True
    name = "objective"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        rewriter, graph = GraphRewriter(gm.graph), gm.graph
        tangents = ir.placeholders(graph, "tangent")
        axes = {axis for node in tangents for axis in (*ir.layout(node).bound, *dict(ir.layout(node).partial))}
        losses = [axis for axis in self.batch_axes if axis in axes and self.own_losses]
        for tangent in tangents:
            layout = ir.layout(tangent)
            over = [axis for axis in losses if axis in layout.bound] if self.reduce == "mean" else []
            scale = self.grad_scale / _size(layout, over)
            if scale == 1.0 or not tangent.users:
                continue
            users = list(tangent.users)
            scaled = self._scaled(rewriter, next(n for n in graph.nodes if n in tangent.users), tangent, scale)
            for user in users:
                user.replace_input_with(tangent, scaled)
        output = ir.output_node(graph)
        input_layouts = {
            ir.role(node).name: ir.layout(node) for node in ir.placeholders(graph, "input") if ir.is_tensor(node)
        }

        def scaled_back(role: ir.Role, node: fx.Node) -> fx.Node:
            if role.kind != "grad" or role.name not in input_layouts:
                return node
            scale = unit(input_layouts[role.name], losses, self.reduce) / self.grad_scale
            return node if scale == 1.0 else self._scaled(rewriter, output, node, scale)

        ir.change_outputs(graph, scaled_back)
        return gm

    def _scaled(self, rewriter: GraphRewriter, before: fx.Node, node: fx.Node, scale: float) -> fx.Node:
        cause = f"reduce={self.reduce!r}, grad_scale={self.grad_scale}"
        at = rewriter.before(before, like=node, suffix="scaled", cause=cause)
        return at.typed(ir.value(node), torch.ops.aten.mul.Tensor, node, scale)


def unit(layout: Layout, losses: Collection[str], reduce: str) -> float:
    """What the gradient of an input is multiplied by, which is the objective's, to be this rank's own.

    Args:
        layout: of the input.
        losses: the axes along which each rank has a loss of its own.
    """
    size = _size(layout, [axis for axis in losses if (axis in layout.bound) == (reduce == "mean")])
    return size if reduce == "mean" else 1 / size


def unit_of(
    plan_axes: Collection[str], reduce: str, own_losses: bool, outputs: Iterable[ir.Role], layout: Layout
) -> float:
    """As `unit`, of a program with these ``outputs``."""
    bound = {axis for role in outputs if role.kind == "output" and role.layout for axis in role.layout.bound}
    return unit(layout, [axis for axis in plan_axes if axis in bound and own_losses], reduce)


def _size(layout: Layout, axes: Collection[str]) -> int:
    return prod(layout.mesh.size(axis) for axis in axes)
