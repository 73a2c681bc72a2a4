"""The order of a graph's nodes: a stable topological sort by priority."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from torch import fx

from shardc.ir.graph import output_node


def places(graph: fx.Graph) -> dict[fx.Node, float]:
    """Return the position of each node in the graph."""
    return {node: float(at) for at, node in enumerate(graph.nodes)}


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return, by node, the values whose last use it is."""
    seen: set[fx.Node] = set()
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for read in [*node.all_input_nodes, node]:
            if read not in seen and read.op != "output":
                seen.add(read)
                out.setdefault(node, []).append(read)
    return out


def reorder(graph: fx.Graph, priority: Mapping[fx.Node, float]) -> None:
    """Sort the nodes topologically, the lowest ``priority`` first among those that are ready; ties keep their order.

    Placeholders stay first and the output last. The result depends on the graph and the priorities alone.
    """
    present = {node: at for at, node in enumerate(graph.nodes)}
    output = output_node(graph)
    missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready: list[tuple[bool, float, int, fx.Node]] = []

    def push(node: fx.Node) -> None:
        heappush(ready, (node.op != "placeholder", priority[node], present[node], node))

    for node, count in missing.items():
        if count == 0 and node is not output:
            push(node)
    while ready:
        *_, node = heappop(ready)
        output.prepend(node)
        for user in node.users:
            missing[user] -= 1
            if missing[user] == 0 and user is not output:
                push(user)
