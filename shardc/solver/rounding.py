"""Labellings from messages, and local search to improve them. The cost of any labelling is an upper bound."""

from __future__ import annotations

import math

import numpy as np

from shardc.solver.cost_graph import Graph
from shardc.solver.messages import Messages

Labelling = dict[int, int]
"""For each variable of a graph, the position of its label in the graph."""


def cost(graph: Graph, chosen: Labelling) -> float:
    """Return the cost of a labelling of a graph, including what is already decided."""
    total = graph.constant + sum(float(costs[chosen[i]]) for i, costs in graph.unary.items())
    return total + sum(table[chosen[i], chosen[j]] for i, j, table in graph.edges())


def round_messages(messages: Messages, forward: bool) -> Labelling:
    """Return variable -> label, chosen in order: the least cost given the labels so far and the others' messages."""
    chosen: list[int] = [0] * len(messages.nodes)
    places = range(len(messages.nodes))
    for p in places if forward else reversed(places):
        node = messages.nodes[p]
        split = node.earlier
        before, ahead = (node.rows[:split], node.inbox[split:]) if forward else (node.rows[split:], node.inbox[:split])
        costs = node.unary + np.add.reduce(ahead, axis=0)
        chosen[p] = _least([costs, *(table.row(chosen[q]) for q, table in before)])
    return {node.variable: x for node, x in zip(messages.nodes, chosen, strict=True)}


def descend(graph: Graph, chosen: Labelling, rounds: int = 20) -> Labelling:
    """Change one label at a time while that lowers the cost, or the number of infinite costs."""
    chosen = dict(chosen)
    stale = set(graph.unary)
    for _ in range(rounds):
        if not stale:
            break
        for i in sorted(stale):
            stale.discard(i)
            parts = [graph.unary[i], *(graph.near[j][i].row(chosen[j]) for j in graph.near[i])]
            best = _least(parts)
            if best != chosen[i] and _order(parts, best) < _order(parts, chosen[i]):
                chosen[i] = best
                stale.update(graph.near[i])
    return chosen


def _least(parts: list[np.ndarray]) -> int:
    """Return the position of the least sum; if all are inf, of the least with the fewest infinite parts."""
    total = sum(parts[1:], parts[0])
    best = int(np.argmin(total))
    if total[best] < math.inf:
        return best
    stacked = np.stack(parts)
    broken = np.isinf(stacked).sum(axis=0)
    finite = np.where(np.isinf(stacked), 0.0, stacked).sum(axis=0)
    return int(np.argmin(np.where(broken == broken.min(), finite, math.inf)))


def _order(parts: list[np.ndarray], x: int) -> tuple[int, float]:
    values = [float(part[x]) for part in parts]
    return sum(map(math.isinf, values)), sum(value for value in values if value < math.inf)
