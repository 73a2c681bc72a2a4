"""Improves a labelling by solving a block of variables at a time, with all other labels fixed."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from shardc.solver.cost_graph import Graph, recover
from shardc.solver.eliminate import eliminate, plan_order
from shardc.solver.energy import Clock

# The largest table that the elimination of a block may make.
TABLE = 50_000
# How often the whole graph is covered with blocks at most.
ROUNDS = 3


def improve_blocks(graph: Graph, chosen: dict[int, int], clock: Clock) -> dict[int, int]:
    """Return labels of equal or lower cost. A block is as large as its elimination allows, around some variable.

    Args:
        graph: the costs.
        chosen: for each variable, the position of its label in the graph; of finite cost together.
        clock: no block is begun when its time is over.
    """
    chosen = dict(chosen)
    for _ in range(ROUNDS):
        before = dict(chosen)
        uncovered = dict.fromkeys(sorted(graph.unary))
        while uncovered and not clock.over():
            block = _largest_block(graph, next(iter(uncovered)), chosen)
            for i in block.unary:
                uncovered.pop(i, None)
            order = plan_order(block, TABLE)
            if order is not None and eliminate(block, order, clock):
                labels: dict[int, int] = {}
                recover(block.trail, labels)
                chosen |= labels
        if chosen == before:
            break
    return chosen


def _largest_block(graph: Graph, start: int, chosen: dict[int, int]) -> Graph:
    """Return the costs of a block around a variable; it is doubled for as long as it can be eliminated."""
    members = [start]
    seen = {start}
    block = _block(graph, members, chosen)
    size = 4
    for i in members:  # grows while it is walked
        fresh = [j for j in graph.near[i] if j not in seen]
        seen.update(fresh)
        members.extend(fresh)
        if len(members) >= size:
            larger = _block(graph, members[:size], chosen)
            if plan_order(larger, TABLE) is None:
                return block
            block, size = larger, 2 * size
    larger = _block(graph, members, chosen)
    return block if plan_order(larger, TABLE) is None else larger


def _block(graph: Graph, members: Collection[int], chosen: dict[int, int]) -> Graph:
    """Return the costs of some variables, if all others have the labels that are chosen for them."""
    block = Graph()
    inside = set(members)
    for i in sorted(members):
        costs = graph.unary[i]
        for j in graph.near[i]:
            if j not in inside:
                costs = costs + graph.near[j][i].row(chosen[j])
        block.unary[i] = costs
        block.labels[i] = np.arange(len(costs))
        block.near[i] = {j: table for j, table in graph.near[i].items() if j in inside}
    return block
