"""Hoist grad epilogue: moves the last ops of each gradient (casts, its reduction) to directly after their operands, so
that unsharded gradients do not stay in memory.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

from torch import fx

from shardc.cost.compute import is_dense
from shardc.ir import graph as ir
from shardc.ir.op_traits import draws
from shardc.ir.rewriter import positions, reorder


@dataclass(frozen=True)
class HoistGradEpilogue:
    """Moves the last ops of each gradient to directly after their operands.

        %g1 = mm(...)                           %g1 = mm(...)
        %g0 = mm(...)                       ->  %r1 = reduce_scatter(%g1)
        %r1 = reduce_scatter(%g1)               %g0 = mm(...)

    Casts, pads and moves of gradients are inserted before the output, and autograd casts a parameter's gradient after
    its last use. Left there, they would keep every unsharded gradient, and its reduction, until the end of backward.

    *Requires:* a local joint graph. *Ensures:* a backward op whose uses all lead to outputs stands right after its last
    operand from backward, if a matrix product, attention or convolution stood between them; such products themselves,
    random draws and all other ops keep their order.
    """

    name = "hoist_grad_epilogue"
    requires = ("localize",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph, priority = gm.graph, positions(gm.graph)
        dense = [priority[node] for node in graph.nodes if is_dense(node)]
        for node in _last_ops(graph):
            operands = [priority[x] for x in node.all_input_nodes if _is_backward(x)]
            if operands and bisect(dense, max(operands)) < bisect(dense, priority[node]):
                priority[node] = max(operands) + 1e-4
        reorder(graph, priority)
        return gm


def _last_ops(graph: fx.Graph) -> list[fx.Node]:
    """Returns the backward ops whose results only lead to outputs through other such ops, in order. Dense kernels and
    random draws are left out.
    """
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
    """Returns whether ``node`` is an op of backward."""
    return node.op == "call_function" and ir.info(node).origin.phase == "backward"
