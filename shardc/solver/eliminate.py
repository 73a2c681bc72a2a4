"""Exact dynamic programming on a graph, for which the tables of costs must be small enough."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from shardc.solver.cost_graph import Graph
from shardc.solver.energy import Clock, Infeasible
from shardc.solver.pair import PairCosts

# Limits of the entries that all tables together add up, and that they store, in units of the largest allowed table.
WORK, KEPT = 10, 2
# Entries of a table that are added up at once.
CHUNK = 1 << 20

Factor = tuple[tuple[int, ...], np.ndarray | PairCosts]
"""Variables in rising order, and costs with an axis for each."""


@dataclass(frozen=True)
class Order:
    """An order in which to eliminate all variables, and the number of table entries that it creates."""

    variables: tuple[int, ...]
    entries: int


def plan_order(graph: Graph, table: int) -> Order | None:
    """Return an elimination order, smallest table first, or None if it needs a table of more than `table` entries."""
    near = {i: set(graph.near[i]) for i in graph.unary}
    sizes = {i: len(costs) for i, costs in graph.unary.items()}

    def entries(i: int) -> int:
        return sizes[i] * math.prod(sizes[j] for j in near[i])

    current = {i: entries(i) for i in near}
    heap = [(count, i) for i, count in current.items()]
    heapq.heapify(heap)
    order, total, stored = [], 0, 0
    while heap:
        count, i = heapq.heappop(heap)
        if i not in near or current[i] != count:
            continue
        total += count
        stored += count // sizes[i]
        if count > table or total > WORK * table or stored > KEPT * table:
            return None
        order.append(i)
        around = near.pop(i)
        for j in around:
            near[j] |= around
            near[j] -= {i, j}
        for j in around:
            current[j] = entries(j)
            heapq.heappush(heap, (current[j], j))
    return Order(tuple(order), total)


def eliminate(graph: Graph, order: Order, clock: Clock) -> bool:
    """Minimise out all variables of a graph one by one; its constant is then the least cost.

    Returns:
        whether it was done in time. If not, the graph is as it was.

    Raises:
        Infeasible: every labelling costs inf.
    """
    buckets: dict[int, list[Factor]] = {i: [] for i in graph.unary}
    place = {i: p for p, i in enumerate(order.variables)}
    for i, j, table in graph.edges():
        buckets[min(i, j, key=place.__getitem__)].append(((i, j), table))
    constant, factors_of = graph.constant, {}
    for i in order.variables:
        if clock.over():
            return False
        factors = [_axis_first(factor, i) for factor in buckets.pop(i)]
        factors_of[i] = tuple((scope, tuple(graph.labels[j] for j in scope), costs) for scope, costs in factors)
        clock.spend(math.prod(len(graph.unary[j]) for j in {i, *(j for s, _ in factors for j in s)}))
        scope, costs = _minimise(graph.unary[i], factors, {j: len(graph.unary[j]) for s, _ in factors for j in s})
        if not np.isfinite(costs.min()):
            raise Infeasible("the labels of finite cost cannot be combined")
        if scope:
            buckets[min(scope, key=place.__getitem__)].append((scope, costs))
        else:
            constant += float(costs)
    for i in order.variables:
        graph.remove(i, factors_of[i])
    graph.constant = constant
    return True


def _axis_first(factor: Factor, i: int) -> Factor:
    """Return (variables other than `i`, the factor's cost array with the axis of variable `i` moved to the front)."""
    scope, costs = factor
    axis = scope.index(i)
    rest = scope[:axis] + scope[axis + 1 :]
    if isinstance(costs, PairCosts):
        return rest, costs.transposed if axis else costs
    return rest, np.moveaxis(costs, axis, 0)


def _minimise(unary: np.ndarray, factors: list[Factor], sizes: dict[int, int]) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the least sum of the factors over the labels of their first axis."""
    scope = tuple(sorted(sizes))
    shape = tuple(sizes[j] for j in scope)
    aligned = [unary.reshape(-1, *[1] * len(scope))]
    for names, table in factors:
        costs = table.dense() if isinstance(table, PairCosts) else table
        aligned.append(costs.reshape(len(unary), *(sizes[j] if j in names else 1 for j in scope)))
    aligned.sort(key=lambda costs: costs.size)  # the small ones are added up first
    out = np.full(shape, math.inf)
    step = max(1, CHUNK // max(1, out.size))
    for start in range(0, len(unary), step):
        parts = [costs[start : start + step] for costs in aligned]
        np.minimum(out, sum(parts[1:], parts[0]).min(axis=0), out=out)
    return scope, out
