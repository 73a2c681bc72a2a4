"""Starts of collectives and moves in a local graph, the bytes of their results, and the ops that only finish them."""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.op_traits import CAST, moves_data, starts

aten = torch.ops.aten

# Ops that, like views, may stand between a collective and the output, or between two collectives on the way there.
_FINISHING = {WAIT, CAST, aten.sum.dim_IntList, aten.div.Tensor}


def is_start(node: fx.Node) -> bool:
    """Tells whether ``node`` starts a collective, or a move between host and device."""
    return node.op == "call_function" and starts(node.target)


def result_bytes(node: fx.Node) -> int:
    """Returns the bytes per rank of the results of a collective or move."""
    return sum(value.nbytes for value in ir.info(node).tensors)


def leaving(graph: fx.Graph) -> dict[fx.Node, int]:
    """Maps each node that leads only from collectives to the output to the number of collectives before it.

    These are waits, views, casts and sums of received terms, further collectives, and copies to the host.
    """
    out: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (moves_data(node.target) or node.target in _FINISHING or is_start(node)) and node.users:
            if all(user.op == "output" or user in out for user in node.users):
                out.add(node)
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node in out:
            behind = [level.get(x, 0) + is_start(x) for x in node.all_input_nodes if x in out or is_start(x)]
            if any(behind):
                level[node] = max(behind)
    return level
