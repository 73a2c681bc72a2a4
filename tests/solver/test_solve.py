"""Least costs and bounds: against trying every labelling, and against an integer program where highspy is installed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardc.errors import VerifyError
from shardc.solver import Energy, Infeasible, PairCosts, Solution, branch, evaluate, reduce, solve
from tests.solver.energies import alike, dense, grid, least, small
from tests.solver.training import Training


def check(energy: Energy, optimum: float, **options: float) -> Solution:
    """Solve, and compare value and bound with the optimum."""
    solution = solve(energy, **options)
    assert solution.value == evaluate(energy, solution.labels)
    assert solution.value == pytest.approx(optimum, abs=1e-9)
    assert solution.bound == pytest.approx(optimum, abs=1e-9)
    assert solution.bound <= solution.value
    return solution


@pytest.mark.parametrize("table", [20_000_000, 30, 1], ids=["eliminate", "some", "branch"])
def test_500_small_energies_are_solved(table: int) -> None:
    for seed in range(500):
        energy = small(seed)
        optimum = least(energy)
        if optimum < math.inf:
            check(energy, optimum, table=table)
        else:
            with pytest.raises(Infeasible):
                solve(energy, table=table)


@pytest.mark.parametrize("table", [20_000_000, 1], ids=["eliminate", "branch"])
def test_labels_of_one_class_cost_what_a_whole_table_says(table: int) -> None:
    for seed in range(150):
        energy = alike(seed)
        whole = tuple((i, j, c.dense() if isinstance(c, PairCosts) else c) for i, j, c in energy.pairs)
        optimum = least(Energy(energy.unary, whole))
        if optimum < math.inf:
            check(energy, optimum, table=table)
        else:
            with pytest.raises(Infeasible):
                solve(energy, table=table)


@pytest.mark.parametrize("seed", range(8))
def test_messages_between_classes_are_those_between_labels(seed: int) -> None:
    """Elimination goes through whole tables, message passing and what it drops through classes."""
    energy = grid(6, 6, 12, seed, classes=6)
    check(energy, solve(energy).value, table=100)


def test_large_tables_are_gone_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces so small that small energies have several of each."""
    for name, size in (("CHUNK", 4), ("BLOCK", 2), ("TRIED", 1), ("PROBES", 2), ("MANY", 7)):
        monkeypatch.setattr(reduce, name, size)
    monkeypatch.setattr(branch, "CHUNK", 4)
    for make in (alike, small):
        for seed in range(60):
            energy = make(seed)
            optimum = least(energy)
            if optimum < math.inf:
                check(energy, optimum, table=1)


def test_a_chain_is_solved_by_simple_rules() -> None:
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=(4, 4)) for _ in range(199)]
    energy = Energy(tuple(rng.normal(size=4) for _ in range(200)), tuple((i, i + 1, t) for i, t in enumerate(tables)))
    costs = energy.unary[0]
    for table, unary in zip(tables, energy.unary[1:], strict=True):
        costs = (costs[:, None] + table).min(axis=0) + unary
    assert check(energy, costs.min()).left == 0


@pytest.mark.parametrize("seed", range(8))
def test_frustrated_grids_are_solved_by_branching_as_by_elimination(seed: int) -> None:
    energy = grid(5, 5, 4, seed)
    optimum = solve(energy).value
    check(energy, optimum, table=100)


def test_three_colours_of_four_that_must_differ_are_found_infeasible_by_search() -> None:
    """Every pair of labels has support, so that only the search can tell."""
    differ = np.where(np.eye(3), math.inf, 0.0)
    pairs = tuple((i, j, differ) for i in range(4) for j in range(i))
    for table in (1, 1000):
        with pytest.raises(Infeasible):
            solve(Energy((np.zeros(3),) * 4, pairs), table=table)
    check(Energy((np.arange(3.0),) * 3, pairs[:3]), 3.0, table=1)


@pytest.mark.parametrize("density", [1.0, 0.4])
def test_an_energy_whose_relaxation_is_not_integral_needs_branches(density: float) -> None:
    energy = dense(9, 3, seed=1, density=density)
    optimum = least(energy)
    assert check(energy, optimum, table=1).branches > 0
    assert check(energy, optimum).branches == 0


