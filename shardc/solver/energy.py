"""The problem (costs of variables and of pairs of variables), and the budget of work for solving it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from shardc.errors import ShardcError, VerifyError
from shardc.solver.pair import PairCosts


class Infeasible(ShardcError, ValueError):
    """Every labelling costs inf. The text names the variable or pair that has no finite label, where one is known."""


@dataclass(frozen=True, eq=False)
class Energy:
    """A sum of costs of variables and of pairs of variables, to be least; inf forbids.

    Args:
        unary: for each variable, the cost of each of its labels, float64.
        pairs: ``(i, j, cost)``, where ``cost[x, y]`` is paid if ``i`` has label ``x`` and ``j`` label ``y``: an array,
            or `PairCosts`. Several pairs may share one. Several pairs about the same two variables add up.

    Raises:
        VerifyError: an array of a wrong shape, a cost that is nan or -inf, or a pair of a variable with itself.

    >>> energy = Energy((np.array([0.0, 1.0]), np.array([2.0, 0.0])), ((0, 1, np.array([[0.0, np.inf], [0.0, 0.0]])),))
    >>> evaluate(energy, (1, 1))
    1.0
    """

    unary: tuple[np.ndarray, ...]
    pairs: tuple[tuple[int, int, np.ndarray | PairCosts], ...]

    def __post_init__(self) -> None:
        for i, unary in enumerate(self.unary):
            if unary.ndim != 1 or not len(unary):
                raise VerifyError(f"variable {i} needs a list of costs, one for each label, not shape {unary.shape}")
            _check_costs(unary, f"variable {i}")
        checked: set[int] = set()
        for i, j, costs in self.pairs:
            if i == j or not (0 <= i < len(self.unary) and 0 <= j < len(self.unary)):
                raise VerifyError(f"pair ({i}, {j}) is not of two of the {len(self.unary)} variables")
            shape = (len(self.unary[i]), len(self.unary[j]))
            if costs.shape != shape:
                raise VerifyError(f"pair ({i}, {j}) has costs of shape {costs.shape}, but labels {shape}")
            if id(costs) not in checked:
                _check_costs(costs.costs if isinstance(costs, PairCosts) else costs, f"pair ({i}, {j})")
                checked.add(id(costs))


def _check_costs(costs: np.ndarray, owner: str) -> None:
    if np.isnan(costs).any() or np.isneginf(costs).any():
        raise VerifyError(f"{owner} has a cost that is nan or -inf")


def evaluate(energy: Energy, labels: Sequence[int]) -> float:
    """Return the cost of a labelling: one label index for each variable."""
    unary = sum(float(costs[x]) for costs, x in zip(energy.unary, labels, strict=True))
    return unary + sum(float(costs[labels[i], labels[j]]) for i, j, costs in energy.pairs)


class Clock:
    """Counts work, which is the same on every machine, and the seconds since its creation.

    Attributes:
        spent: entries of tables that were visited.
        seconds: seconds spent, by stage.
    """

    def __init__(self, seconds: float, work: float) -> None:
        self.started = time.perf_counter()
        self.limit, self.work = seconds, work
        self.spent = 0
        self.seconds: dict[str, float] = {}

    def spend(self, entries: int) -> None:
        """Add ``entries``, visited in cost tables, to the work done so far."""
        self.spent += entries

    def over(self) -> bool:
        """Return whether the work or the time is used up."""
        return self.spent > self.work or time.perf_counter() - self.started > self.limit

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
