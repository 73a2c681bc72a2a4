"""A graph of the undecided variables and their costs, with a trail from which eliminated variables are recovered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from shardc.solver.energy import Energy, PairCosts


@dataclass(frozen=True)
class Eliminated:
    """A variable that was minimised out: its label follows from the labels of its former neighbours.

    Args:
        variable: its index in the energy.
        labels: the labels that it still had, as indices in the energy.
        unary: cost of each of these labels.
        factors: tuples of (other variables, labels of each of them, costs). The first axis of the costs is this
            variable's. If there is one other variable, they may be `PairCosts`.
    """

    variable: int
    labels: np.ndarray
    unary: np.ndarray
    factors: tuple[tuple[tuple[int, ...], tuple[np.ndarray, ...], np.ndarray | PairCosts], ...]

    def best_label(self, chosen: Mapping[int, int]) -> int:
        """Return the cheapest label, given the labels of the other variables; on a tie the lowest."""
        costs = self.unary
        for scope, labels, table in self.factors:
            at = [int(np.searchsorted(kept, chosen[j])) for j, kept in zip(scope, labels, strict=True)]
            if isinstance(table, PairCosts):
                costs = costs + table.column(*at)
                continue
            for x in reversed(at):
                table = table[..., x]
            costs = costs + table
        return int(self.labels[np.argmin(costs)])


class Graph:
    """The undecided variables, with the costs of their labels and of pairs of labels.

    Arrays are never changed in place, so copies of a graph share them.

    Attributes:
        constant: the cost of the decided variables.
        unary: variable (its index in the energy) -> cost of each of its remaining labels.
        labels: variable -> its remaining labels, as indices in the energy.
        near: ``near[i][j][x, y]`` is the cost of labels ``x`` of ``i`` and ``y`` of ``j``; ``near[j][i]`` is its
            transpose. Pairs with equal costs may share one object.
        trail: the eliminated variables, first to last.
    """

    def __init__(self) -> None:
        self.constant = 0.0
        self.unary: dict[int, np.ndarray] = {}
        self.labels: dict[int, np.ndarray] = {}
        self.near: dict[int, dict[int, PairCosts]] = {}
        self.trail: list[Eliminated] = []

    @classmethod
    def of(cls, energy: Energy) -> Graph:
        """Return the graph of all costs of ``energy``; several costs of one pair of variables are added."""
        graph = cls()
        for i, unary in enumerate(energy.unary):
            graph.unary[i] = np.asarray(unary, dtype=np.float64)
            graph.labels[i] = np.arange(len(unary))
            graph.near[i] = {}
        compact: dict[int, PairCosts] = {}
        rows: dict[tuple[int, int], list[tuple[PairCosts, bool]]] = {}
        for i, j, costs in energy.pairs:
            if id(costs) not in compact:
                compact[id(costs)] = costs if isinstance(costs, PairCosts) else PairCosts.of(np.asarray(costs, float))
            rows.setdefault((min(i, j), max(i, j)), []).append((compact[id(costs)], i > j))
        tables: dict[tuple[tuple[int, bool], ...], tuple[PairCosts, PairCosts]] = {}
        for (i, j), parts in rows.items():
            key = tuple((id(pair), flipped) for pair, flipped in parts)
            if key not in tables:
                turned = [pair.transposed if flipped else pair for pair, flipped in parts]
                table = reduce(add, turned)
                tables[key] = (table, table.transposed)
            graph.near[i][j], graph.near[j][i] = tables[key]
        return graph

    def copy(self) -> Graph:
        """Return a graph that can be changed without changing this one."""
        return self.part(self.unary, self.constant, list(self.trail))

    def part(self, variables: Iterable[int], constant: float, trail: list[Eliminated]) -> Graph:
        """Return a new graph with only ``variables``, which must share no costs with the other variables. ``constant``
        and ``trail`` (eliminated variables) are those of the new graph.
        """
        part = Graph()
        part.constant, part.trail = constant, trail
        for i in variables:
            part.unary[i], part.labels[i], part.near[i] = self.unary[i], self.labels[i], dict(self.near[i])
        return part

    def edges(self) -> list[tuple[int, int, PairCosts]]:
        """Return (i, j, costs) of every pair once, with ``i < j``, in order."""
        return [(i, j, table) for i in self.unary for j, table in self.near[i].items() if i < j]

    def add_pair(self, i: int, j: int, table: PairCosts, transposed: PairCosts) -> None:
        """Add pair costs of the variables ``i`` and ``j`` to the costs that the pair has already. ``table`` has the
        labels of ``i`` first, ``transposed`` has the same costs with those of ``j`` first.
        """
        if j in self.near[i]:
            table = self.near[i][j] + table
            transposed = table.transposed
        self.near[i][j], self.near[j][i] = table, transposed

    def remove_pair(self, i: int, j: int) -> None:
        """Remove the costs of the pair ``(i, j)``."""
        del self.near[i][j], self.near[j][i]

    def remove(self, i: int, factors: tuple) -> None:
        """Remove variable ``i``, whose costs are by now part of other costs. Append it to the trail with ``factors``,
        the costs by which its label can be found later.
        """
        self.trail.append(Eliminated(i, self.labels[i], self.unary[i], factors))
        for j in self.near[i]:
            del self.near[j][i]
        del self.near[i], self.unary[i], self.labels[i]

    def keep(self, masks: Mapping[int, np.ndarray]) -> list[int]:
        """Keep only the labels that are True in their variable's mask; return the variables that lost labels."""
        changed = [i for i in self.unary if i in masks and not masks[i].all()]
        lost = set(changed)
        indices = {i: np.flatnonzero(masks[i]) for i in changed}
        cut: dict[tuple[int, bytes, bytes], tuple[PairCosts, PairCosts, PairCosts]] = {}
        for i in changed:
            self.unary[i] = self.unary[i][indices[i]]
            self.labels[i] = self.labels[i][indices[i]]
            for j, table in self.near[i].items():
                if j in lost and j < i:
                    continue
                key = (id(table), indices[i].tobytes(), indices[j].tobytes() if j in lost else b"")
                if key not in cut:
                    small = table.keep(indices[i], indices[j] if j in lost else None)
                    cut[key] = (small, small.transposed, table)  # the last one keeps the id in the key alive
                self.near[i][j], self.near[j][i] = cut[key][:2]
        return changed

    def components(self) -> list[list[int]]:
        """Return the variables of each connected component, in order of its first variable."""
        seen: set[int] = set()
        components = []
        for start in sorted(self.unary):
            if start in seen:
                continue
            seen.add(start)
            members = [start]
            for i in members:  # grows while it is walked
                fresh = [j for j in self.near[i] if j not in seen]
                seen.update(fresh)
                members.extend(fresh)
            components.append(sorted(members))
        return components


def recover(trail: Iterable[Eliminated], chosen: dict[int, int]) -> None:
    """Add to ``chosen`` (variable -> label) the labels of the eliminated variables, the last eliminated first."""
    for step in reversed(list(trail)):
        chosen[step.variable] = step.best_label(chosen)
