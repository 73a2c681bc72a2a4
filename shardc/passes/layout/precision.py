"""Precision: reduces gradients in the dtype that the plan sets for reductions."""

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
# The cause of a cast before a reduction. A cast to a smaller dtype rounds each rank's term, as the plan asks for.
REDUCED_IN = "the dtype that gradients are reduced in"


@dataclass(frozen=True)
class Precision:
    """Casts each parameter's gradient to its reduce dtype, reduces it, and casts it to the dtype that it is stored in.

        %g: bf16 (partial sum)              %c: f32 (partial sum) = _to_copy(%g)
        return %g                       ->  %r: f32 = reshard(%c)
                                            return _to_copy(%r)

    The order is fixed: cast, reduce (over the shard axes, then the replicate axes), cast. Scaling comes before all of
    these, on the tangents; see `Objective`.

    *Requires:* a graph with layouts. *Ensures:* a gradient's partial sum is not reduced before the first cast.

    Args:
        layouts: parameter -> its storage layout.
        reduced: parameter -> the dtype in which its gradient is reduced.
        stored: parameter -> the dtype of its gradient after the reduction.
        deferred: parameters whose gradients are reduced later, or over some axes later: these are not cast back.
    """

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    reduced: Mapping[str, torch.dtype] = field(default_factory=dict)
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)
    deferred: Deferred = NOTHING
    name = "precision"
    requires = ("propagate",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        rewriter, output = GraphRewriter(gm.graph), ir.output_node(gm.graph)
        before = list(ir.outputs(gm.graph))

        def reduced(role: ir.Role, node: fx.Node) -> fx.Node:
            """Returns the output ``node``, reduced if it is the gradient of a parameter with a dtype for it."""
            has_dtype = role.kind == "grad" and role.name in self.stored
            return self._reduced(rewriter, output, node, role.name) if has_dtype else node

        ir.change_outputs(gm.graph, reduced)
        for _, node in before:
            if isinstance(node, fx.Node) and not node.users:  # a cast that was replaced
                gm.graph.erase_node(node)
        return gm

    def _reduced(self, rewriter: GraphRewriter, output: fx.Node, grad: fx.Node, name: str) -> fx.Node:
        """Casts the gradient of parameter ``name`` to the dtype for reductions, reduces it and, unless its reduction is
        deferred, casts it to the dtype in which it is stored; returns the result.
        """
        # If a gradient is computed in another dtype than the parameter's, its last op is autograd's cast.
        computed = node = grad.args[0] if grad.target is _CAST else grad
        stored, dtype, reduce = self.stored[name], ir.value(node).dtype, self.reduced[name]
        if node is grad and stored == dtype == reduce:
            return grad
        layout = self.layouts[name]
        # A deferred reduction leaves some axes partial.
        layout = self.deferred.layout(name, layout, ir.layout(node)) or layout
        if reduce != dtype:
            at = rewriter.before(output, like=computed, suffix="cast", cause=REDUCED_IN)
            node = at.typed(replace(ir.value(node), dtype=reduce), _CAST, node, dtype=reduce)
        if ir.layout(node) != layout:
            # As `Reshard` records it, so that reports find the plan entry that stores the parameter.
            at = rewriter.before(output, like=computed, suffix="reduced", cause="", consumer=name)
            node = at.typed(replace(ir.value(node), layout=layout), ops.reshard, node)
        if reduce == stored or name in self.deferred.names:
            return node
        at = rewriter.before(output, like=computed, suffix="stored")
        return at.typed(replace(ir.value(node), dtype=stored), _CAST, node, dtype=stored)
