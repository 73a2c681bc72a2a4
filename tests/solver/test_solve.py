"""Least costs and bounds, against trying every labelling."""

from __future__ import annotations

import math

import pytest

from shardc.solver import Infeasible, evaluate, solve
from tests.solver.energies import least, small


@pytest.mark.parametrize("table", [20_000_000, 30, 1], ids=["eliminate", "some", "branch"])
def test_500_small_energies_are_solved(table: int) -> None:
    for seed in range(500):
        energy = small(seed)
        optimum = least(energy)
        if math.isinf(optimum):
            with pytest.raises(Infeasible):
                solve(energy, table=table)
            continue
        solution = solve(energy, table=table)
        assert solution.value == evaluate(energy, solution.labels)
        assert solution.value == pytest.approx(optimum, abs=1e-9), seed
        assert solution.bound == pytest.approx(optimum, abs=1e-9), seed
