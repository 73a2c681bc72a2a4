"""Energies to test and to time the solver with. All follow from a seed."""

from __future__ import annotations

import itertools
import math

import numpy as np

from shardc.solver import Energy, evaluate


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


def least(energy: Energy) -> float:
    """Return the least cost, by trying every labelling."""
    labellings = itertools.product(*(range(len(costs)) for costs in energy.unary))
    return min(evaluate(energy, labels) for labels in labellings)


def grid(rows: int, columns: int, labels: int, seed: int, strength: float = 1.0) -> Energy:
    """Return a grid of random costs: frustrated, so that the linear relaxation is not integral."""
    rng = np.random.default_rng(seed)
    at = {(r, c): r * columns + c for r in range(rows) for c in range(columns)}
    pairs = []
    for (r, c), i in at.items():
        for neighbour in ((r + 1, c), (r, c + 1)):
            if neighbour in at:
                pairs.append((i, at[neighbour], strength * rng.normal(size=(labels, labels))))
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


AXIS_STATES = ("replicated", "split 0", "split 1", "split 2", "partial")


class TrainingGraph:
    """An energy like that of a training step: blocks in a chain, forward and backward, with residuals and weights.

    A label is a state for each mesh axis. A pair costs what it takes to move a tensor from one layout to another, per
    axis, scaled with the size of the tensor; partial values cannot be made from others. Blocks share their tables.
    """

    def __init__(self, variables: int, axes: int = 2, seed: int = 0, shared: bool = True, noise: float = 0.05) -> None:
        self.rng = np.random.default_rng(seed)
        self.axes, self.shared, self.noise = axes, shared, noise
        self.states = list(itertools.product(range(len(AXIS_STATES)), repeat=axes))
        self.unary: list[np.ndarray] = []
        self.kinds: list[np.ndarray] = []
        self.pairs: list[tuple[int, int, np.ndarray]] = []
        self.tables: dict[tuple, np.ndarray] = {}
        self.templates: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.variables = variables

    def energy(self) -> Energy:
        """Return the energy, of about as many variables as were asked for."""
        blocks = max(1, (self.variables - 4) // 20)
        stream, saved = self.op("embed", 1.0), []
        for block in range(blocks):
            stream, ops = self.forward(stream, block)
            saved.append(ops)
        gradient = self.op("loss", 0.1)
        self.link(stream, gradient, 1.0)
        for ops in reversed(saved):
            gradient = self.backward(gradient, ops)
        return Energy(tuple(self.unary), tuple(self.pairs))

    def forward(self, stream: int, block: int) -> tuple[int, list[int]]:
        """Add two residual branches of norm, matmul, act, matmul, add."""
        ops = []
        for half, width in (("attention", 1.0), ("mlp", 4.0)):
            norm, up = self.op(f"{half} norm", 1.0), self.op(f"{half} up", width)
            act, down, add = self.op(f"{half} act", width), self.op(f"{half} down", 1.0), self.op(f"{half} add", 1.0)
            self.chain((stream, norm, 1.0), (norm, up, 1.0), (up, act, width), (act, down, width), (down, add, 1.0))
            self.link(stream, add, 1.0)
            stream = add
            ops += [norm, up, act, down, add]
        return stream, ops

    def backward(self, gradient: int, ops: list[int]) -> int:
        """Add the gradients of a block, each of which also reads a value of the forward pass."""
        for half, width in (("mlp", 4.0), ("attention", 1.0)):
            norm, up, act, down, _ = ops[5:] if half == "mlp" else ops[:5]
            d_down, d_act = self.op(f"{half} d_down", width), self.op(f"{half} d_act", width)
            d_up, d_norm, d_add = self.op(f"{half} d_up", 1.0), self.op(f"{half} d_norm", 1.0), self.op("d_add", 1.0)
            self.chain(
                (gradient, d_down, 1.0), (d_down, d_act, width), (d_act, d_up, width), (d_up, d_norm, 1.0),
                (d_norm, d_add, 1.0), (gradient, d_add, 1.0), (act, d_down, width), (up, d_act, width),
                (norm, d_up, 1.0), (down, d_down, 0.5), (d_down, up, 0.2),
            )  # fmt: skip
            gradient = d_add
        return gradient

    def op(self, kind: str, size: float) -> int:
        """Add an op: its strategies, and what each computes and holds."""
        if kind not in self.templates:
            kept = np.sort(self.rng.choice(len(self.states), max(2, len(self.states) - self.rng.integers(0, 8)), False))
            split = np.array([sum(state in (1, 2, 3) for state in self.states[x]) for x in kept])
            costs = size * 2.0**-split * self.rng.uniform(0.5, 1.5) + self.noise * self.rng.random(len(kept))
            self.templates[kind] = (kept, costs)
        kept, costs = self.templates[kind]
        self.unary.append(costs if self.shared else costs + 1e-3 * self.rng.random(len(costs)))
        self.kinds.append(kept)
        return len(self.unary) - 1

    def chain(self, *links: tuple[int, int, float]) -> None:
        for source, target, size in links:
            self.link(source, target, size)

    def link(self, source: int, target: int, size: float) -> None:
        """Add the cost of moving a tensor of some size from the layout of one op to that of another."""
        key = (self.kinds[source].tobytes(), self.kinds[target].tobytes(), size)
        if key not in self.tables:
            change = size * self.rng.uniform(0.2, 0.4) * np.array(
                [
                    [0.0, 0.0, 0.0, 0.0, math.inf],
                    [1.0, 0.0, 0.5, 0.5, math.inf],
                    [1.0, 0.5, 0.0, 0.5, math.inf],
                    [1.0, 0.5, 0.5, 0.0, math.inf],
                    [2.0, 1.0, 1.0, 1.0, 0.0],
                ]
            )  # fmt: skip
            rows, columns = (np.array([self.states[x] for x in self.kinds[op]]) for op in (source, target))
            self.tables[key] = sum(change[rows[:, axis][:, None], columns[:, axis]] for axis in range(self.axes))
        self.pairs.append((source, target, self.tables[key]))
