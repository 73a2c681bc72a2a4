"""Finds the fastest solution within a memory limit by a price per byte (a Lagrange multiplier).

The solver minimizes time + price * bytes. The higher the price, the smaller and the slower is its solution; the search
is for the lowest price at which the solution fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from typing import Generic, Protocol, TypeVar

LEAST = 1e-15  # seconds per byte if memory is no constraint: of equally fast solutions the smaller one is preferred
PRICES = (LEAST, 3e-13, 3e-12, 3e-11, 3e-10)  # tried in order until a solution is small enough
CLOSE = 4.0  # no price is tried between two prices that differ by less than this factor
ABOVE = 1e-9  # relative margin of a ceiling above a solution found before, so that this one is found if it is the best


class Point(Protocol):
    """A solution of the layout problem: its seconds and bytes."""

    @property
    def bytes(self) -> float:
        """Return its bytes."""
        ...

    def at(self, byte: float) -> float:
        """Return its cost at a price of ``byte`` seconds per byte."""
        ...


P = TypeVar("P", bound=Point)


@dataclass(frozen=True)
class PriceSearch(Generic[P]):
    """Searches the solutions of one problem by price.

    Args:
        solve: (price, ceiling) -> the best solution at the price; None if none costs less than the ceiling.
        solutions: price -> the best solution at it, as found so far.
    """

    solve: Callable[[float, float], P | None]
    solutions: dict[float, P] = field(default_factory=dict)

    def fastest(self, room: float, limit: float, first: float = LEAST) -> P | None:
        """Return the fastest solution of at most ``room`` bytes, found by a price in seconds for each byte of memory.

        Its price is at most `CLOSE` times one that is too low (above the first two of `PRICES`). If every solution is
        larger than ``room``, the smallest one is returned.

        Args:
            first: the first price to try. If its solution is small enough, no lower price is tried.

        Returns:
            None if none takes at most ``limit`` seconds.
        """
        low, high = LEAST, 0.0
        last: P | None = None  # the best at the price before, later the best that is small enough
        for price in (first, *(price for price in PRICES if price > first)):
            point = self._at(price, room, limit, last)
            if point is None:
                return None
            last = point
            if point.bytes <= room:
                high = price
                break
            low = price
        while low > LEAST and high > CLOSE * low:
            price = sqrt(low * high)
            point = self._at(price, room, limit, last)
            if point is None:
                return None
            if point.bytes <= room:
                last, high = point, price
            else:
                low = price
        return last if last is not None and last.at(0.0) <= limit else None

    def _at(self, price: float, room: float, limit: float, last: P | None) -> P | None:
        """Return the best solution at a price; None if it proves that no solution is within both limits."""
        worth = limit + price * room  # what one that is wanted costs at most
        if price not in self.solutions:
            ceiling = worth if last is None else min(worth, (1 + ABOVE) * last.at(price))
            point = self.solve(price, ceiling)
            if point is None:
                return None
            self.solutions[price] = point
        point = self.solutions[price]
        return point if point.at(price) <= worth else None
