"""Polynomials in the sizes of a program's inputs, which stand for the numbers of a program at any sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm, prod

Powers = tuple[int, ...]


@dataclass(frozen=True)
class Polynomial:
    """A polynomial in some sizes.

    Args:
        names: of the sizes.
        terms: (coefficient, power of each size), no two of the same powers.
    """

    names: tuple[str, ...]
    terms: tuple[tuple[Fraction, Powers], ...]

    def at(self, sizes: Mapping[str, int]) -> Fraction:
        values = [sizes[name] for name in self.names]
        return sum((c * monomial(values, powers) for c, powers in self.terms), Fraction(0))

    def whole_at(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the value at ``sizes`` (symbol -> value) is a non-negative integer."""
        value = self.at(sizes)
        return value.denominator == 1 and value >= 0

    def substituted(self, scale: Mapping[str, tuple[int, int]]) -> Polynomial:
        """Return the polynomial in u, for size = a u + b and ``scale`` = {size: (a, b)}."""
        out: dict[Powers, Fraction] = {}
        for c, powers in self.terms:
            product: dict[Powers, Fraction] = {(0,) * len(powers): c}
            for at, (name, power) in enumerate(zip(self.names, powers, strict=True)):
                a, b = scale[name]
                for _ in range(power):
                    grown: dict[Powers, Fraction] = {}
                    for p, k in product.items():
                        up = (*p[:at], p[at] + 1, *p[at + 1 :])
                        grown[up] = grown.get(up, Fraction(0)) + k * a
                        grown[p] = grown.get(p, Fraction(0)) + k * b
                    product = grown
            for p, k in product.items():
                out[p] = out.get(p, Fraction(0)) + k
        terms = sorted(((k, p) for p, k in out.items() if k), key=lambda term: (-sum(term[1]), term[1][::-1]))
        return Polynomial(self.names, tuple(terms))

    @property
    def denominator(self) -> int:
        return lcm(*(c.denominator for c, _ in self.terms)) if self.terms else 1


def monomial(values: Sequence[int], powers: Powers) -> int:
    """Return the product of ``values``, each to its power."""
    return prod(value**power for value, power in zip(values, powers, strict=True))
