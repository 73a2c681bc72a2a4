"""Crossed: the ways of an op over each axis, combined to its strategies over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from shardc.errors import LayoutError
from shardc.ir.layout import Digit, Digits, canonical, refine, strides
from shardc.ir.mesh import Mesh
from shardc.passes.exact.ways import Way, laid_out
from shardc.rules.spec import Spec, Strategy, commute, merge


@lru_cache(maxsize=1 << 16)
def crossed(spec: Spec, mesh: Mesh, ways: tuple[tuple[Way, ...], ...]) -> tuple[Strategy, ...]:
    """Every strategy that takes one way over each axis, without repetition.

    Where two axes split the same digit, the one that comes later on the mesh is nested under the earlier.

    Args:
        ways: of each axis, in mesh order.
    """
    out: dict[Strategy, None] = {}
    for choice in product(*ways):
        made = _combined(spec, mesh, choice)
        if made is not None:
            out[made] = None
    return tuple(out)


def _combined(spec: Spec, mesh: Mesh, choice: Sequence[Way]) -> Strategy | None:
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
    """``outer`` with the axis of ``inner`` bound under the digit at which both stand; None where it does not divide."""
    fine, other = refine(mesh, outer, strides(inner)), refine(mesh, inner, strides(outer))
    if fine is None or other is None:
        return None
    out, waiting = list(fine), [(at, d) for at, d in enumerate(other) if d.axis is not None]
    for at, (size, axis) in reversed(waiting):
        under = at
        while under < len(out) and out[under].axis is not None:
            under += 1
        if under == len(out) or out[under].radix % size:
            return None
        out[under : under + 1] = [Digit(size, axis), Digit(out[under].radix // size)]
    return canonical(mesh, out)
