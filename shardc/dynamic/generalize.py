"""Merges a local graph, compiled at three points (sets of sizes), into one graph for any sizes.

Numbers that differ between the three graphs become polynomials in the sizes (`Fit`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, count, product
from math import isqrt
from typing import Any

import torch
from torch import Tensor, fx

from shardc._compat import PyTree, pytree
from shardc.errors import LayoutError
from shardc.ir import graph as ir
from shardc.ir.graph import Info
from shardc.ir.layout import Layout
from shardc.ir.sized import Numbers, Polynomial, Quotient, Shape, SizedGraph, monomial

POINTS = 3  # two determine ``a m + c``, the third confirms it
_MAX_POWER, _MAX_DEGREE = 2, 4


@dataclass
class Fit:
    """Finds polynomials in the sizes that have given values at three ``points`` (size name -> size). The denominators
    of their coefficients divide ``divisors``.
    """

    points: Sequence[Mapping[str, int]]
    divisors: int
    _found: dict[tuple[int, ...], Polynomial] = field(default_factory=dict)

    def __call__(self, values: tuple[int, ...]) -> int | Polynomial:
        """Return the polynomial in the sizes that has ``values`` at the three points. If the values are equal, return
        that number.

        Its form is ``a m``, ``a m + c`` or ``a m + b n``, with monomials m and n. LayoutError if none fits.
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
        """Yields polynomials in the sizes that have the given value at each point, simple ones first."""
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
        """Return whether a candidate polynomial has ``values`` at the points. Each of its ``terms`` is (coefficient,
        value of the monomial at each point).
        """
        if any(self.divisors % c.denominator for c, _ in terms):
            return False
        return all(sum(c * m[k] for c, m in terms) == value for k, value in enumerate(values))


def _solve(values: Sequence[int], m: Sequence[int], n: Sequence[int]) -> tuple[Fraction, Fraction] | None:
    """Return (a, b) such that ``a * m + b * n`` equals ``values`` at the first two points. None if there is not
    exactly one solution.
    """
    determinant = m[0] * n[1] - m[1] * n[0]
    if not determinant:
        return None
    a = Fraction(values[0] * n[1] - values[1] * n[0], determinant)
    return a, Fraction(m[0] * values[1] - m[1] * values[0], determinant)


def points(example: Mapping[str, int], modulus: int, above: bool = True) -> list[dict[str, int]]:
    """Choose the sets of sizes (`POINTS` many, each size name -> size) at which programs are compiled for a fit. They
    are near ``example``, above or below it, and congruent to it modulo ``modulus``.

    The quotients by ``modulus`` are distinct, and above the example primes, so that sizes are not related by chance.

    Raises:
        LayoutError: there are not enough sizes below the example's.
    """
    quotients: set[int] = set()
    out: list[dict[str, int]] = [{} for _ in range(POINTS)]
    for name, size in example.items():
        whole = size // modulus
        for point in out:
            near = filter(_is_prime, count(max(whole, 3))) if above else _below(whole)
            quotient = next((k for k in near if k not in quotients and k * modulus + size % modulus > 1), None)
            if quotient is None:
                raise LayoutError(f"there are too few sizes {name} below {size}")
            quotients.add(quotient)
            point[name] = quotient * modulus + size % modulus
    return out


def _below(whole: int) -> list[int]:
    """Return the numbers below ``whole``: primes first, each group descending."""
    return sorted(range(whole), key=lambda k: (not _is_prime(k), -k))


def _is_prime(k: int) -> bool:
    """Return whether ``k`` is a prime number."""
    return k > 1 and all(k % d for d in range(2, isqrt(k) + 1))


