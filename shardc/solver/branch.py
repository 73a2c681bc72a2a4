"""Branch and bound. Message passing raises the lower bound of a graph of costs. When the bound stalls, the graph is
split into two cases, which are solved one after the other.

The lower bound comes from sequential tree-reweighted message passing (TRW-S; Kolmogorov, "Convergent tree-reweighted
message passing for energy minimization", 2006). Messages move cost from pairs to variables without changing the cost of
any labelling. A sweep visits the variables in order and subtracts from each its least cost, its *floor*. The remaining
costs are non-negative, so the sum of the floors is a lower bound. It also is one in the middle of a sweep, with the
floors of the last sweep for the variables to come. That gives a bound for every single label as well.

The upper bound is the cost of the best labelling so far: messages are rounded to labels, then improved by local search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shardc.solver.cost_graph import Graph, recover
from shardc.solver.energy import Clock, Infeasible, PairCosts
from shardc.solver.reduce import eliminate, plan_order, reduce

# Cost entries per vectorised operation: as many as a core's cache holds.
CHUNK = 1 << 15


@dataclass(frozen=True)
class Send:
    """The message from a variable to a neighbour: per label of the latter, the least cost over the variable's labels.

    Labels of equal pair costs form a class (see `PairCosts`).

    Attributes:
        costs: pair costs of the classes of both variables, contiguous.
        room: buffer for sums over some rows of ``costs``.
        sent: cost of each label of the variable, read by `run`.
        order: the variable's labels, sorted by class; None if they are sorted and each has a class of its own.
        starts: index in ``order`` at which each class begins.
        axis: the axis of ``costs`` that belongs to the variable.
        classes: class of each of the neighbour's labels; None if they are sorted and each has a class of its own.
        inbox: the neighbour's row of messages, written by `run`.
    """

    costs: np.ndarray
    room: np.ndarray
    sent: np.ndarray
    order: np.ndarray | None
    starts: np.ndarray
    axis: int
    classes: np.ndarray | None
    inbox: np.ndarray

    def run(self) -> None:
        """Compute this message from ``sent``, an array of costs per label of the sender, and write it to ``inbox`` at
        the neighbour.
        """
        sent = self.sent if self.order is None else np.minimum.reduceat(self.sent[self.order], self.starts)
        if len(self.costs) == len(self.room):
            np.add(self.costs, sent if self.axis else sent[:, None], out=self.room)
            if self.classes is None:
                np.minimum.reduce(self.room, axis=self.axis, out=self.inbox)
            else:
                np.take(np.minimum.reduce(self.room, axis=self.axis), self.classes, out=self.inbox)
            return
        least = np.full(self.costs.shape[1 - self.axis], np.inf)
        for start in range(0, len(self.costs), len(self.room)):
            part = self.costs[start : start + len(self.room)]
            room, rows = self.room[: len(part)], slice(start, start + len(part))
            np.add(part, sent if self.axis else sent[rows, None], out=room)
            if self.axis:
                np.minimum.reduce(room, axis=1, out=least[rows])
            else:
                np.minimum(least, np.minimum.reduce(room, axis=0), out=least)
        self.inbox[:] = least if self.classes is None else least[self.classes]


@dataclass
class Node:
    """A variable in message passing, with the messages that it received.

    Attributes:
        variable: its index in the graph.
        unary: cost of each of its labels.
        inbox: received messages, [neighbours, labels]; neighbours earlier in the order come first.
        outbox: costs that it sends, [neighbours, labels].
        earlier: number of neighbours that are earlier in the order.
        share: the fraction of its costs that it sends to each neighbour.
        sends: the messages to later neighbours (sent by a forward sweep), and those to earlier ones (backward).
        rows: for each neighbour, its position in the order, and the pair costs with the neighbour's labels first.
    """

    variable: int
    unary: np.ndarray
    inbox: np.ndarray
    outbox: np.ndarray
    earlier: int
    share: float
    sends: tuple[list[Send], list[Send]] = field(default_factory=lambda: ([], []))
    rows: list[tuple[int, PairCosts]] = field(default_factory=list)


class Messages:
    """Message passing over the variables of a graph. It needs a graph without labels that are forbidden outright (see
    `drop_unsupported`), so that messages are finite.

    Attributes:
        nodes: the variables in order.
        floors: for each variable, the cost that the last sweep subtracted from its labels.
        entries: number of entries of all cost tables.
        bounds: variable -> a lower bound for each of its labels, from the last sweep with ``bounds=True``.
    """

    def __init__(self, graph: Graph) -> None:
        self.order = sorted(graph.unary)
        self.entries = sum(table.size for _, _, table in graph.edges())
        place = {i: p for p, i in enumerate(self.order)}
        self.nodes = []
        self.floors = [0.0] * len(self.order)
        self.bounds: dict[int, np.ndarray] = {}
        near = {i: sorted(graph.near[i]) for i in self.order}
        for i in self.order:
            shape = (len(near[i]), len(graph.unary[i]))
            earlier = sum(j < i for j in near[i])
            share = 1.0 / max(earlier, len(near[i]) - earlier, 1)
            self.nodes.append(Node(i, graph.unary[i], np.zeros(shape), np.zeros(shape), earlier, share))
        row = {(i, j): r for i in self.order for r, j in enumerate(near[i])}
        sorts: dict[int, tuple[np.ndarray | None, np.ndarray]] = {}  # of classes, by their array
        rooms = np.empty(max((max(CHUNK, *pair.costs.shape) for *_, pair in graph.edges()), default=0))
        for node in self.nodes:
            i = node.variable
            for r, j in enumerate(near[i]):
                pair, other = graph.near[i][j], self.nodes[place[j]]
                other.rows.append((place[i], pair))
                axis = 0 if pair.costs.flags.c_contiguous else 1
                costs = pair.costs.T if axis else pair.costs
                for classes in (pair.rows, pair.columns):
                    if id(classes) not in sorts:
                        sorts[id(classes)] = _sorted(classes)
                order, starts = sorts[id(pair.rows)]
                columns = None if sorts[id(pair.columns)][0] is None else pair.columns
                high = min(len(costs), max(1, CHUNK // costs.shape[1]))
                room = rooms[: high * costs.shape[1]].reshape(high, -1)
                inbox = other.inbox[row[j, i]]
                send = Send(costs, room, node.outbox[r], order, starts, axis, columns, inbox)
                node.sends[0 if j > i else 1].append(send)

    def sweep(self, forward: bool, bounds: bool = False) -> float:
        """Update the messages of all variables once, in their order (``forward``) or against it; return a lower bound
        of the cost of any labelling, without the graph's constant.

        Args:
            forward: visit the variables in order; otherwise in reverse.
            bounds: also update the attribute `bounds`. The previous sweep must have had the other direction.
        """
        passed, ahead = 0.0, sum(self.floors)
        direction = 0 if forward else 1
        places = range(len(self.nodes))
        for p in places if forward else reversed(places):
            node = self.nodes[p]
            costs = node.unary + np.add.reduce(node.inbox, axis=0)
            floor = float(np.minimum.reduce(costs))
            ahead -= self.floors[p]
            if bounds:
                self.bounds[node.variable] = costs + (passed + ahead)
            self.floors[p] = floor
            passed += floor
            costs -= floor
            costs *= node.share
            np.subtract(costs, node.inbox, out=node.outbox)
            for send in node.sends[direction]:
                send.run()
        return passed

    def absorb(self, graph: Graph, masks: Mapping[int, np.ndarray]) -> list[int]:
        """Drop labels by ``masks``, and add the messages to the graph's costs, which leaves the cost of every labelling
        unchanged; return the variables that lost labels.

        Args:
            graph: the graph that these messages belong to, changed in place.
            masks: variable -> a mask that is True for the labels to keep.
        """
        for node in self.nodes:
            node.sends, node.rows = ([], []), []  # no tables are held beside those of the graph
        changed = graph.keep(masks)
        row = {(node.variable, j): r for node in self.nodes for r, j in enumerate(sorted(graph.near[node.variable]))}
        inbox = {node.variable: node.inbox[:, masks[node.variable]] for node in self.nodes}
        for i in self.order:
            graph.unary[i] = graph.unary[i] + inbox[i].sum(axis=0)
        for i, j, pair in graph.edges():  # all labels of a class get the same message
            (_, some), (_, also) = (np.unique(classes, return_index=True) for classes in (pair.rows, pair.columns))
            costs = pair.costs - inbox[i][row[i, j]][some][:, None] - inbox[j][row[j, i]][also]
            pair = PairCosts(costs, pair.rows, pair.columns)
            graph.near[i][j], graph.near[j][i] = pair, pair.transposed
        return changed


def _sorted(classes: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Sort labels by class: return (the labels in the order of their classes, the position there at which each class
    begins).

    The labels are None if each class has one label and they are sorted already.
    """
    if len(classes) == int(classes.max()) + 1 and (classes[1:] > classes[:-1]).all():
        return None, classes
    order = np.argsort(classes, kind="stable")
    return order, np.flatnonzero(np.r_[True, np.diff(classes[order]) > 0])


