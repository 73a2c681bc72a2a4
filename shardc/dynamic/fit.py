"""Fits numbers in three programs by polynomials in the sizes that the programs were compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, count, product
from math import isqrt

from shardc.errors import LayoutError
from shardc.ir.polynomial import Polynomial, monomial

POINTS = 3  # two determine ``a m + c``, the third confirms it
_MAX_POWER, _MAX_DEGREE = 2, 4


@dataclass
class Fit:
    """Fits numbers at three ``points`` (sizes by name) by polynomials; ``divisors`` limits their denominators."""

    points: Sequence[Mapping[str, int]]
    divisors: int
    _found: dict[tuple[int, ...], Polynomial] = field(default_factory=dict)

    def __call__(self, values: tuple[int, ...]) -> int | Polynomial:
        """Returns the polynomial with ``values`` at the points (a number if they are equal).

        Raises LayoutError if none of the forms ``a m``, ``a m + c``, ``a m + b n`` fits (m, n monomials).
        """
        if all(value == values[0] for value in values):
            return values[0]
        if values not in self._found:
            polynomial = next(self._candidates(values), None)
            if polynomial is None:
                raise LayoutError(
                    f"the numbers {values} are not a polynomial (or a quotient of two) in the sizes {list(self.points)}"
                )
            self._found[values] = polynomial
        return self._found[values]

    @property
    def polynomials(self) -> list[Polynomial]:
        """The polynomials of all fits so far."""
        return list(dict.fromkeys(self._found.values()))

    def _candidates(self, values: tuple[int, ...]) -> Iterator[Polynomial]:
        names = tuple(self.points[0])
        powers = [p for p in product(range(_MAX_POWER + 1), repeat=len(names)) if 0 < sum(p) <= _MAX_DEGREE]
        powers.sort(key=lambda p: (sum(p), p))
        at = {p: [monomial([point[n] for n in names], p) for point in self.points] for p in powers}
        for p in powers:
            c = Fraction(values[0], at[p][0])
            if self._fits(values, ((c, at[p]),)):
                yield Polynomial(names, ((c, p),))
        constant = (0,) * len(names)
        at[constant] = [1] * len(self.points)
        for p, q in combinations([*powers, constant], 2):
            if (both := _solve(values, at[p], at[q])) and all(both):
                if self._fits(values, ((both[0], at[p]), (both[1], at[q]))):
                    yield Polynomial(names, ((both[0], p), (both[1], q)))

    def _fits(self, values: Sequence[int], terms: Sequence[tuple[Fraction, Sequence[int]]]) -> bool:
        if any(self.divisors % c.denominator for c, _ in terms):
            return False
        return all(sum(c * m[k] for c, m in terms) == value for k, value in enumerate(values))


def _solve(values: Sequence[int], m: Sequence[int], n: Sequence[int]) -> tuple[Fraction, Fraction] | None:
    """Solves ``a m + b n`` for a and b at the first two points."""
    determinant = m[0] * n[1] - m[1] * n[0]
    if not determinant:
        return None
    a = Fraction(values[0] * n[1] - values[1] * n[0], determinant)
    return a, Fraction(m[0] * values[1] - m[1] * values[0], determinant)


def points(example: Mapping[str, int], modulus: int, above: bool = True) -> list[dict[str, int]]:
    """Returns sizes near the example's, above or below, and congruent to them modulo ``modulus``.

    The quotients by ``modulus`` are distinct, and primes above the example, so that sizes are not related by chance.

    Raises:
        LayoutError: there are not enough sizes below the example's.
    """
    quotients: set[int] = set()
    out: list[dict[str, int]] = [{} for _ in range(POINTS)]
    for name, size in example.items():
        whole = size // modulus
        for point in out:
            near = _primes(max(whole, 3)) if above else _below(whole)
            quotient = next((k for k in near if k not in quotients and k * modulus + size % modulus > 1), None)
            if quotient is None:
                raise LayoutError(f"there are too few sizes {name} below {size}")
            quotients.add(quotient)
            point[name] = quotient * modulus + size % modulus
    return out


def _below(whole: int) -> list[int]:
    """Returns the numbers below ``whole``: primes first, and descending."""
    return sorted(range(whole), key=lambda k: (not _is_prime(k), -k))


def _primes(start: int) -> Iterator[int]:
    return (k for k in count(start) if _is_prime(k))


def _is_prime(k: int) -> bool:
    return k > 1 and all(k % d for d in range(2, isqrt(k) + 1))


def moduli(polynomials: Sequence[Polynomial], example: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Returns, by size name, (a, b) such that all ``polynomials`` are integers at sizes ``a u + b``."""
    scale = dict.fromkeys(example, 1)
    for polynomial in sorted(
        polynomials, key=lambda p: sum(map(bool, map(sum, zip(*(q for _, q in p.terms), strict=True))))
    ):
        for name in polynomial.names:
            residues = {n: (a, example[n] % a) for n, a in scale.items()}
            left = polynomial.substituted(residues).denominator
            if left > 1 and any(powers[polynomial.names.index(name)] for _, powers in polynomial.terms):
                scale[name] *= left
    return {name: (a, example[name] % a) for name, a in scale.items()}


def conditions(scale: Mapping[str, tuple[int, int]]) -> list[str]:
    """Formats the result of `moduli`: ``"b % 4 == 0"``."""
    return [f"{name} % {a} == {b}" for name, (a, b) in scale.items() if a > 1]