def test_infeasible_names_the_variable_or_the_pair() -> None:
    one, none = np.zeros(2), np.full(2, math.inf)
    with pytest.raises(Infeasible, match="variable 1 has no label of finite cost"):
        solve(Energy((one, none), ()))
    with pytest.raises(Infeasible, match="variables 0 and 2 have no labels of finite cost together"):
        solve(Energy((one, one, one), ((2, 0, np.full((2, 2), math.inf)),)))


@pytest.mark.parametrize(
    "limit", [{"seconds": 0.0}, {"seconds": 0.01}, {"seconds": 0.05}, {"work": 0}, {"work": 3000}], ids=str
)
def test_value_and_bound_hold_at_a_limit(limit: dict[str, float]) -> None:
    energies = [(grid(6, 6, 6, seed), 20_000_000) for seed in range(3)] + [(dense(9, 3, 1), 20_000_000)]
    energies += [(small(seed), 20_000_000) for seed in range(100)]
    for energy, table in energies:
        try:
            optimum = solve(energy, table=table).value
        except Infeasible:
            continue
        hurried = solve(energy, table=1, **limit)
        assert hurried.value == evaluate(energy, hurried.labels)
        assert hurried.bound <= optimum + 1e-9
        assert hurried.value >= optimum - 1e-9
        assert hurried.gap >= 0


@pytest.mark.parametrize("table", [1, 20_000_000])
def test_a_ceiling_leaves_what_is_below_it(table: int) -> None:
    """The optimum where it costs less, and no answer where it does not, for which less work is enough."""
    energies = [grid(6, 6, 6, seed) for seed in range(3)] + [dense(9, 3, 1)] + [small(seed) for seed in range(100)]
    works = []
    for energy in energies:
        try:
            free = solve(energy, table=table)
        except Infeasible:
            continue
        above, below = free.value + 0.1 * abs(free.value) + 1e-6, free.value - 0.1 * abs(free.value) - 1e-6
        found = solve(energy, table=table, ceiling=above)
        assert found.value == pytest.approx(free.value, rel=1e-9, abs=1e-9) and found.gap < 1e-9
        with pytest.raises(Infeasible, match="no labelling costs less than"):
            solve(energy, table=table, ceiling=below)
        works.append((free.iterations, found.iterations))
    assert len(works) > 50 and sum(after for _, after in works) <= sum(before for before, _ in works)


@pytest.mark.parametrize("gap", [0.0, 1e-3, 0.05])
def test_a_gap_bounds_what_a_labelling_misses(gap: float) -> None:
    """The value is within the gap of the optimum, the bound is one, and a ceiling is kept as it is."""
    energies = [grid(6, 6, 6, seed) for seed in range(3)] + [dense(9, 3, 1), Training(100, noise=0.3).energy()]
    iterations = []
    for energy in energies:
        best = solve(energy)
        rough = solve(energy, table=100, gap=gap)
        assert best.value - 1e-9 <= rough.value <= best.value + gap * abs(rough.value) + 1e-9
        assert rough.bound <= best.value + 1e-9 and rough.gap <= gap + 1e-9
        at_ceiling = solve(energy, table=100, gap=gap, ceiling=best.value + 1e-6 * abs(best.value))
        assert at_ceiling.value == pytest.approx(best.value, rel=1e-6)
        iterations.append((rough.iterations, solve(energy, table=100).iterations))
    assert sum(few for few, _ in iterations) <= sum(all_ for _, all_ in iterations)
    if gap == 0.05:
        assert sum(few for few, _ in iterations) < sum(all_ for _, all_ in iterations)


def test_likely_labels_are_searched_exactly() -> None:
    """Where tables suffice for a few labels of each variable, fewer sweeps are needed."""
    energy = Training(60, axes=3, noise=0.3).energy()
    swept, searched = solve(energy, table=2_000), solve(energy, table=100_000)
    assert searched.value == pytest.approx(swept.value, abs=1e-9)
    assert searched.iterations < swept.iterations


