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
from shardc.passes.op_calls import only_to_output


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
        graph, priority = gm.graph, positions(gm.graph)  # ``priority``: node -> its place, which is lowered here
        dense = [priority[node] for node in graph.nodes if is_dense(node)]  # of matrix products and the like; sorted
        last_ops = only_to_output(graph, _may_be_last)
        for node in filter(last_ops.__contains__, graph.nodes):
            operands = [priority[x] for x in node.all_input_nodes if _is_backward(x)]
            # A dense op stands between the last operand and the node. Only then it moves: other ops keep their order.
            if operands and bisect(dense, max(operands)) < bisect(dense, priority[node]):
                priority[node] = max(operands) + 1e-4  # behind the operand, before the op that follows it
        reorder(graph, priority)
        return gm


def _may_be_last(node: fx.Node) -> bool:
    """Returns whether ``node`` is a backward op that may finish a gradient: no dense kernel and no random draw."""
    return _is_backward(node) and not is_dense(node) and not draws(node.target)


def _is_backward(node: fx.Node) -> bool:
    """Returns whether ``node`` is an op of backward."""
    return node.op == "call_function" and ir.info(node).origin.phase == "backward"
