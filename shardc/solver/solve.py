"""`solve` runs the stages of the solver and returns a `Solution`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

from shardc.solver.branch import CLOSED, Effort, search
from shardc.solver.cost_graph import Graph
from shardc.solver.energy import Clock, Energy, Infeasible, evaluate
from shardc.solver.reduce import reduce

# Entries of tables; a core visits about 8e8 per second.
WORK = 1e11


@dataclass(frozen=True)
class Solution:
    """Result of the solver: a labelling (a label for each variable), its cost, and a lower bound of the cost of any
    labelling.

    Attributes:
        labels: a label index for each variable.
        value: cost of the labelling; inf if no labelling of finite cost was found in time.
        bound: lower bound of every labelling's cost, up to rounding. Equal to ``value`` if the work sufficed.
        variables: number of variables of the energy.
        left: number of variables that remained after `reduce`.
        iterations: number of pairs of sweeps of message passing.
        branches: number of graphs that were split in two.
        seconds: stage -> seconds spent in it. The only field that differs between runs.
    """

    labels: tuple[int, ...]
    value: float
    bound: float
    variables: int
    left: int
    iterations: int
    branches: int
    seconds: dict[str, float] = field(compare=False)

    @property
    def gap(self) -> float:
        """Return the gap between value and bound, relative to the value: at most this share of the value can be saved.
        inf if no labelling of finite cost was found.
        """
        if math.isinf(self.value):
            return math.inf
        return (self.value - self.bound) / max(abs(self.value), sys.float_info.min)


def solve(
    energy: Energy, *, work: float = WORK, table: int = 20_000_000, seconds: float = math.inf,
    ceiling: float = math.inf, gap: float = 0.0,
) -> Solution:  # fmt: skip
    """Return a labelling of least cost, or the best one found within the budget, with a lower bound.

    The result is the same on every machine, unless ``seconds`` is given.

    Args:
        energy: the costs to minimize.
        work: limit of table entries to visit. Beyond it the best labelling so far is returned.
        table: the largest table, in entries of 8 bytes, that dynamic programming may create.
        seconds: time limit.
        ceiling: only labellings that cost less are of interest, which ends the search early if there is none.
        gap: share of its value by which the labelling may miss the least cost.

    Raises:
        Infeasible: every labelling costs inf, or ``ceiling`` and more.

    >>> import numpy as np
    >>> differ = np.array([[5.0, 0.0], [0.0, 5.0]])
    >>> solve(Energy((np.zeros(2), np.array([1.0, 0.0])), ((0, 1, differ),))).labels
    (0, 1)
    """
    effort = Effort(Clock(seconds, work), table, gap)
    with effort.clock.stage("reduce"):
        graph = Graph.of(energy)
        reduce(graph)
    left = len(graph.unary)
    chosen, value, bound = search(graph, effort, ceiling)
    if chosen is None or value >= ceiling:
        if math.isinf(bound):
            raise Infeasible("no labelling has a finite cost, though every pair has labels of finite cost")
        if bound >= ceiling - CLOSED * abs(ceiling):
            raise Infeasible(f"no labelling costs less than {ceiling:g}")
        chosen = chosen or {}
    labels = tuple(chosen.get(i, 0) for i in range(len(energy.unary)))
    value = evaluate(energy, labels)
    return Solution(
        labels,
        value,
        min(bound, value),
        len(labels),
        left,
        effort.iterations,
        effort.branches,
        {stage: round(taken, 3) for stage, taken in effort.clock.seconds.items()},
    )
