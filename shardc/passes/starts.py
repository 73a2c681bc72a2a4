"""Collectives and moves in a local graph: what starts one, what waits for it, how large its results are."""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.op_traits import CAST, moves_data, starts

aten = torch.ops.aten

# What may stand, besides moves, between a collective and the output, or the next collective on the way there.
_FINISHING = {WAIT, CAST, aten.sum.dim_IntList, aten.div.Tensor}


def is_start(node: fx.Node) -> bool:
    """Whether ``node`` starts a collective, or a move between host and device."""
    return node.op == "call_function" and starts(node.target)


def result_bytes(node: fx.Node) -> int:
    """Bytes of what the collective or move ``node`` makes."""
    return sum(value.nbytes for value in ir.info(node).tensors)


def leaving(graph: fx.Graph) -> dict[fx.Node, int]:
    """What is behind collectives and leads to the graph's output alone, with how many collectives stand in front of it.

    On the way are moves, casts, sums of what came, further collectives, and copies to the host.
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