def moduli(polynomials: Sequence[Polynomial], example: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Returns, for each size name, (a, b): at all sizes of the form ``a * u + b``, with any integer u, the values of
    ``polynomials`` are integers. ``example`` is one set of sizes of this form.
    """
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
    """Return the conditions on sizes as texts such as ``"b % 4 == 0"``. ``scale`` is the result of `moduli`: size
    name -> (modulus, remainder).
    """
    return [f"{name} % {a} == {b}" for name, (a, b) in scale.items() if a > 1]


_DIGITS = 10  # digits of a denominator; beyond, floats are too coarse


class Differs(Exception):
    """Raised if the graphs compiled at three example sizes differ in more than numbers."""


def generalize(graphs: Sequence[fx.GraphModule], fit: Fit, sizes: Mapping[str, int]) -> SizedGraph:
    """Returns one graph for any sizes, made from ``graphs``, which were compiled at the points of ``fit``. At each
    point it equals the graph compiled there.

    Args:
        sizes: example sizes, at which all numbers must be integers too.

    Raises:
        Differs: the graphs differ in more than numbers, or a number is no simple function of the sizes, with the node.
    """
    base = graphs[0]
    rows = list(zip(*(g.graph.nodes for g in graphs), strict=False))
    if len({len(g.graph.nodes) for g in graphs}) > 1:
        raise Differs(f"the graphs have {', '.join(str(len(g.graph.nodes)) for g in graphs)} nodes")
    places = [{node: at for at, node in enumerate(g.graph.nodes)} for g in graphs]
    numbers: dict[int, Numbers] = {}
    for at, nodes in enumerate(rows):
        try:
            values = _node(graphs, nodes, places, fit)
        except (LayoutError, Differs) as error:
            where = ir.info(nodes[0]) if nodes[0].op != "output" else Info("the outputs", None)
            line = f" ({where.origin.source})" if where.origin.source else ""
            raise Differs(f"at {where.name}{line}: {getattr(error, 'message', None) or error}") from None
        if values is not None:
            numbers[at] = values
    layouts = fitted_layouts([ir.output_node(g.graph).meta[ir.ROLES] for g in graphs], fit)
    return SizedGraph(base, numbers, layouts, moduli(fit.polynomials, sizes))


def _node(
    graphs: Sequence[fx.GraphModule], nodes: tuple[fx.Node, ...], places: Sequence[dict[fx.Node, int]], fit: Fit
) -> Numbers | None:
    """Return the `Numbers` (arguments and shapes) of one node, merged over all graphs: numbers that differ become
    polynomials in the sizes. Return None if no number differs.

    Args:
        nodes: the node in each graph.
        places: for each graph, node -> its position.

    Raises:
        Differs: the ops differ.
    """
    first = nodes[0]
    for gm, node in zip(graphs, nodes, strict=True):
        same = (node.op, node.target, node.name) == (first.op, first.target, first.name)
        if not same:
            raise Differs(f"{node.format_node()} stands in the place of {first.format_node()}")
        if node.op == "get_attr" and not _equal(_attribute(graphs[0], first), _attribute(gm, node)):
            raise Differs(f"the constant {node.target} depends on the sizes")
    args = _fitted([node.args for node in nodes], places, fit)
    kwargs = _fitted([node.kwargs for node in nodes], places, fit)
    if first.op == "output":
        return None
    val = _val([node.meta.get("val") for node in nodes], fit)
    return Numbers(args, kwargs, val) if _depends((args, kwargs, val)) else None


def _fitted(values: Sequence[PyTree], places: Sequence[dict[fx.Node, int]], fit: Fit) -> PyTree:
    """Merge the arguments that one node has in each graph (``values``) into arguments for any sizes. Numbers that
    differ become polynomials in the sizes.

    ``places`` has node -> position for each graph: nodes are equal if their positions are.
    """
    leaves, specs = zip(*map(pytree.tree_flatten, values), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise Differs(f"{values} stand in one place")
    return pytree.tree_unflatten([_leaf(leaf, places, fit) for leaf in zip(*leaves, strict=True)], specs[0])


def _leaf(values: Sequence[Any], places: Sequence[dict[fx.Node, int]], fit: Fit) -> object:
    """Merge one argument of a node, which has the given value in each graph, into one for all graphs. Equal values
    stay; numbers that differ become a `Polynomial` or `Quotient`. Raise Differs if anything else differs.

    ``places`` has node -> position for each graph: nodes are equal if their positions are.
    """
    first = values[0]
    if isinstance(first, slice) and all(isinstance(x, slice) for x in values):
        return slice(*(_leaf([getattr(x, at) for x in values], places, fit) for at in ("start", "stop", "step")))
    if len({type(x) for x in values}) == 1:
        if isinstance(first, fx.Node) and len({place[x] for x, place in zip(values, places, strict=True)}) == 1:
            return first
        if type(first) is int:
            return fit(tuple(values))
        if isinstance(first, float) and len(set(values)) > 1:
            return _quotient(values, fit)
        if not isinstance(first, fx.Node) and all(_equal(first, x) for x in values):
            return first
    raise Differs(f"{values} stand in one place")


def _quotient(values: Sequence[float], fit: Fit) -> Quotient:
    """Return a float argument that depends on sizes as a `Quotient` of two polynomials: a mean's ``1 / n``, a
    variance's ``n / (n - 1)``.

    ``values`` has one float per graph.
    """
    fractions = [_fraction(x) for x in values]
    if all(fractions):
        return Quotient(*(fit(tuple(getattr(f, at) for f in fractions)) for at in ("numerator", "denominator")))
    raise Differs(f"the numbers {tuple(values)} are no simple function of the sizes")


def _fraction(x: float) -> Fraction | None:
    """Returns the simplest fraction that equals ``x`` as a float; None if there is none."""
    tries = (Fraction(x).limit_denominator(10**power) for power in range(_DIGITS))
    return next((f for f in tries if f.numerator / f.denominator == x), None)


def _val(values: Sequence[Any], fit: Fit) -> object:
    """Merges the fake values that one node has in each graph: a `Shape` for any sizes in place of a tensor, a tuple
    of these for several results, None for other values.
    """
    first = values[0]
    if isinstance(first, Tensor):
        sizes = tuple(fit(size) for size in zip(*(x.shape for x in values), strict=True))
        return Shape(sizes, tuple(fit(step) for step in zip(*(x.stride() for x in values), strict=True)))
    if isinstance(first, tuple | list):
        return tuple(_val(items, fit) for items in zip(*values, strict=True))
    return None


def fitted_layouts(roles: Sequence[tuple[ir.Role, ...]], fit: Fit) -> tuple[object, ...]:
    """Merges the outputs' layouts at three sets of sizes. For each output returns its dims, each a tuple of (size or
    polynomial, mesh axis) per digit; None if the output has no layout.

    Raises:
        Differs, LayoutError: the outputs differ in more than sizes, or a size is no simple function of the sizes.
    """
    out: list[object] = []
    for outputs in zip(*roles, strict=True):
        layouts = [role.layout for role in outputs]
        if len({(role.kind, role.name, role.index) for role in outputs}) > 1 or len({_axes_of(x) for x in layouts}) > 1:
            raise Differs(f"the outputs are {', '.join(f'{role.kind} {role.name} {role.layout}' for role in outputs)}")
        if layouts[0] is None:
            out.append(None)
            continue
        out.append(
            tuple(
                tuple((fit(tuple(d.radix for d in digit)), digit[0].axis) for digit in zip(*dims, strict=True))
                for dims in zip(*(layout.dims for layout in layouts if layout is not None), strict=True)
            )
        )
    return tuple(out)


def _axes_of(layout: Layout | None) -> object:
    """Return the axes of a layout, without sizes: equal for layouts that differ in sizes only."""
    return layout and (layout.partial, tuple(tuple(digit.axis for digit in digits) for digits in layout.dims))


def _depends(value: object) -> bool:
    """Return whether ``value`` contains a fitted polynomial."""
    if isinstance(value, Shape):
        return _depends((value.sizes, value.strides))
    if isinstance(value, slice):
        return _depends((value.start, value.stop, value.step))
    leaves = pytree.tree_leaves(value)
    return any(isinstance(x, Polynomial | Quotient) or isinstance(x, Shape | slice) and _depends(x) for x in leaves)


def _attribute(gm: fx.GraphModule, node: fx.Node) -> object:
    """Return the constant of ``gm`` that the ``get_attr`` node stands for."""
    return operator.attrgetter(str(node.target))(gm)


def _equal(left: object, right: object) -> bool:
    """Return whether the constants ``left`` and ``right`` are equal; tensors by shape, dtype and values."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and bool(torch.equal(left, right))
    return bool(left == right)
