"""Simplify: reshards that repeat, undo or contain each other, made one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardc.analysis import redistribute
from shardc.analysis.cost import CostModel
from shardc.ir import graph as ir
from shardc.ir import ops


@dataclass(frozen=True)
class Simplify:
    """Merges chains of reshards, drops those that change nothing, and derives one from another for less.

    - reshard of a reshard: from the first value at once, where nobody else uses the middle one;
    - a reshard that is cheaper from an earlier reshard of the same value (all-reduce, then a slice of it)
      starts from there;
    - dead nodes go.
    """

    cost: CostModel
    name = "simplify"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        made: dict[fx.Node, list[fx.Node]] = {}
        for node in list(gm.graph.nodes):
            if node.target is not ops.reshard:
                continue
            source = node.args[0]
            while source.target is ops.reshard and len(source.users) == 1 and not ir.layout(source).partial:
                if self._seconds(source.args[0], node) > self._seconds(source, node) + self._seconds(source.args[0], source):
                    break
                source = source.args[0]
            node.args = (source,)
            if ir.layout(source) == ir.layout(node):
                node.replace_all_uses_with(source)
                gm.graph.erase_node(node)
                continue
            earlier = min(made.get(source, ()), key=lambda other: self._seconds(other, node), default=None)
            if earlier is not None and self._seconds(earlier, node) < self._seconds(source, node):
                node.args = (earlier,)
            made.setdefault(source, []).append(node)
        gm.graph.eliminate_dead_code()
        return gm

    def _seconds(self, source: fx.Node, target: fx.Node) -> float:
        value = ir.value(target)
        src, dst = ir.layout(source), ir.layout(target)
        if dst.partial and src.partial != dst.partial:
            return float("inf")
        return redistribute.seconds(src, dst, value.itemsize, self.cost)