def test_less_work_finds_no_more() -> None:
    """With little work a hard energy stays open; the limit, and not the time, says where."""
    energy = dense(9, 3, 1)
    open_ones = [solve(energy, table=1, work=work) for work in (0, 3000, 1e9)]
    assert open_ones[0].gap > open_ones[1].gap > 0.1 and open_ones[2].gap < 1e-12
    assert [one.iterations for one in open_ones] == sorted(one.iterations for one in open_ones)
    assert solve(energy, table=1, work=3000) == open_ones[1]


ROOT = Path(__file__).parents[2]
PRINT_SOLUTIONS = """
from shardc.solver import solve
from tests.solver.energies import dense, grid
from tests.solver.training import Training
for energy, table in ((grid(5, 5, 4, 0), 100), (dense(9, 3, 1), 1), (Training(100).energy(), 1000)):
    solution = solve(energy, table=table)
    print(solution.labels, solution.value.hex(), solution.bound.hex(), solution.iterations, solution.branches)
"""


@pytest.mark.slow
def test_every_run_gives_the_same_solution() -> None:
    texts = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PRINT_SOLUTIONS]
        run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        texts.add(run.stdout)
    assert len(texts) == 1


def test_energies_that_are_not_valid_are_refused() -> None:
    one = np.zeros(2)
    with pytest.raises(VerifyError, match=r"pair \(0, 1\) has costs of shape \(2, 3\), but labels \(2, 2\)"):
        Energy((one, one), ((0, 1, np.zeros((2, 3))),))
    with pytest.raises(VerifyError, match=r"pair \(0, 0\) is not of two of the 1 variables"):
        Energy((one,), ((0, 0, np.zeros((2, 2))),))
    with pytest.raises(VerifyError, match="variable 0 has a cost that is nan or -inf"):
        Energy((np.array([0.0, math.nan]),), ())
    with pytest.raises(VerifyError, match="variable 0 needs a list of costs"):
        Energy((np.zeros(0),), ())


def integer_program(energy: Energy) -> float:
    """Return the least cost by the local-polytope integer program of HiGHS."""
    highspy = pytest.importorskip("highspy")
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    labels = [[solver.addBinary(obj=c) if c < math.inf else None for c in costs] for costs in energy.unary]
    for choices in labels:
        solver.addConstr(sum(x for x in choices if x is not None) == 1)
    for i, j, costs in energy.pairs:
        flow = [[solver.addVariable(lb=0, obj=c) if c < math.inf else None for c in row] for row in costs]
        for x, row in zip(labels[i], flow, strict=True):
            _marginal(solver, x, row)
        for y, column in zip(labels[j], zip(*flow, strict=True), strict=True):
            _marginal(solver, y, column)
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return math.inf
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(solver.getObjectiveValue())


def _marginal(solver: object, label: object, flow: object) -> None:
    """Demand that the flow of a pair through a label is 1 where the label is chosen."""
    through = [f for f in flow if f is not None]
    if label is None:
        for f in through:
            solver.addConstr(f == 0)
    elif through:
        solver.addConstr(sum(through) - label == 0)
    else:
        solver.addConstr(label == 0)


@pytest.mark.parametrize(
    "energy",
    [
        pytest.param(grid(4, 4, 3, 7), id="grid"),
        pytest.param(dense(7, 3, 7), id="dense"),
        pytest.param(Training(25, axes=1, seed=7, noise=0.3).energy(), id="training"),
        *(pytest.param(small(seed), id=f"small {seed}") for seed in range(1000, 1010)),
    ],
)
def test_the_integer_program_has_the_same_least_cost(energy: Energy) -> None:
    optimum = integer_program(energy)
    if optimum < math.inf:
        solution = solve(energy, table=1)
        assert solution.value == pytest.approx(optimum, rel=1e-6, abs=1e-6)
        return
    with pytest.raises(Infeasible):
        solve(energy)


@pytest.mark.parametrize(("variables", "axes", "noise"), [(100, 2, 0.0), (200, 2, 0.3), (60, 3, 0.3)])
def test_a_training_step_is_solved_to_the_optimum(variables: int, axes: int, noise: float) -> None:
    energy = Training(variables, axes=axes, noise=noise).energy()
    solution = solve(energy, table=2000)
    check(energy, solve(energy).value, table=2000)
    assert solution.gap < 1e-10
