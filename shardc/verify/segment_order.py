"""Checks that the segments of a graph, as Inductor lowers them, run its ops in the scheduled order."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

from torch import fx

from shardc.ir.graph import output_node
from shardc.ir.segments import Segment
from shardc.verify.subject import Broken, Subject


def in_order(subject: Subject, segments: Sequence[Segment]) -> Broken:
    """Check that the segments run the graph's ops in the scheduled order; a single segment passes.

    - Their ops, in order, are the ops of the half, in its order.
    - Each op has the operands that it has in the half.
    - Each segment returns the values in its ``gives``.
    """
    if len(segments) == 1:
        return  # the half itself
    end, values = subject.nodes[-1], {node.name: _value(node) for node in subject.nodes}
    scheduled = (node for node in subject.calls if node.target is not getitem)
    for segment in segments:
        operand_names = iter(segment.takes)
        computed: dict[fx.Node, Any] = {}
        for x in segment.gm.graph.nodes:
            if x.op == "placeholder":
                computed[x] = values.get(next(operand_names))
            elif x.target is getitem:
                computed[x] = computed[x.args[0]], x.args[1]
            elif x.op == "call_function":
                node = next(scheduled, end)
                operands = [values.get(y.name) for y in node.all_input_nodes]
                if x.target is not node.target or [computed[y] for y in x.all_input_nodes] != operands:
                    yield node, "the segments do not run it where it was scheduled"
                    return
                computed[x] = node
        returned: Any = output_node(segment.gm.graph).args[0]
        if [computed[x] for x in returned] != [values.get(name) for name in segment.gives]:
            yield end, "the segments hand on other values"
    for node in scheduled:
        yield node, "no segment runs it"


def _value(node: fx.Node) -> Any:
    """Return an op, or (op, index) for a getitem."""
    return (node.args[0], node.args[1]) if node.target is getitem else node
