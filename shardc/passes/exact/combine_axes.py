"""Combination of an op's strategies over single axes to its strategies over the whole mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod

from shardc.errors import LayoutError
from shardc.ir.layout import Digit, Digits, canonical, strides
from shardc.ir.mesh import Mesh
from shardc.passes.exact.axis_strategies import AxisStrategy, laid_out
from shardc.rules.spec import Spec, Strategy, commute, merge


@lru_cache(maxsize=1 << 12)
def combine_axes(spec: Spec, mesh: Mesh, ways: tuple[tuple[AxisStrategy, ...], ...]) -> tuple[Strategy, ...]:
    """Returns the distinct strategies that combine one single-axis strategy for each axis.

    If two axes split the same digit, the later one in mesh order is nested under the earlier one.

    Args:
        ways: for each axis, in mesh order, the strategies over that axis alone.
    """
    out: dict[Strategy, None] = {}
    for choice in product(*ways):
        strategy = _combined(spec, mesh, choice)
        if strategy is not None:
            out[strategy] = None
    return tuple(out)


def _combined(spec: Spec, mesh: Mesh, choice: Sequence[AxisStrategy]) -> Strategy | None:
    factors: dict[str, Digits] = {}
    for way in choice:
        for factor, digits in way.factors:
            joint = merge(mesh, factors.get(factor), digits) or nested(mesh, factors[factor], digits)
            if joint is None:
                return None
            factors[factor] = joint
    carried = [pair for way in choice for pair in way.carried]
    if not commute(spec, factors, carried):
        return None
    try:
        return Strategy(*laid_out(spec, mesh, factors, carried, {way.carried: way.positions for way in choice}))
    except LayoutError:  # reductions that do not commute
        return None


def nested(mesh: Mesh, outer: Digits, inner: Digits) -> Digits | None:
    """Binds each axis of ``inner`` in ``outer``, at its own stride or below the axes that are bound there already.

    None if the sizes do not divide.
    """
    spans = _spans(outer)
    for top, bottom, axis in _spans(inner):
        size = top // bottom
        while (over := next((t for t in spans if t[1] < top and bottom < t[0]), None)) is not None:
            top, bottom = over[1], over[1] // size
        if bottom * size != top:
            return None
        spans.append((top, bottom, axis))
    out, at = [], prod(d.radix for d in outer)
    for top, bottom, axis in sorted(spans, reverse=True):
        if at % top:
            return None
        out += [Digit(at // top), Digit(top // bottom, axis)]
        at = bottom
    return canonical(mesh, [*out, Digit(at)])


def _spans(digits: Digits) -> list[tuple[int, int, str]]:
    """Returns (stride above, stride below, axis) of each bound digit, major to minor."""
    below = strides(digits)
    return [(at * d.radix, at, d.axis) for d, at in zip(digits, below, strict=True) if d.axis is not None]
