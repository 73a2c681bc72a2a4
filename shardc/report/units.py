"""Numbers as people read them: three significant digits and a unit, as ``55.3 GB`` or ``87.1 us``."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_OPERATIONS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def size(nbytes: float) -> str:
    """Return bytes in a decimal unit (1 GB is 10^9 bytes), as text.

    >>> size(55292489728), size(8320), size(512), size(-2.5e9)
    ('55.3 GB', '8.32 kB', '512 B', '-2.50 GB')
    """
    return _scaled(nbytes, _BYTES) or f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Return seconds as text in s, ms or us.

    >>> duration(1.04368), duration(0.0999997), duration(8.71e-05), duration(0.0)
    ('1.04 s', '100 ms', '87.1 us', '0')
    """
    return _scaled(seconds, _SECONDS) or (f"{seconds * 1e6:.2f} us" if seconds else "0")


def operations(count: float) -> str:
    """Return ``count``, a number of operations or operations per second, as text that ends in a unit prefix: ``989 T``.

    >>> operations(9.894e14) + "FLOP/s"
    '989 TFLOP/s'
    """
    return _scaled(count, _OPERATIONS) or f"{count:.0f} "


def percent(share: float) -> str:
    """Return a share as a percentage, as text.

    >>> percent(0.4213), percent(0.0123), percent(1e-6), percent(1.0)
    ('42.1 %', '1.23 %', '<0.01 %', '100.0 %')
    """
    if 0 < share < 0.0001:
        return "<0.01 %"
    return f"{share * 100:.{1 if share >= 0.1 else 2}f} %"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return ``value`` as text in the largest unit in which it is 1 or more; "" if it is below 1 in all ``units``,
    pairs (factor, name).
    """
    for factor, unit in units:
        if abs(value) >= 0.9995 * factor:
            number = value / factor
            return f"{number:,.0f} {unit}" if abs(number) >= 99.95 else f"{number:#.3g} {unit}"
    return ""
