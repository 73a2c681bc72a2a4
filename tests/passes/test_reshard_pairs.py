"""Every pair of layouts: planned, spelled and run on all ranks in lockstep, the result compared with the tensor."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from math import prod

import pytest
import torch

from shardc.cost.model import CostModel
from shardc.cost.redistribute import Step, steps
from shardc.ir.layout import REDUCE_OPS, Layout
from shardc.ir.mesh import Mesh
from shardc.passes.lower.collectives import lower_collective
from shardc.runtime.sim.lockstep import Lockstep, PerRank
from tests.layouts import every_layout

# Only bytes count, so that plans use every kind of step; and the default, under which few messages count.
BYTES = CostModel(latency=1e-9, hop=0, bandwidth=1, memory_bandwidth=1e15, kinds=())
DEFAULT = CostModel()

SMALL = [
    (Mesh(a=2, b=2), (16,), (4,)),
    (Mesh(a=2, b=2), (16, 16), (4, 4)),
    pytest.param(Mesh(a=2, b=2), (8, 8, 8), (4, 4, 4), marks=pytest.mark.slow),
    (Mesh(a=2, b=3), (36,), (6,)),
    pytest.param(Mesh(a=2, b=3), (12, 36), (2, 6), marks=pytest.mark.slow),
    pytest.param(Mesh(a=2, b=3), (12, 12, 12), (2, 2, 6), marks=pytest.mark.slow),
    (Mesh(a=4, b=2), (64,), (8,)),
    (Mesh(a=4, b=2), (16, 64), (2, 8)),
    pytest.param(Mesh(a=4, b=2), (16, 16, 16), (4, 2, 4), marks=pytest.mark.slow),
    pytest.param(Mesh(a=2, b=2, c=2), (64,), (8,), marks=pytest.mark.slow),
    pytest.param(Mesh(a=2, b=2, c=2), (16, 16), (), marks=pytest.mark.slow),
]
LARGE = [
    (Mesh(a=2, b=2, c=2), (16, 16), (4, 4)),
    (Mesh(a=2, b=2, c=2), (8, 8, 8), (2, 4, 2)),
]


class Pairs:
    """Runs pairs of layouts of one tensor and counts those whose result is not the tensor."""

    def __init__(self, mesh: Mesh, shape: Sequence[int], layouts: Iterable[Layout]) -> None:
        self.sim = Lockstep(mesh)
        self.tensor = torch.arange(1, prod(shape) + 1, dtype=torch.float64).reshape(tuple(shape))
        generator = torch.Generator().manual_seed(0)
        self.layouts = list(layouts)
        self.values = {layout: self.sim.scatter_terms(self.tensor, layout, generator) for layout in self.layouts}
        self.after: dict[tuple[Step, ...], PerRank] = {}
        self.tried = 0
        self.wrong: list[str] = []

    def run(self, src: Layout, dst: Layout, cost: CostModel) -> None:
        plan = steps(src, dst, 8, cost)
        self.tried += 1
        try:
            right = torch.equal(self.sim.assemble(self._run(src, plan), dst), self.tensor)
        except AssertionError as error:
            right, plan = False, (*plan, error)  # type: ignore[assignment]
        if not right:
            self.wrong.append(f"{src} -> {dst}: {plan}")

    def _run(self, src: Layout, plan: tuple[Step, ...]) -> PerRank:
        if not plan:
            return self.values[src]
        if plan not in self.after:
            self.after[plan] = lower_collective(plan[-1], self._run(src, plan[:-1]), self.sim)
        return self.after[plan]

    def report(self, capsys: pytest.CaptureFixture[str]) -> None:
        with capsys.disabled():
            what = f"{self.sim.mesh}, {'x'.join(map(str, self.tensor.shape))}: {len(self.layouts)} layouts"
            print(f"\n{what}, {self.tried} pairs, {len(self.wrong)} wrong")
        assert not self.wrong, "\n".join(self.wrong[:20])


def all_pairs(mesh: Mesh, shape: Sequence[int], majors: Sequence[int], costs: Sequence[CostModel]) -> Pairs:
    pairs = Pairs(mesh, shape, every_layout(mesh, shape, majors))
    for src in pairs.layouts:
        pairs.after.clear()
        for dst in pairs.layouts:
            for cost in costs:
                pairs.run(src, dst, cost)
    return pairs


@pytest.mark.parametrize(("mesh", "shape", "majors"), SMALL, ids=str)
def test_every_pair(
    mesh: Mesh, shape: tuple[int, ...], majors: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    all_pairs(mesh, shape, majors, [BYTES]).report(capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "shape", "majors"), LARGE, ids=str)
def test_sampled_pairs_of_three_axes(
    mesh: Mesh, shape: tuple[int, ...], majors: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = Pairs(mesh, shape, every_layout(mesh, shape, majors))
    draw = random.Random(0)
    for _ in range(2000):
        pairs.run(draw.choice(pairs.layouts), draw.choice(pairs.layouts), BYTES)
    pairs.report(capsys)


def test_pairs_that_are_too_many_moves_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """On larger axes the search gives up being the cheapest; it stays right, and short."""
    mesh, shape = Mesh(dp=4, cp=2, tp=4), (32, 32)
    draw = random.Random(1)
    every = every_layout(mesh, shape, ())
    drawn = [(draw.choice(every), draw.choice(every)) for _ in range(40)]
    pairs = Pairs(mesh, shape, {layout for pair in drawn for layout in pair})
    for src, dst in drawn:
        pairs.run(src, dst, BYTES)
        assert len(steps(src, dst, 8, BYTES)) <= 8
    pairs.report(capsys)


@pytest.mark.parametrize("op", [op for op in REDUCE_OPS if op != "sum"])
def test_every_reduction(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    mesh, shape = Mesh(a=2, b=3), (12, 6)
    pairs = Pairs(mesh, shape, every_layout(mesh, shape, (2,), ops=(op,)))
    for src in pairs.layouts:
        for dst in pairs.layouts:
            pairs.run(src, dst, BYTES)
    pairs.report(capsys)


def test_latency_bound_plans(capsys: pytest.CaptureFixture[str]) -> None:
    all_pairs(Mesh(a=4, b=2), (16, 16), (2, 4), [DEFAULT]).report(capsys)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("mesh", "shape", "majors"), LARGE, ids=str)
def test_every_pair_of_three_axes(
    mesh: Mesh, shape: tuple[int, ...], majors: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    all_pairs(mesh, shape, majors, [BYTES, DEFAULT]).report(capsys)
