"""Within: the fastest solution that holds no more than so many bytes, found by the price of a byte.

The solver finds the solution of least time plus bytes times their price. The higher the price, the fewer bytes it
holds and the longer it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from typing import Generic, Protocol, TypeVar

LEAST = 1e-15  # seconds that a byte counts where memory is no question, so that of equal plans the smaller is taken
PRICES = (LEAST, 3e-13, 3e-12, 3e-11, 3e-10)  # tried in order until a solution is small enough
CLOSE = 4.0  # factor between two prices, below which none between them is tried
ABOVE = 1e-9  # by which a ceiling lies above a solution that is known, so that it is found again if it is the best


class Point(Protocol):
    """A solution."""

    @property
    def bytes(self) -> float:
        """What it holds."""
        ...

    def at(self, byte: float) -> float:
        """Its seconds, where each of its bytes costs ``byte`` seconds."""
        ...


P = TypeVar("P", bound=Point)


@dataclass(frozen=True)
class Within(Generic[P]):
    """Finds solutions of one problem.

    Args:
        solve: (price, ceiling) -> the best solution at the price, None if none costs less than the ceiling.
        known: solutions by the price at which they are best.
    """

    solve: Callable[[float, float], P | None]
    known: dict[float, P] = field(default_factory=dict)

    def fastest(self, room: float, limit: float, first: float = LEAST) -> P | None:
        """The fastest solution of at most ``room`` bytes, of those that are best at some price.

        Between the price that is taken and one that is too low lies at most a factor of `CLOSE`, above the first two
        of `PRICES`. If no price makes a solution so small, it is the smallest.

        Args:
            first: a price to begin with. If its solution is small enough, no lower one is tried.

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
        """The best at a price, unless it shows that none of at most ``room`` bytes is within ``limit``."""
        worth = limit + price * room  # what one that is wanted costs at most
        if price not in self.known:
            ceiling = worth if last is None else min(worth, (1 + ABOVE) * last.at(price))
            point = self.solve(price, ceiling)
            if point is None:
                return None
            self.known[price] = point
        point = self.known[price]
        return point if point.at(price) <= worth else None
