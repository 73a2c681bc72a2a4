"""Layouts at symbolic sizes: sizes may be sympy expressions in positive integers, such as a batch or a sequence.

What a layout can do depends on which sizes divide which. A *generic* layout has a large prime in the
place of each symbolic factor: what divides there divides whatever the symbols are, and nothing else does.
The algebra runs on it, and its sizes are read back by their primes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from shardc.errors import LayoutError
from shardc.ir.layout import Digit, Digits, Layout

FIRST = 2**31  # above the concrete sizes that it stands beside


def is_symbolic(digits: Iterable[Digit]) -> bool:
    """Whether some radix is not a plain int."""
    return any(not isinstance(d.radix, int) for d in digits)


class Generic:
    """A prime for each symbolic factor of some layouts.

    >>> from shardc.ir.mesh import Mesh
    >>> b = sympy.Symbol("b", integer=True, positive=True)
    >>> layout = Layout.of_sub_dims(Mesh(dp=2), [[(4 * b, ("dp",))]])
    >>> generic = Generic(layout.dims)
    >>> str(layout), str(generic.back(generic.layout(layout)))
    ('[4*b@dp]', '[4*b@dp]')
    """

    def __init__(self, dims: Iterable[Iterable[Digit]]) -> None:
        self._primes: dict[Any, int] = {}
        for digits in dims:
            for radix, _ in digits:
                for base, _ in _factors(radix):
                    if base not in self._primes:
                        self._primes[base] = sympy.nextprime(max([FIRST, *self._primes.values()]))

    def size(self, size: Any) -> int:
        """``size`` with primes in the place of its symbolic factors."""
        value = int(_coefficient(size))
        for base, power in _factors(size):
            value *= self._primes[base] ** power
        return value

    def digits(self, digits: Iterable[Digit]) -> Digits:
        return tuple(Digit(self.size(radix), axis) for radix, axis in digits)

    def layout(self, layout: Layout) -> Layout:
        return layout.replace(dims=[self.digits(digits) for digits in layout.dims])

    def size_back(self, value: int) -> Any:
        """What `size` made ``value`` of."""
        size: Any = 1
        for base, prime in self._primes.items():
            while value and value % prime == 0:
                value //= prime
                size = size * base
        return value * size

    def digits_back(self, digits: Iterable[Digit]) -> Digits:
        return tuple(Digit(self.size_back(radix), axis) for radix, axis in digits)

    def back(self, layout: Layout) -> Layout:
        return layout.replace(dims=[self.digits_back(digits) for digits in layout.dims])


def _coefficient(size: Any) -> Any:
    return size if isinstance(size, int) else sympy.factor_terms(size).as_coeff_mul()[0]


def _factors(size: Any) -> list[tuple[Any, int]]:
    """(base, power) of the factors of ``size`` that are no numbers."""
    if isinstance(size, int):
        return []
    factors = (factor.as_base_exp() for factor in sympy.factor_terms(size).as_coeff_mul()[1])
    return [(base, int(power)) for base, power in factors]


def at(layout: Layout, values: Mapping[Any, int]) -> Layout:
    """``layout`` with numbers in the place of symbols.

    Raises:
        LayoutError: a symbol without a value.
    """

    def size(radix: Any) -> int:
        value = sympy.sympify(radix).subs(values)
        if not value.is_Integer:
            raise LayoutError(f"size {radix} of {layout} is {value} at {dict(values)}", fix="give every symbol a value")
        return int(value)

    return layout.replace(dims=[[Digit(size(radix), axis) for radix, axis in digits] for digits in layout.dims])
