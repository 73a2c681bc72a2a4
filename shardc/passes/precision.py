"""Precision: gradients are reduced in the dtype that the plan says, whatever they are computed and stored in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.layout import Layout
from shardc.ir.rewriter import GraphRewriter

_CAST = torch.ops.aten._to_copy.default
# The cause of a cast in front of a reduction. To a smaller dtype it rounds each rank's term, which is asked for.
REDUCED_IN = "the dtype that gradients are reduced in"


@dataclass(frozen=True)
class Precision:
    """Casts each parameter's gradient to what it is reduced in, reduces it, and casts it to what it is kept in.

    The order is fixed: cast, reduce (over the shard axes, then the replicate axes), cast. What scales a gradient
    stands before all of it, in the gradient of the output; see `Objective`.

    Takes: a graph with layouts. Guarantees: a pending sum of a gradient stays pending up to the cast.

    Args:
        layouts: storage layout of each parameter, by name.
        reduced: the dtype in which each parameter's gradient is reduced.
        kept: the dtype in which it is kept.
        deferred: parameters whose gradients are reduced later, or over some axes later: these are not cast back.
    """

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    reduced: Mapping[str, torch.dtype] = field(default_factory=dict)
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)
    deferred: Deferred = NOTHING
    name = "precision"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        rewriter, output = GraphRewriter(gm.graph), ir.output_node(gm.graph)
        before = list(ir.outputs(gm.graph))

        def reduced(role: ir.Role, node: fx.Node) -> fx.Node:
            has_dtype = role.kind == "grad" and role.name in self.stored
            return self._reduced(rewriter, output, node, role.name) if has_dtype else node

        ir.change_outputs(gm.graph, reduced)
        for _, node in before:
            if isinstance(node, fx.Node) and not node.users:  # a cast that another took the place of
                gm.graph.erase_node(node)
        return gm

    def _reduced(self, rewriter: GraphRewriter, output: fx.Node, grad: fx.Node, name: str) -> fx.Node:
        # What was computed in another dtype than the parameter's ends in a cast to it.
        computed = node = grad.args[0] if grad.target is _CAST else grad
        stored, dtype, reduce = self.stored[name], ir.value(node).dtype, self.reduced[name]
        if node is grad and stored == dtype == reduce:
            return grad
        layout = self.layouts[name]
        layout = self.deferred.layout(name, layout, ir.layout(node)) or layout
        if reduce != dtype:
            at = rewriter.before(output, like=computed, suffix="cast", cause=REDUCED_IN)
            node = at.typed(replace(ir.value(node), dtype=reduce), _CAST, node, dtype=reduce)
        if ir.layout(node) != layout:
            at = rewriter.before(output, like=computed, suffix="reduced")
            node = at.typed(replace(ir.value(node), layout=layout), ops.reshard, node)
        if reduce == stored or name in self.deferred.names:
            return node
        at = rewriter.before(output, like=computed, suffix="stored")
        return at.typed(replace(ir.value(node), dtype=stored), _CAST, node, dtype=stored)
