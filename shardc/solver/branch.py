"""Branch and bound: raises the lower bound of a graph, and splits it in two if that stalls.

Labellings from messages, and local search to improve them. The cost of any labelling is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardc.solver.cost_graph import Graph, recover
from shardc.solver.energy import Clock, Infeasible
from shardc.solver.messages import Messages
from shardc.solver.reduce import eliminate, plan_order, reduce

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


# Pairs of sweeps between two attempts to drop labels.
BATCH = 8
# Labels are dropped if they are at least this share of all, or if nothing else helps: sweeps then start anew.
WORTHWHILE = 0.2
# In a graph with more table entries than this many pairs share tables; dropping labels gives each pair its own table.
LARGE, WORTHWHILE_LARGE = 10_000_000, 0.5
# A batch that closes less than this share of the gap has stalled: before the first split, and after it.
STALLED_WHOLE, STALLED_PART = 0.002, 0.02
# Batches that may fail to give a labelling of finite cost.
HOPEFUL = 5
# Components are solved one by one down to this depth, and as one graph below it.
DEEPEST = 50
# A gap of at most this share of the value counts as closed.
CLOSED = 1e-11


@dataclass
class Effort:
    """The work that all searches of one `solve` have done.

    Attributes:
        clock: the budget of work and time.
        table: largest number of entries of an elimination's table.
        iterations: pairs of sweeps done.
        branches: graphs split in two.
        depth: nested searches in progress.
    """

    clock: Clock
    table: int
    iterations: int = 0
    branches: int = 0
    depth: int = 0


def search(graph: Graph, effort: Effort, ceiling: float = math.inf) -> tuple[dict[int, int] | None, float, float]:
    """Return the labels of all variables of a reduced graph and of its trail, their cost, and a lower bound.

    The labels are None and the cost is ``ceiling`` if no labels cost less, or if the work did not suffice.
    """
    if len(parts := graph.components()) < 2:
        return Search(effort, ceiling).run(graph)
    chosen: dict[int, int] | None = {}
    value = bound = graph.constant
    effort.depth += 1
    for variables in parts:
        labels, part_value, part_bound = Search(effort).run(graph.part(variables, 0.0, []))
        value, bound = value + part_value, bound + part_bound
        chosen = None if labels is None or chosen is None else chosen | labels
    effort.depth -= 1
    if chosen is not None:
        recover(graph.trail, chosen)
    return chosen, value, bound


class Search:
    """Branch and bound over one graph, depth first.

    Attributes:
        chosen: the best labels that were found.
        value: what they cost; before there are any, what labels of interest cost less than.
        has_split: whether the graph that was given was split already.
    """

    def __init__(self, effort: Effort, ceiling: float = math.inf) -> None:
        self.effort = effort
        self.chosen: dict[int, int] | None = None
        self.value = ceiling
        self.has_split = False

    def run(self, graph: Graph) -> tuple[dict[int, int] | None, float, float]:
        """Search the graph; returns what the function `search` returns."""
        bounds = [math.inf]  # of the graphs that are done with
        open_graphs = [(-math.inf, graph)]
        while open_graphs:
            bound, graph = open_graphs.pop()
            if self.closes(bound) or (self.effort.clock.over() and bound > -math.inf):
                bounds.append(bound)
                continue
            bound, labels = self.tighten(graph, bound)
            if labels is None:
                bounds.append(bound)
                continue
            self.has_split = True
            self.effort.branches += 1
            halves = split(graph, labels)
            self.effort.clock.spend(sum(table.size for half in halves for *_, table in half.edges()))
            open_graphs += [(bound, half) for half in halves]
        return self.chosen, self.value, min(self.value, *bounds)

    def closes(self, bound: float) -> bool:
        """Return whether a graph with this bound cannot have better labels than the best so far."""
        return bound >= self.value - CLOSED * abs(self.value)

    def propose(self, value: float, chosen: dict[int, int], graph: Graph) -> None:
        """Keep labels of a graph's variables if they cost less than the best so far."""
        if value < self.value:
            self.value, self.chosen = value, dict(chosen)
            recover(graph.trail, self.chosen)

    def tighten(self, graph: Graph, bound: float) -> tuple[float, Mapping[int, np.ndarray] | None]:
        """Raise the lower bound of a graph, in place, until it is solved, reaches the best value found, or stalls.

        Returns:
            the bound, and where the graph is still open a bound for each label of each variable that is left.
        """
        try:
            return self._tighten(graph, bound)
        except Infeasible:
            # What was dropped before costs no less than the best labels.
            return self.value, None

    def _tighten(self, graph: Graph, bound: float) -> tuple[float, Mapping[int, np.ndarray] | None]:
        clock = self.effort.clock
        messages, batches = None, 0
        while True:
            if messages is None:
                if self.solve_exactly(graph):
                    return max(bound, min(graph.constant, self.value)), None
                messages = Messages(graph)
            before = bound
            bound = max(bound, graph.constant + self.sweep(messages))
            batches += 1
            with clock.stage("rounding"):
                self.round(graph, messages)
            if self.closes(bound) or clock.over():
                return bound, None
            limit = self.value - graph.constant
            masks = {i: costs < limit for i, costs in messages.bounds.items()}
            dropped = sum(int((~mask).sum()) for mask in masks.values())
            stalled = self.stalls(before, bound, batches)
            enough = WORTHWHILE_LARGE if messages.entries > LARGE else WORTHWHILE
            if dropped > enough * sum(map(len, masks.values())) or (stalled and dropped):
                with clock.stage("reduce"):
                    reduce(graph, messages.absorb(graph, masks))
                messages = None
            elif stalled:
                messages.absorb(graph, masks)
                return bound, messages.bounds

    def sweep(self, messages: Messages) -> float:
        """Pass messages over all variables ``BATCH`` times, fewer if time is over; return the last lower bound."""
        with self.effort.clock.stage("messages"):
            for step in range(BATCH):
                messages.sweep(forward=True)
                self.effort.clock.spend(2 * messages.entries)
                last = step == BATCH - 1 or self.effort.clock.over()
                bound = messages.sweep(forward=False, bounds=last)
                self.effort.iterations += 1
                if last:
                    break
        return bound

    def stalls(self, before: float, bound: float, batches: int) -> bool:
        """Return whether more sweeps are not worth their time, after the last batch raised a bound."""
        if math.isinf(self.value):
            return batches >= HOPEFUL
        part = STALLED_PART if self.has_split else STALLED_WHOLE
        return before > -math.inf and bound - before <= part * (self.value - before)

    def solve_exactly(self, graph: Graph) -> bool:
        """Solve a graph if it is disconnected or its tables are small enough; return whether it did."""
        if self.effort.depth < DEEPEST and len(graph.components()) > 1:
            chosen, value, bound = search(graph, self.effort)
            if chosen is not None:
                self.propose(value, chosen, Graph())
            graph.constant = bound
            return True
        with self.effort.clock.stage("eliminate"):
            order = plan_order(graph, self.effort.table)
            if order is None or not eliminate(graph, order, self.effort.clock):
                return False
            self.propose(graph.constant, {}, graph)
            return True

    def round(self, graph: Graph, messages: Messages) -> None:
        """Search for better labels."""
        rounded = [descend(graph, round_messages(messages, forward)) for forward in (True, False)]
        value, chosen = min(((cost(graph, labels), labels) for labels in rounded), key=lambda pair: pair[0])
        if value < self.value:
            self.propose(value, {i: int(graph.labels[i][x]) for i, x in chosen.items()}, graph)


def split(graph: Graph, bounds: Mapping[int, np.ndarray]) -> list[Graph]:
    """Split on the variable with the closest labels: return the graph without its best label, and the graph with only
    that.

    Both are reduced; one without labels is left out.
    """
    variable = min(graph.unary, key=lambda i: (_lead(bounds[i]), -len(graph.near[i]), i))
    only = np.zeros(len(graph.unary[variable]), dtype=bool)
    only[np.argmin(bounds[variable])] = True
    halves = []
    for mask in (~only, only):
        half = graph.copy()
        try:
            reduce(half, half.keep({variable: mask}))
        except Infeasible:
            continue
        halves.append(half)
    return halves


def _lead(bounds: np.ndarray) -> float:
    """Return by how much the best label is cheaper than the second best one."""
    best, second = np.partition(bounds, 1)[:2]
    return float(second - best)
