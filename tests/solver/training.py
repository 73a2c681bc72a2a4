"""Energies like those of a training step, to test and to time the solver with.

``python -m tests.solver.training 300 1000 7000`` prints a table of times.
"""

from __future__ import annotations

import itertools
import math
import sys
import time

import numpy as np

from shardc.solver import Energy, solve

# What an op may do along one mesh axis: the layouts of its operands, and of its result. R is replicated, P is a sum to
# be done, a number is the dim that is split.
RULES: dict[str, tuple[str, ...]] = {
    "input": ("->0", "->1", "->R"),
    "weight": ("->0", "->1", "->R"),
    "unary": ("0->0", "1->1", "2->2", "R->R"),
    "norm": ("0->0", "1->1", "R->R"),
    "attend": ("0->0", "2->2", "R->R"),
    "add": ("00->0", "11->1", "22->2", "PP->P", "RR->R"),
    "matmul": ("0R->0", "1R->1", "R1->2", "20->P", "RR->R"),
    "input gradient": ("0R->0", "1R->1", "R0->2", "21->P", "RR->R"),
    "weight gradient": ("00->P", "11->P", "R2->1", "2R->0", "RR->R"),
    "norm gradient": ("00->0", "11->1", "RR->R"),
    "unary gradient": ("00->0", "11->1", "22->2", "RR->R"),
    "attend gradient": ("00->0", "22->2", "RR->R"),
    "update": ("00->0", "11->1", "RR->R"),
    "loss": ("0->0", "1->1", "R->R"),
}
LAYOUTS = "R012P"
# Seconds for a tensor of size 1 along an axis of bandwidth 1.
RESHARD = np.array(
    [
        [0.00, 0.01, 0.01, 0.01, math.inf],
        [1.00, 0.00, 0.50, 0.50, math.inf],
        [1.00, 0.50, 0.00, 0.50, math.inf],
        [1.00, 0.50, 0.50, 0.00, math.inf],
        [2.00, 1.00, 1.00, 1.00, 0.00],
    ]
)


