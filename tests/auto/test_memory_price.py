"""The fastest of many solutions that holds at most so many bytes, by prices."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random

import pytest

from shardc.search.memory_fit import CLOSE, LEAST, PRICES, PriceSearch


@dataclass(frozen=True)
class Point:
    seconds: float
    bytes: float

    def at(self, byte: float) -> float:
        return self.seconds + byte * self.bytes


@dataclass
class Solver:
    """Takes the best of some points, and counts how often it was asked."""

    points: list[Point]
    calls: int = 0

    def __call__(self, price: float, ceiling: float) -> Point | None:
        self.calls += 1
        best = min(self.points, key=lambda point: point.at(price))
        return best if best.at(price) < ceiling else None


def points(seed: int) -> list[Point]:
    draw = Random(seed)
    return [Point(draw.uniform(1, 4), 10 ** draw.uniform(9, 11.5)) for _ in range(draw.randrange(2, 30))]


@pytest.mark.parametrize("seed", range(100))
def test_it_is_the_fastest_at_a_price_that_is_low_enough(seed: int) -> None:
    """No price that is lower by more than a step has a solution that is small enough."""
    every = points(seed)
    room = Random(seed).uniform(0.1, 0.9) * min(every, key=lambda point: point.seconds).bytes
    solve = Solver(every)
    found = PriceSearch(solve).fastest(room, inf)
    prices = [LEAST, *(PRICES[1] * 1.05**n for n in range(142))]
    fits = [at for at, price in enumerate(prices) if solve(price, inf).bytes <= room]  # type: ignore[union-attr]
    assert found is not None and solve.calls - len(prices) <= len(PRICES) + 1
    if not fits:
        assert found == solve(PRICES[-1], inf)
        return
    slower = solve(prices[min(fits[0] + 29, len(prices) - 1)], inf)
    assert CLOSE < 1.05**29 and slower is not None
    assert found.bytes <= room and found.seconds <= slower.seconds


@pytest.mark.parametrize("seed", range(100))
def test_nothing_is_found_only_if_none_is_within_both_limits(seed: int) -> None:
    """What fits in room and time lies below the ceiling at every price. So a limit changes nothing but that."""
    draw, every = Random(seed), points(seed)
    room, limit = draw.uniform(0.1, 0.9) * min(every, key=lambda p: p.seconds).bytes, draw.uniform(1, 4)
    free = PriceSearch(Solver(every)).fastest(room, inf)
    found = PriceSearch(Solver(every)).fastest(room, limit)
    assert free is not None
    if free.bytes <= room:
        assert found == (free if free.seconds <= limit else None)
    else:
        assert found is None or (found == free and found.seconds <= limit)


def test_what_was_solved_is_known() -> None:
    every = [Point(1, 8e10), Point(1.2, 4e10), Point(2, 2e10), Point(3, 1e10)]
    solve = Solver(every)
    within = PriceSearch(solve)
    assert within.fastest(5e10, 9.0) == every[1]
    before = solve.calls
    assert within.fastest(5e10, 9.0) == every[1] and solve.calls == before
    assert within.fastest(1e10, 9.0) == every[3] and solve.calls <= before + 3
    assert within.fastest(1e10, 2.5) is None


def test_a_price_that_sufficed_before_is_tried_first() -> None:
    every = [Point(1, 8e10), Point(1.2, 4e10), Point(2, 2e10), Point(3, 1e10)]
    solve = Solver(every)
    assert PriceSearch(solve).fastest(5e10, 9.0, first=1e-11) == every[1] and solve.calls == 1
    assert PriceSearch(solve).fastest(1e10, 9.0, first=1e-11) == every[3]
