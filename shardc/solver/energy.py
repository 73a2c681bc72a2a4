"""The problem that the solver minimizes (costs of variables and of pairs of variables), and its budget of work."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardc.errors import ShardcError, VerifyError


@dataclass(frozen=True, eq=False)
class PairCosts:
    """Cost matrix of two variables, stored once per class: labels with equal rows (or columns) form a class.

    An op has thousands of strategies, but the cost of a reshard depends only on the few hundred layouts that they
    produce. No array is ever changed in place.

    Attributes:
        costs: float64, [classes of the first variable, classes of the second].
        rows: class of each label of the first variable; every class has a label.
        columns: class of each label of the second variable; every class has a label.

    >>> pair = PairCosts.of(np.array([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]))
    >>> pair.costs, pair[1, 2], pair.shape
    (array([[1., 2.]]), 2.0, (2, 3))
    """

    costs: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, table: np.ndarray) -> PairCosts:
        """Return pair costs from a cost per pair of labels; classes are found by comparing rows and columns."""
        rows, first = _classes(table)
        columns, second = _classes(table[first].T)
        return cls(table[np.ix_(first, second)], rows, columns)

    @classmethod
    def by_class(cls, costs: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> PairCosts:
        """Return pair costs, given the costs of classes and each label's class; classes without labels are dropped."""
        (used, small), (also, few) = (np.unique(classes, return_inverse=True) for classes in (rows, columns))
        if costs.shape == (len(used), len(also)):
            return cls(costs, rows, columns)
        return cls(np.ascontiguousarray(costs[np.ix_(used, also)]), small, few)

    @cached_property
    def cheapest(self) -> np.ndarray:
        """For each class of the first variable, the class of the second that is cheapest with it."""
        return self.costs.argmin(axis=1)

    @cached_property
    def finite(self) -> tuple[np.ndarray, float]:
        """Return (bool array of the costs that are finite, their share of all costs)."""
        finite = np.isfinite(self.costs)
        return finite, float(finite.mean())

    @cached_property
    def terms(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return (a, b) with ``costs[x, y] = a[x] + b[y]``; None if the costs are no such sums."""
        costs = self.costs
        if len(costs) == 1:
            return np.zeros(1), costs[0]
        if costs.shape[1] == 1:
            return costs[:, 0], np.zeros(1)
        if not self.finite[0].all():
            return None
        rows, columns = costs[:, 0], costs[0] - costs[0, 0]
        error = np.abs(costs - rows[:, None] - columns).max()
        return (rows, columns) if error <= 1e-15 * np.abs(costs).max() else None

    @property
    def shape(self) -> tuple[int, int]:
        """Return (number of labels of the first variable, number of labels of the second)."""
        return len(self.rows), len(self.columns)

    @property
    def size(self) -> int:
        """Return the number of stored costs, which is one per pair of classes."""
        return int(self.costs.size)

    @property
    def transposed(self) -> PairCosts:
        """Return the same costs with the second variable first."""
        return PairCosts(self.costs.T, self.columns, self.rows)

    def __getitem__(self, labels: tuple[int, int]) -> float:
        return float(self.costs[self.rows[labels[0]], self.columns[labels[1]]])

    def row(self, label: int) -> np.ndarray:
        """Return the costs of one label of the first variable with every label of the second."""
        return self.costs[self.rows[label]][self.columns]

    def column(self, label: int) -> np.ndarray:
        """Return the costs of one label of the second variable with every label of the first."""
        return self.costs[:, self.columns[label]][self.rows]

    def dense(self) -> np.ndarray:
        """Return the cost of every pair of labels, as a matrix."""
        return self.costs[np.ix_(self.rows, self.columns)]

    def keep(self, rows: np.ndarray | None, columns: np.ndarray | None) -> PairCosts:
        """Return the pair costs of only some labels: those of the first variable at positions ``rows``, and those of
        the second at ``columns``. None keeps all labels.
        """
        return PairCosts.by_class(
            self.costs,
            self.rows if rows is None else self.rows[rows],
            self.columns if columns is None else self.columns[columns],
        )

    def sum_size(self, rows: np.ndarray, columns: np.ndarray) -> int:
        """Return how many costs a sum of this and another table would store. ``rows`` and ``columns`` are the classes
        of labels of the other table.
        """
        return int(np.unique(_joint(self.rows, rows)).size * np.unique(_joint(self.columns, columns)).size)

    def __add__(self, other: PairCosts) -> PairCosts:
        _, some, rows = np.unique(_joint(self.rows, other.rows), return_index=True, return_inverse=True)
        _, also, columns = np.unique(_joint(self.columns, other.columns), return_index=True, return_inverse=True)
        parts = (pair.costs[np.ix_(pair.rows[some], pair.columns[also])] for pair in (self, other))
        return PairCosts(np.add(*parts), rows, columns)


def least_of_classes(classes: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return the least cost of a label in each class; ``classes`` and ``costs`` have one entry per label."""
    out = np.full(int(classes.max()) + 1, np.inf)
    np.minimum.at(out, classes, costs)
    return out


def _joint(classes: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Combine two divisions of the same labels into classes: return one number per label, equal for labels that are in
    the same class in both.
    """
    joint: np.ndarray = classes * (int(other.max()) + 1) + other
    return joint


def _classes(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group equal rows of ``table`` into classes; return (class of each row, index of the first row of each class)."""
    seen: dict[bytes, int] = {}
    classes = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in np.ascontiguousarray(table)])
    return classes, np.unique(classes, return_index=True)[1]


class Infeasible(ShardcError, ValueError):
    """Raised if every labelling costs inf or, if a ceiling is given, no less than the ceiling. The text names the
    variable or pair without a finite label, if known.
    """


@dataclass(frozen=True, eq=False)
class Energy:
    """A sum of costs of variables and of pairs of variables, to be minimized; inf forbids a label or a pair of labels.

    Args:
        unary: for each variable, the cost of each of its labels, float64.
        pairs: tuples ``(i, j, cost)``: ``cost[x, y]`` is added if variable ``i`` has label ``x`` and ``j`` has ``y``.
            It is an array or `PairCosts`, and several pairs may share it. Several costs of the same two variables are
            added.

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
    """Raise VerifyError, which names ``owner``, if a cost is nan or -inf."""
    if np.isnan(costs).any() or np.isneginf(costs).any():
        raise VerifyError(f"{owner} has a cost that is nan or -inf")


def evaluate(energy: Energy, labels: Sequence[int]) -> float:
    """Return the cost of a labelling: ``labels`` has one label index per variable."""
    unary = sum(float(costs[x]) for costs, x in zip(energy.unary, labels, strict=True))
    return unary + sum(float(costs[labels[i], labels[j]]) for i, j, costs in energy.pairs)


class Clock:
    """The budget of work (the same on every machine) and of seconds since its creation.

    Attributes:
        spent: number of table entries visited.
        seconds: stage -> seconds spent in it.
    """

    def __init__(self, seconds: float, work: float) -> None:
        self.started = time.perf_counter()
        self.limit, self.work = seconds, work
        self.spent = 0
        self.seconds: dict[str, float] = {}

    def spend(self, entries: int) -> None:
        """Count ``entries`` of cost tables as visited."""
        self.spent += entries

    def over(self) -> bool:
        """Return whether the work or the time is used up."""
        return self.spent > self.work or time.perf_counter() - self.started > self.limit

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Context manager that adds the seconds of the block to the total of the stage ``name``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
