"""What is there from the start of a half: parameters, and what moves and casts alone make of them."""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir.graph import output_node, placeholders
from shardc.ir.host import move_kind

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_CAST = torch.ops.aten._to_copy.default


def from_start(graph: fx.Graph) -> frozenset[fx.Node]:
    """Moves of parameters to the device, the waits for these, and casts, of which nothing but ops makes use.

    They can stand anywhere in front of their use, so what uses them alone is as free as what uses parameters.
    """
    made: set[fx.Node] = set()
    params = set(placeholders(graph, "param"))
    output = output_node(graph)
    for node in graph.nodes:
        if node.op != "call_function" or output in node.users:
            continue
        if move_kind(node) == "to_device" or node.target is _CAST:
            free = all(x in params or x in made for x in node.all_input_nodes)
        else:
            free = node.target is _WAIT and node.args[0] in made
        if free:
            made.add(node)
    return frozenset(made)


def pull(graph: fx.Graph, free: frozenset[fx.Node], wished: dict[fx.Node, float]) -> None:
    """Wishes what is ``free`` right in front of its first use, as that is wished."""
    for node in reversed(graph.nodes):
        if node in free:
            wished[node] = min((wished[user] for user in node.users), default=wished[node]) - 1e-3
