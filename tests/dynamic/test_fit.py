"""Numbers at three sizes as functions of the sizes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardc.dynamic.generalize import Fit, conditions, moduli, points
from shardc.errors import LayoutError
from shardc.ir.sized import Polynomial

EXAMPLE = {"b": 8, "t": 128}
FORMS: dict[str, Callable[[int, int], int]] = {
    "b": lambda b, t: b,
    "b / 4": lambda b, t: b // 4,
    "64 * b * t": lambda b, t: 64 * b * t,
    "b * t / 8": lambda b, t: b * t // 8,
    "12 * b * t**2": lambda b, t: 12 * b * t**2,
    "t + -1": lambda b, t: t - 1,
    "2 * t + 3": lambda b, t: 2 * t + 3,
    "b * t + b": lambda b, t: b * (t + 1),
}


@pytest.mark.parametrize("text", FORMS)
def test_finds_the_function(text: str) -> None:
    near = points(EXAMPLE, 8)
    found = Fit(near, 8)(tuple(FORMS[text](p["b"], p["t"]) for p in near))  # type: ignore[arg-type]
    assert isinstance(found, Polynomial)
    for b, t in ((8, 64), (16, 8), (64, 2048), (24, 136)):
        assert found.at({"b": b, "t": t}) == FORMS[text](b, t)


def test_what_is_the_same_everywhere_is_a_number() -> None:
    assert Fit(points(EXAMPLE, 2), 2)((7, 7, 7)) == 7


def test_what_is_no_such_function_is_refused() -> None:
    near = points(EXAMPLE, 2)
    for odd in (lambda b, t: b**3 + t, lambda b, t: max(b, 11), lambda b, t: b // 3, lambda b, t: b ^ t):
        with pytest.raises(LayoutError, match="not a polynomial"):
            Fit(near, 2)(tuple(odd(p["b"], p["t"]) for p in near))  # type: ignore[arg-type]


@given(st.integers(1, 4096), st.integers(1, 4096), st.sampled_from([1, 2, 4, 6, 8]))
def test_points_keep_what_divides(b: int, t: int, ranks: int) -> None:
    near = points({"b": b, "t": t}, ranks)
    assert len(near) == 3
    assert len({size for point in near for size in point.values()}) >= 3
    for point in near:
        assert point["b"] % ranks == b % ranks
        assert point["t"] % ranks == t % ranks


def test_points_below_stay_below() -> None:
    for point in points(EXAMPLE, 2, above=False):
        assert all(1 < point[name] < EXAMPLE[name] for name in EXAMPLE)
    with pytest.raises(LayoutError, match="too few sizes b below 4"):
        points({"b": 4, "t": 128}, 2, above=False)


def test_conditions_are_what_makes_all_numbers_whole() -> None:
    def made(*terms: tuple[Fraction, tuple[int, int]]) -> Polynomial:
        return Polynomial(("b", "t"), terms)

    half, quarter = made((Fraction(1, 2), (1, 0))), made((Fraction(1, 4), (0, 1)))
    both, odd = made((Fraction(1, 8), (1, 1))), made((Fraction(1, 2), (1, 0)), (Fraction(1, 2), (0, 0)))
    assert conditions(moduli([half, quarter, both], EXAMPLE)) == ["b % 2 == 0", "t % 4 == 0"]
    assert conditions(moduli([odd], {"b": 5, "t": 128})) == ["b % 2 == 1"]
    assert conditions(moduli([made((Fraction(3), (1, 1)))], EXAMPLE)) == []
    # In the units that these leave over, all coefficients are whole.
    scale = moduli([half, quarter, both], EXAMPLE)
    assert both.substituted(scale).terms == ((Fraction(1), (1, 1)),)
