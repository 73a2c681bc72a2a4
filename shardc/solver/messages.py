"""Sequential tree-reweighted message passing (TRW-S): a lower bound on the least cost, of the graph and of each label.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006. Messages move cost from pairs
to variables without changing the cost of any labelling. A sweep visits the variables in order and takes the least cost
of each, its floor, out of it. What remains of the pairs and variables is never negative then, so the sum of the floors
is a lower bound. In the midst of a sweep it still is, with the last sweep's floors for the variables to come: that
gives a bound for every single label as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shardc.solver.cost_graph import Graph
from shardc.solver.energy import PairCosts

# Entries of costs that are gone through at once: what a core's cache holds.
CHUNK = 1 << 15


@dataclass(frozen=True)
class Send:
    """How a variable sends a message to a neighbour: the minimum of its costs plus those of the pair.

    Attributes:
        costs: of each class of labels of either variable, in the order in which they lie in memory.
        room: for sums of some rows.
        sent: the costs of the variable's labels.
        order: its labels, class by class; None if each is a class of its own, in order.
        starts: where each class begins in that order.
        axis: of the variable in the costs.
        classes: of the neighbour's labels; None if each is a class of its own, in order.
        inbox: where the neighbour reads it.
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
    """A variable, with the messages that its neighbours sent to it.

    Attributes:
        variable: its index in the graph.
        unary: the costs of its labels.
        inbox: one row of messages for each neighbour, those earlier in the order first.
        outbox: room for the costs that it sends to each neighbour.
        earlier: how many neighbours are earlier.
        share: the part of its costs that it sends to each neighbour.
        sends: for each direction of the sweep, what goes to each neighbour.
        rows: for each neighbour, its place and the costs of the pair, the neighbour's labels first.
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
    """The messages of a graph in which every label is supported (see `drop_unsupported`): none is ever inf.

    Attributes:
        nodes: the variables in order.
        floors: what the last sweep took out of each.
        entries: of all tables.
        bounds: a lower bound for each label, from the last sweep for which they were asked.
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
        """Update the messages of all variables once, in their order or against it.

        Args:
            forward: the direction.
            bounds: also set `bounds`. The sweep before must have gone the other way.

        Returns:
            a lower bound of the costs that are left.
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
        """Reparametrize the graph by the messages: the cost of every labelling stays.

        Args:
            graph: the one of these messages, changed in place.
            masks: for each variable, True for the labels that are to be left.

        Returns:
            the variables that lost labels.
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
    """Return the labels class by class, and where each class begins; None for labels that are so already, one each."""
    if len(classes) == int(classes.max()) + 1 and (classes[1:] > classes[:-1]).all():
        return None, classes
    order = np.argsort(classes, kind="stable")
    return order, np.flatnonzero(np.r_[True, np.diff(classes[order]) > 0])
