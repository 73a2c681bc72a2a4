"""Settle: what only makes a gradient stands right behind what it is made of."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

from torch import fx

from shardc.cost.fused_kernels import is_dense
from shardc.ir import graph as ir
from shardc.ir.op_traits import draws
from shardc.ir.order import places, reorder


@dataclass(frozen=True)
class Settle:
    """Moves the last ops of each gradient to directly after their operands.

    Casts, pads and moves of gradients are inserted in front of the output, and autograd casts a parameter's gradient
    when all uses are through. Left there, they would keep every whole gradient until the end of backward, and its
    reduction with it.

    Takes: a local joint graph. Guarantees: an op of backward whose every use leads to an output, and that is no matrix
    product, attention or convolution, stands behind the last of its operands that backward makes if one of these stood
    between; all else keeps its order.
    """

    name = "settle"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph, priority = gm.graph, places(gm.graph)
        dense = [priority[node] for node in graph.nodes if is_dense(node)]
        for node in _last_ops(graph):
            operands = [priority[x] for x in node.all_input_nodes if _is_backward(x)]
            if operands and bisect(dense, max(operands)) < bisect(dense, priority[node]):
                priority[node] = max(operands) + 1e-4
        reorder(graph, priority)
        return gm


def _last_ops(graph: fx.Graph) -> list[fx.Node]:
    """The ops of backward that only outputs need, in order, but for those that take long or draw random numbers."""
    last_ops: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not _is_backward(node) or not node.users or is_dense(node):
            continue
        if draws(node.target):
            continue
        if all(user.op == "output" or user in last_ops for user in node.users):
            last_ops.add(node)
    return [node for node in graph.nodes if node in last_ops]


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and ir.info(node).origin.phase == "backward"
