"""Small and frustrated energies to test the solver with. All follow from a seed."""

from __future__ import annotations

import itertools
import math

import numpy as np

from shardc.solver import Energy, PairCosts, evaluate


def small(seed: int) -> Energy:
    """Return 3 to 7 variables of 2 to 5 labels, with ties, cycles, shared tables, repeated pairs and some inf."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 6, rng.integers(3, 8))
    forbidden, whole = rng.choice([0.0, 0.1, 0.35]), rng.random() < 0.5

    def costs(*shape: int) -> np.ndarray:
        values = rng.integers(-3, 4, shape).astype(float) if whole else rng.normal(size=shape)
        return np.where(rng.random(shape) < forbidden, math.inf, values)

    shared: dict[tuple[int, int], np.ndarray] = {}
    pairs = []
    for i, j in itertools.permutations(range(len(sizes)), 2):
        if rng.random() < 0.4:
            shape = (int(sizes[i]), int(sizes[j]))
            table = shared.setdefault(shape, costs(*shape)) if rng.random() < 0.5 else costs(*shape)
            pairs.append((i, j, table))
    return Energy(tuple(costs(int(size)) for size in sizes), tuple(pairs))


def alike(seed: int) -> Energy:
    """Return variables of up to 9 labels, most of which cost the same with the labels of some neighbour or of all."""
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(3, 10, rng.integers(3, 6))]
    shared: dict[tuple[int, int], PairCosts] = {}
    pairs: list[tuple[int, int, np.ndarray | PairCosts]] = []
    for i, j in itertools.permutations(range(len(sizes)), 2):
        if rng.random() < 0.5:
            few = rng.integers(1, 4, 2)
            costs = np.where(rng.random(few) < rng.choice([0.0, 0.4]), math.inf, rng.normal(size=few))
            classes = rng.integers(0, few[0], sizes[i]), rng.integers(0, few[1], sizes[j])
            pair = PairCosts.by_class(costs, *classes)
            pair = shared.setdefault((sizes[i], sizes[j]), pair) if rng.random() < 0.5 else pair
            pairs.append((i, j, pair if rng.random() < 0.7 else pair.dense()))
    return Energy(tuple(rng.normal(size=size) for size in sizes), tuple(pairs))


def least(energy: Energy) -> float:
    """Return the least cost, by trying every labelling."""
    labellings = itertools.product(*(range(len(costs)) for costs in energy.unary))
    return min(evaluate(energy, labels) for labels in labellings)


def grid(rows: int, columns: int, labels: int, seed: int, strength: float = 1.0, classes: int = 0) -> Energy:
    """Return a grid of random costs: frustrated, so that the linear relaxation is not integral.

    Args:
        classes: how many labels differ in what they cost with a neighbour's; all if not given.
    """
    rng = np.random.default_rng(seed)
    at = {(r, c): r * columns + c for r in range(rows) for c in range(columns)}
    pairs = []
    for (r, c), i in at.items():
        for neighbour in ((r + 1, c), (r, c + 1)):
            if neighbour in at:
                few = classes or labels
                of_labels = rng.integers(0, few, (2, labels)) if classes else np.tile(np.arange(labels), (2, 1))
                costs = strength * rng.normal(size=(few, few))
                pairs.append((i, at[neighbour], costs[np.ix_(*of_labels)]))
    return Energy(tuple(rng.normal(size=labels) for _ in at), tuple(pairs))


def dense(variables: int, labels: int, seed: int, density: float = 1.0) -> Energy:
    """Return variables that are nearly all paired, and prefer to differ."""
    rng = np.random.default_rng(seed)
    pairs = [
        (i, j, np.eye(labels) * rng.random() + 0.01 * rng.random((labels, labels)))
        for i, j in itertools.combinations(range(variables), 2)
        if rng.random() < density
    ]
    return Energy(tuple(0.01 * rng.random(labels) for _ in range(variables)), tuple(pairs))