Labelling = dict[int, int]
"""Maps each variable of a graph to the position of its label among those that it has in the graph."""


def cost(graph: Graph, chosen: Labelling) -> float:
    """Return the cost of a labelling of ``graph``, including the constant of the variables already decided."""
    total = graph.constant + sum(float(costs[chosen[i]]) for i, costs in graph.unary.items())
    return total + sum(table[chosen[i], chosen[j]] for i, j, table in graph.edges())


def round_messages(messages: Messages, forward: bool) -> Labelling:
    """Turn messages into a labelling: each variable in turn, in order or in reverse, gets the label that costs least
    with the labels chosen so far and the messages from the other variables.
    """
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
    """Improve the labelling ``chosen`` by local search, one variable at a time, in at most ``rounds`` passes; return
    the improved labelling.

    One label at a time is changed while that lowers the number of infinite costs, or the cost.
    """
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
    """Return the label with the least total cost; ``parts`` are arrays of costs per label, to be added. If every total
    is inf, labels with the fewest infinite terms are preferred.
    """
    total = sum(parts[1:], parts[0])
    best = int(np.argmin(total))
    if total[best] < math.inf:
        return best
    stacked = np.stack(parts)
    broken = np.isinf(stacked).sum(axis=0)
    finite = np.where(np.isinf(stacked), 0.0, stacked).sum(axis=0)
    return int(np.argmin(np.where(broken == broken.min(), finite, math.inf)))


