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

from shardc.solver.graph import Graph


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
        sends: for each direction of the sweep, ``(table, costs, room for their sum, axis of the variable in
            them, inbox row of the neighbour)``.
        rows: for each neighbour, its place and its table, the neighbour's labels first.
    """

    variable: int
    unary: np.ndarray
    inbox: np.ndarray
    outbox: np.ndarray
    earlier: int
    share: float
    sends: tuple[list, list] = field(default_factory=lambda: ([], []))
    rows: list[tuple[int, np.ndarray]] = field(default_factory=list)


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
        whole: dict[int, np.ndarray] = {}  # copies of tables that do not lie in one piece, in either direction
        rooms = np.empty(max((table.size for *_, table in graph.edges()), default=0))
        for node in self.nodes:
            i = node.variable
            for r, j in enumerate(near[i]):
                table = graph.near[i][j]
                if not (table.flags.c_contiguous or table.flags.f_contiguous):
                    table = whole.setdefault(id(table), np.ascontiguousarray(table))
                other, sent, axis = self.nodes[place[j]], node.outbox[r][:, None], 0
                other.rows.append((place[i], table))
                if not table.flags.c_contiguous:
                    table, sent, axis = table.T, sent.T, 1
                room = rooms[: table.size].reshape(table.shape)
                node.sends[0 if j > i else 1].append((table, sent, room, axis, other.inbox[row[j, i]]))

    def sweep(self, forward: bool, bounds: bool = False) -> float:
        """Send messages along the order or against it.

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
            for table, sent, room, axis, inbox in node.sends[direction]:
                np.add(table, sent, out=room)
                np.minimum.reduce(room, axis=axis, out=inbox)
        return passed

    def absorb(self, graph: Graph, kept: Mapping[int, np.ndarray]) -> list[int]:
        """Move what the messages say into the costs of the graph: no labelling costs more or less than before.

        Args:
            graph: the one of these messages, changed in place.
            kept: for each variable, True for the labels that are to be left.

        Returns:
            the variables that lost labels.
        """
        for node in self.nodes:
            node.sends, node.rows = ([], []), []  # no tables are held beside those of the graph
        changed = graph.keep(kept)
        row = {(node.variable, j): r for node in self.nodes for r, j in enumerate(sorted(graph.near[node.variable]))}
        inbox = {node.variable: node.inbox[:, kept[node.variable]] for node in self.nodes}
        for i in self.order:
            graph.unary[i] = graph.unary[i] + inbox[i].sum(axis=0)
        for i, j, table in graph.edges():
            table = table - inbox[i][row[i, j]][:, None] - inbox[j][row[j, i]]
            graph.near[i][j], graph.near[j][i] = table, table.T
        return changed
