"""Precision: gradients are reduced in the dtype that the plan says, whatever they are computed and stored in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.graph import Info, NameScope
from shardc.ir.layout import Layout

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
    kept: Mapping[str, torch.dtype] = field(default_factory=dict)
    deferred: Deferred = NOTHING
    name = "precision"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph, names = gm.graph, NameScope.of(gm.graph)
        output = ir.output_node(graph)
        before = list(ir.outputs(graph))

        def reduced(role: ir.Role, node: fx.Node) -> fx.Node:
            asked = role.kind == "grad" and role.name in self.kept
            return self._reduced(graph, output, node, role.name, names) if asked else node

        ir.change_outputs(graph, reduced)
        for _, node in before:
            if isinstance(node, fx.Node) and not node.users:  # a cast that another took the place of
                graph.erase_node(node)
        return gm

    def _reduced(self, graph: fx.Graph, before: fx.Node, grad: fx.Node, name: str, names: NameScope) -> fx.Node:
        # What was computed in another dtype than the parameter's ends in a cast to it.
        node = grad.args[0] if grad.target is torch.ops.aten._to_copy.default else grad
        kept, computed, reduce = self.kept[name], ir.value(node).dtype, self.reduced[name]
        if node is grad and kept == computed == reduce:
            return grad
        stem, layout = ir.info(node).name, self.layouts[name]
        layout = self.deferred.layout(name, layout, ir.layout(node)) or layout
        origin = ir.info(node).origin
        if reduce != computed:
            node = _cast(graph, before, node, reduce, names.fresh(f"{stem}.cast"), REDUCED_IN)
        if ir.layout(node) != layout:
            record = replace(ir.info(node), name=names.fresh(f"{stem}.reduced"), origin=origin, needs=None).at(layout)
            with graph.inserting_before(before):
                node = ir.set_info(graph.call_function(ops.reshard, (node,)), record)
        if reduce == kept or name in self.deferred.names:
            return node
        return _cast(graph, before, node, kept, names.fresh(f"{stem}.stored"))


def _cast(
    graph: fx.Graph, before: fx.Node, x: fx.Node, dtype: torch.dtype, name: str, cause: str | None = None
) -> fx.Node:
    origin = ir.info(x).origin if cause is None else replace(ir.info(x).origin, cause=cause)
    made = Info(name, replace(ir.value(x), dtype=dtype), origin, needs=(ir.layout(x),))
    with graph.inserting_before(before):
        return ir.set_info(graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": dtype}), made)