def _order(parts: list[np.ndarray], x: int) -> tuple[int, float]:
    """Return a key by which labels can be compared, even of infinite cost: (number of infinite costs of label ``x``,
    sum of its finite costs). ``parts`` are arrays of costs per label.
    """
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
# Labels of each variable, those of the least bounds, among which a labelling is improved exactly.
LIKELY = 5
# Components are solved one by one down to this depth, and as one graph below it.
DEEPEST = 50
# A gap of at most this share of the value counts as closed.
CLOSED = 1e-11


@dataclass
class Effort:
    """The work that all searches of one `solve` have done.

    Attributes:
        clock: the budget of work and time.
        table: the largest number of entries that a table of an elimination may have.
        gap: share of the value by which a labelling may miss the least cost.
        iterations: number of pairs of sweeps.
        branches: number of graphs that were split in two.
        depth: number of nested searches in progress.
    """

    clock: Clock
    table: int
    gap: float = 0.0
    iterations: int = 0
    branches: int = 0
    depth: int = 0


def search(graph: Graph, effort: Effort, ceiling: float = math.inf) -> tuple[dict[int, int] | None, float, float]:
    """Solve a graph that is already reduced, also for the variables that were eliminated earlier. Return (variable ->
    label, cost, lower bound); the first is None if no labelling costs less than ``ceiling``, or if the budget did not
    suffice.

    Args:
        effort: the budget, and the counts of work, updated in place.
        ceiling: labellings that cost this much or more are of no interest.
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
        chosen: variable -> label of the best labelling so far; None before the first.
        value: its cost; before the first, the ceiling that labellings must stay below.
        has_split: whether the graph has been split.
    """

    def __init__(self, effort: Effort, ceiling: float = math.inf) -> None:
        self.effort = effort
        self.chosen: dict[int, int] | None = None
        self.value = ceiling
        self.has_split = False

    def run(self, graph: Graph) -> tuple[dict[int, int] | None, float, float]:
        """Search ``graph``; return (variable -> label or None, cost, lower bound) as the function `search` does."""
        bounds = [math.inf]  # of the closed graphs
        open_graphs = [(-math.inf, graph)]
        while open_graphs:
            bound, graph = open_graphs.pop()
            if self.closes(bound) or (self.effort.clock.over() and bound > -math.inf):
                bounds.append(bound)
                continue
            try:
                bound, labels = self.tighten(graph, bound)
            except Infeasible:  # what was dropped before does not improve on the best labels
                bound, labels = self.value, None
            if labels is None:
                bounds.append(bound)
                continue
            self.has_split = True
            self.effort.branches += 1
            halves = split(graph, labels)
            self.effort.clock.spend(sum(table.size for half in halves for *_, table in half.edges()))
            open_graphs += [(bound, half) for half in halves]
        return self.chosen, self.value, min(self.wanted, *bounds)

    def closes(self, bound: float) -> bool:
        """Return whether a graph with the lower bound ``bound`` cannot improve on the best labelling so far by more
        than the allowed gap.
        """
        return bound >= self.wanted - CLOSED * abs(self.value)

    @property
    def wanted(self) -> float:
        """Return the cost below which a labelling improves on the best so far by more than the allowed gap."""
        return self.value if self.chosen is None else self.value - self.effort.gap * abs(self.value)

    def propose(self, value: float, chosen: dict[int, int], graph: Graph) -> None:
        """Record ``chosen``, a labelling of ``graph`` of cost ``value``, if it improves on the best so far."""
        if value < self.value:
            self.value, self.chosen = value, dict(chosen)
            recover(graph.trail, self.chosen)

    def tighten(self, graph: Graph, bound: float) -> tuple[float, Mapping[int, np.ndarray] | None]:
        """Raise the lower bound of ``graph`` from ``bound``, changing the graph in place. Stop when the graph is
        solved, cannot improve on the best labelling, the bound stalls or the budget is used up. Return (bound, variable
        -> bound for each label); the latter is None unless the bound stalled.

        Raises:
            Infeasible: no labels remain.
        """
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
                chosen = self.round(graph, messages)
                if not batches & (batches - 1) and not self.closes(bound):  # seldom, once there have been many
                    self.improve(graph, messages, chosen)
            if self.closes(bound) or clock.over():
                return bound, None
            limit = self.wanted - graph.constant
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
        """Pass messages over all variables forward and backward, up to ``BATCH`` times and within the budget; return
        the last lower bound.
        """
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
        """Return whether message passing has stalled. While no labelling of finite cost is known: after `HOPEFUL`
        batches of sweeps. Later: if the last batch, from ``before`` to ``bound``, closed too small a share of the gap
        to the best cost.

        Args:
            batches: number of batches so far.
        """
        if math.isinf(self.value):
            return batches >= HOPEFUL
        part = STALLED_PART if self.has_split else STALLED_WHOLE
        return before > -math.inf and bound - before <= part * (self.value - before)

    def solve_exactly(self, graph: Graph) -> bool:
        """Solve a graph by solving its connected components one by one or, if there is only one, by eliminating all
        variables. Return False if the tables for the elimination would be too large, or if the budget does not suffice.
        """
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

    def round(self, graph: Graph, messages: Messages) -> Labelling:
        """Turn the messages into two labellings (in order and in reverse), improve them by local search, and return the
        better one. Record it if it is the best so far.
        """
        rounded = [descend(graph, round_messages(messages, forward)) for forward in (True, False)]
        value, chosen = min(((cost(graph, labels), labels) for labels in rounded), key=lambda pair: pair[0])
        if value < self.value:
            self.propose(value, {i: int(graph.labels[i][x]) for i, x in chosen.items()}, graph)
        return chosen

    def improve(self, graph: Graph, messages: Messages, chosen: Labelling) -> None:
        """Look for a better labelling: solve the graph exactly with only the most promising labels of each variable (by
        their bounds) and the label of ``chosen``. Record the solution if it is the best so far.
        """
        masks = {}
        for i, bounds in messages.bounds.items():
            few = np.zeros(len(bounds), dtype=bool)
            few[np.argpartition(bounds, LIKELY)[:LIKELY] if len(bounds) > LIKELY else slice(None)] = True
            few[chosen[i]] = True
            masks[i] = few
        part = graph.copy()
        try:
            reduce(part, part.keep(masks))
        except Infeasible:
            return
        order = plan_order(part, self.effort.table)
        if order is not None and eliminate(part, order, self.effort.clock):
            self.propose(part.constant, {}, part)


def split(graph: Graph, bounds: Mapping[int, np.ndarray]) -> list[Graph]:
    """Split a graph into two cases by one label of one variable: return the graph without this label, and the graph
    with only this label for the variable.

    The variable is the one whose two best labels have the closest bounds. Both graphs are reduced; one that is
    infeasible is left out.

    Args:
        bounds: variable -> a lower bound for each of its labels.
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
    """Return by how much the second least of ``bounds`` exceeds the least."""
    best, second = np.partition(bounds, 1)[:2]
    return float(second - best)