class Training:
    """Adds the ops of a training step one by one; ops and links of the same kind share their arrays.

    Args:
        variables: about how many ops.
        axes: how many mesh axes: an op has a strategy for each.
        seed: of the sizes of ops and of the bandwidths.
        variants: how often each strategy of the attention ops occurs, with other costs: makes hubs.
        noise: what is added to the costs of a label, at most. Without it repeated blocks are equal.
    """

    def __init__(self, variables: int, axes: int = 2, seed: int = 0, variants: int = 1, noise: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.variables, self.axes, self.variants, self.noise = variables, axes, variants, noise
        self.bandwidth = self.rng.uniform(0.5, 2.0, axes)
        self.unary: list[np.ndarray] = []
        self.pairs: list[tuple[int, int, np.ndarray]] = []
        self.strategies: list[list[tuple[str, ...]]] = []
        self.kinds: list[str] = []
        self.costs: dict[str, np.ndarray] = {}
        self.tables: dict[tuple, np.ndarray] = {}

    def energy(self) -> Energy:
        """Return the energy of a chain of blocks forward, and of their gradients backward."""
        stream = self.op("input", "embedding", 1.0)
        blocks = [self.forward(stream := self.op("unary", "cast", 1.0, (stream, 1.0)))]
        while len(self.unary) * 2.2 < self.variables:
            blocks.append(self.forward(blocks[-1][-1]))
        gradient = self.op("loss", "loss", 2.0, (blocks[-1][-1], 1.0))
        for values in reversed(blocks):
            gradient = self.backward(gradient, values)
        return Energy(tuple(self.unary), tuple(self.pairs))

    def forward(self, stream: int) -> tuple[int, ...]:
        """Add an attention and an MLP with residuals; the values that the backward pass reads, the stream last."""
        norm = self.op("norm", "norm", 0.1, (stream, 1.0))
        qkv, w_qkv = self.linear("qkv", norm, 1.0, 3.0)
        attended = self.op("attend", "attend", 2.0, (qkv, 3.0), variants=self.variants)
        out, w_out = self.linear("out", attended, 1.0, 1.0)
        middle = self.op("add", "add", 0.1, (stream, 1.0), (out, 1.0))
        norm_2 = self.op("norm", "norm", 0.1, (middle, 1.0))
        up, w_up = self.linear("up", norm_2, 1.0, 4.0)
        act = self.op("unary", "act", 0.4, (up, 4.0))
        down, w_down = self.linear("down", act, 4.0, 1.0)
        end = self.op("add", "add", 0.1, (middle, 1.0), (down, 1.0))
        return norm, qkv, w_qkv, attended, w_out, stream, norm_2, up, w_up, act, w_down, middle, end

    def linear(self, name: str, value: int, size: float, out: float) -> tuple[int, int]:
        """Add a weight and a matmul with it."""
        weight = self.op("weight", f"w_{name}", 0.3 * out)
        return self.op("matmul", name, 4.0 * out, (value, size), (weight, 0.5 * out * size)), weight

    def backward(self, gradient: int, values: tuple[int, ...]) -> int:
        """Add the gradients of a block and the updates of its weights."""
        norm, qkv, w_qkv, attended, w_out, stream, norm_2, up, w_up, act, w_down, middle, _ = values
        d_act = self.linear_gradient("down", gradient, act, w_down, 1.0, 4.0)
        d_up = self.op("unary gradient", "d_act", 0.4, (d_act, 4.0), (up, 4.0))
        d_norm_2 = self.linear_gradient("up", d_up, norm_2, w_up, 4.0, 1.0)
        d_middle = self.op("norm gradient", "d_norm", 0.2, (d_norm_2, 1.0), (middle, 1.0))
        middle_gradient = self.op("add", "d_add", 0.1, (gradient, 1.0), (d_middle, 1.0))
        d_attended = self.linear_gradient("out", middle_gradient, attended, w_out, 1.0, 1.0)
        d_qkv = self.op("attend gradient", "d_attend", 4.0, (d_attended, 1.0), (qkv, 3.0), variants=self.variants)
        d_norm = self.linear_gradient("qkv", d_qkv, norm, w_qkv, 3.0, 1.0)
        d_stream = self.op("norm gradient", "d_norm", 0.2, (d_norm, 1.0), (stream, 1.0))
        return self.op("add", "d_add", 0.1, (middle_gradient, 1.0), (d_stream, 1.0))

    def linear_gradient(self, name: str, gradient: int, value: int, weight: int, size: float, out: float) -> int:
        """Add both gradients of a matmul, and the update of its weight."""
        step = self.op("weight gradient", f"dw_{name}", 4.0 * size, (value, out), (gradient, size))
        self.op("update", f"update_{name}", 0.2 * size, (step, 0.5 * size * out), (weight, 0.5 * size * out))
        return self.op("input gradient", f"dx_{name}", 4.0 * size, (gradient, size), (weight, 0.5 * size * out))

    def op(self, rule: str, name: str, work: float, *operands: tuple[int, float], variants: int = 1) -> int:
        """Add an op that does some work, and pairs with the ops that make its operands, of the sizes given."""
        strategies = list(itertools.product(RULES[rule], repeat=self.axes)) * variants
        if name not in self.costs:
            split = np.array([sum("R->R" not in part and "RR" not in part for part in each) for each in strategies])
            self.costs[name] = work * 3.0**-split * self.rng.uniform(0.9, 1.1, len(split))
        costs = self.costs[name]
        self.unary.append(costs + self.noise * self.rng.random(len(costs)) if self.noise else costs)
        self.strategies.append(strategies)
        self.kinds.append(name)
        index = len(self.unary) - 1
        for position, (source, size) in enumerate(operands):
            key = (self.kinds[source], name, position, size)
            if key not in self.tables:
                self.tables[key] = size * self.reshard(self.strategies[source], strategies, position)
            self.pairs.append((source, index, self.tables[key]))
        return index

    def reshard(self, sources: list[tuple[str, ...]], targets: list[tuple[str, ...]], position: int) -> np.ndarray:
        """Return the cost of moving a tensor from where each strategy leaves it to where each one needs it."""
        left = np.array([[LAYOUTS.index(part[-1]) for part in each] for each in sources])
        needed = np.array([[LAYOUTS.index(part[position]) for part in each] for each in targets])
        costs = [RESHARD[left[:, a][:, None], needed[:, a]] / self.bandwidth[a] for a in range(self.axes)]
        return sum(costs[1:], costs[0])


def main(counts: list[str]) -> None:
    """Print how long energies of some sizes take."""
    print("| variables | pairs | labels | most | noise | left | iterations | branches | gap | seconds, of the CPU |")
    print("| --- " * 10 + "|")
    for count, (axes, variants), noise in itertools.product(map(int, counts), ((2, 1), (2, 20), (3, 1)), (0.0, 0.3)):
        energy = Training(count, axes=axes, variants=variants, noise=noise).energy()
        started, busy = time.perf_counter(), time.process_time()
        solution = solve(energy)
        taken = f"{time.perf_counter() - started:.1f}, {time.process_time() - busy:.1f}"
        sizes = [len(costs) for costs in energy.unary]
        row = [len(sizes), len(energy.pairs), f"{np.mean(sizes):.0f}", max(sizes), noise, solution.left]
        row += [solution.iterations, solution.branches, f"{solution.gap:.0e}", taken]
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
