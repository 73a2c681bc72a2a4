"""A local graph for many sizes (`SizedGraph`): its numbers are polynomials in the sizes of the program's inputs.

`SizedGraph.at` returns the plain graph at given sizes, `SizedGraph.symbolic` the one that is compiled for all sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, reduce
from math import lcm, prod
from typing import Any

import torch
from torch import fx

from shardc._compat import cache_method
from shardc.ir import graph as ir
from shardc.ir.graph import Role, Value
from shardc.ir.layout import Digit

Powers = tuple[int, ...]


@dataclass(frozen=True)
class Polynomial:
    """A polynomial in the sizes of inputs, with rational coefficients.

    Args:
        names: names of the sizes.
        terms: (coefficient, power of each size), no two with the same powers.
    """

    names: tuple[str, ...]
    terms: tuple[tuple[Fraction, Powers], ...]

    def at(self, sizes: Mapping[str, int]) -> Fraction:
        """Return the polynomial's value, given ``sizes`` (name -> size)."""
        values = [sizes[name] for name in self.names]
        return sum((c * monomial(values, powers) for c, powers in self.terms), Fraction(0))

    def whole_at(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the polynomial's value at ``sizes`` (name -> size) is an integer and not negative."""
        value = self.at(sizes)
        return value.denominator == 1 and value >= 0

    def substituted(self, scale: Mapping[str, tuple[int, int]]) -> Polynomial:
        """Substitute ``a u + b`` for each size, and return the polynomial in the new variables u. ``scale`` maps the
        name of a size to its (a, b).
        """
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

    def in_units(self, scale: Mapping[str, tuple[int, int]], units: Mapping[str, Any]) -> Any:
        """Return the polynomial's value, given the ``units`` u of the sizes ``a u + b``: numbers, symbols or proxies of
        nodes. ``scale`` maps the name of a size to its (a, b); the coefficients must be integers in these units.
        """
        terms = []
        for c, powers in self.substituted(scale).terms:
            factors = [units[name] for name, power in zip(self.names, powers, strict=True) for _ in range(power)]
            terms.append(reduce(operator.mul, factors, _whole(c)))
        return reduce(operator.add, terms)

    @property
    def denominator(self) -> int:
        """Return the least common denominator of the polynomial's coefficients."""
        return lcm(*(c.denominator for c, _ in self.terms)) if self.terms else 1


def monomial(values: Sequence[int], powers: Powers) -> int:
    """Return the product of ``values``, each raised to its power in ``powers``."""
    return prod(value**power for value, power in zip(values, powers, strict=True))


SIZED = "shardc_sized"  # key of ``GraphModule.meta``: the `At` of a graph from `SizedGraph.at`


@dataclass(frozen=True)
class Quotient:
    """A float argument of an op: ``numerator / denominator``, both integers or polynomials."""

    numerator: int | Polynomial
    denominator: int | Polynomial


@dataclass(frozen=True)
class Shape:
    """Sizes and strides of a tensor. Those that depend on input sizes are polynomials."""

    sizes: tuple[int | Polynomial, ...]
    strides: tuple[int | Polynomial, ...]


@dataclass(frozen=True)
class Numbers:
    """Those arguments and shapes of one node that depend on the input sizes, written as polynomials.

    Args:
        args, kwargs: the node's arguments, with polynomials and quotients in place of numbers.
        val: ``meta["val"]`` with `Shape`s in place of tensors.
    """

    args: tuple[fx.node.Argument, ...]
    kwargs: dict[str, fx.node.Argument]
    val: Any


@dataclass
class SizedGraph:
    """A local graph for many input sizes. The numbers in its shapes and arguments are polynomials in the sizes; `at`
    makes the graph at given sizes.

    Args:
        base: the graph at some sizes.
        numbers: position of a node -> its `Numbers`, for nodes that depend on sizes.
        layouts: for each output's role, the (radix, axis) pairs of each dim of its layout; None without a layout.
        scale: name of a size -> (a, b): the size is ``a u + b``. In the units u, coefficients are integers.
        compiled: (guard, code) pairs of the graph; the guard takes the unit of each size.
    """

    base: fx.GraphModule
    numbers: dict[int, Numbers]
    layouts: tuple[Any, ...]
    scale: dict[str, tuple[int, int]]
    compiled: list[tuple[Callable[[Mapping[str, int]], bool], Any]] = field(default_factory=list)

    def units(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return name of a size -> its unit u, given ``sizes`` (name -> size). A size is ``a u + b``, with a and b from
        ``scale`` (see `shardc.dynamic.generalize.moduli`).
        """
        return {name: (sizes[name] - b) // a for name, (a, b) in self.scale.items()}

    def at(self, sizes: Mapping[str, int]) -> fx.GraphModule:
        """Return the graph at ``sizes`` (name -> size). All polynomials must be integers at these sizes."""
        number = numbers_at(sizes)
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate(self.base.graph.nodes):
            copy = env[node] = graph.node_copy(node, lambda n: env[n])
            entry = self.numbers.get(position)
            if entry is None:
                continue
            args, kwargs = fx.node.map_aggregate((entry.args, entry.kwargs), number)
            copy.args, copy.kwargs = fx.map_arg(args, lambda n: env[n]), fx.map_arg(kwargs, lambda n: env[n])
            copy.meta["val"] = _example(entry.val, node.meta.get("val"), number)
            ir.update(copy, value=_with_shapes(ir.info(node).value, copy.meta["val"]))
        output, base_output = ir.output_node(graph), ir.output_node(self.base.graph)
        output.meta[ir.ROLES] = roles_at(base_output.meta[ir.ROLES], self.layouts, number)
        gm = fx.GraphModule(self.base, graph)
        gm.meta[SIZED] = At(self, dict(sizes))
        return gm

    def symbolic(self, like: fx.GraphModule) -> fx.GraphModule:
        """Return the graph that is compiled once for all sizes. It has no example values (``meta["val"]``).

        Its first placeholders are the units of the sizes (`units`), from which it computes all numbers.

        Args:
            like: a graph from `at`; strings, such as names of groups, are taken from it.
        """
        words: dict[str, str] = {}
        for base_node, node in zip(self.base.graph.nodes, like.graph.nodes, strict=True):
            words.update(zip(_words(base_node), _words(node), strict=True))
        graph = fx.Graph()
        computed = _PolynomialNodes(graph, self.scale)
        env: dict[fx.Node, fx.Node] = {}

        def leaf(x: fx.node.Argument) -> fx.node.Argument:
            if isinstance(x, fx.Node):
                return env[x]
            return words[x] if isinstance(x, str) else computed(x)

        for position, base_node in enumerate(self.base.graph.nodes):
            entry = self.numbers.get(position, base_node)
            args, kwargs = fx.node.map_aggregate((entry.args, entry.kwargs), leaf)
            copy = env[base_node] = graph.create_node(
                base_node.op, base_node.target, args, kwargs, base_node.name, base_node.type
            )
            copy.meta = {key: x for key, x in base_node.meta.items() if key != "val"}
        return fx.GraphModule(self.base, graph)

    def inputs(self, units: Mapping[str, Any]) -> list[Any]:
        """Return example arguments for the graph of `symbolic`. ``units`` maps each size's name to its unit as a
        SymInt; a fake mode must be active.
        """

        def number(x: int | Polynomial) -> Any:
            return x.in_units(self.scale, units) if isinstance(x, Polynomial) else x

        tensors = []
        for position, node in enumerate(self.base.graph.nodes):
            if node.op == "placeholder":
                entry = self.numbers.get(position)
                val = node.meta["val"]
                shape = Shape(tuple(val.shape), val.stride()) if entry is None else entry.val
                sizes, strides = [list(map(number, dims)) for dims in (shape.sizes, shape.strides)]
                tensors.append(torch.empty_strided(sizes, strides, dtype=val.dtype, device=val.device))
        return [*(units[name] for name in self.scale), *tensors]


@dataclass(frozen=True)
class At:
    """Where a graph from `SizedGraph.at` comes from: the `SizedGraph` and the sizes (name -> size)."""

    graph: SizedGraph
    sizes: dict[str, int]

    @cached_property
    def units(self) -> dict[str, int]:
        """Return name of a size -> its unit at these sizes; see `SizedGraph.units`."""
        return self.graph.units(self.sizes)


class _PolynomialNodes:
    """Inserts nodes that compute polynomials of the sizes into a graph. Each polynomial is computed once."""

    def __init__(self, graph: fx.Graph, scale: Mapping[str, tuple[int, int]]) -> None:
        self._graph, self._scale = graph, scale
        self._units = {name: fx.Proxy(graph.placeholder(f"size_{at}")) for at, name in enumerate(scale)}

    def __call__(self, x: object) -> fx.node.Argument:
        return self._node(x) if isinstance(x, Polynomial | Quotient) else x

    @cache_method
    def _node(self, x: Polynomial | Quotient) -> fx.Node:
        """Insert the nodes that compute the polynomial or quotient ``x``; return the last of them."""
        if isinstance(x, Quotient):
            return self._graph.call_function(operator.truediv, (self(x.numerator), self(x.denominator)))
        result: fx.Proxy = x.in_units(self._scale, self._units)  # arithmetic of proxies inserts nodes
        return result.node


def _words(node: fx.Node) -> Iterator[str]:
    """Iterate over the strings among a node's arguments, in order."""
    strings: list[str] = []
    fx.node.map_aggregate((node.args, node.kwargs), lambda x: strings.append(x) if isinstance(x, str) else None)
    return iter(strings)


def _example(shape: Any, like: Any, number: Callable[[Any], Any]) -> Any:
    """Return a copy of the example value ``like`` whose tensors have the sizes and strides in ``shape``.

    Args:
        number: maps a polynomial to its value.
    """
    if isinstance(shape, Shape):
        sizes, strides = [list(map(number, dims)) for dims in (shape.sizes, shape.strides)]
        return like.new_empty_strided(sizes, strides)  # in the fake mode of ``like``
    if isinstance(shape, tuple):
        return tuple(_example(part, x, number) for part, x in zip(shape, like, strict=True))
    return like


def _with_shapes(value: Any, val: Any) -> Any:
    """Return the type ``value`` of a node's result (see `Info`) with the shapes of ``val``, its example value."""
    if isinstance(value, tuple):
        return tuple(map(_with_shapes, value, val))
    return replace(value, shape=tuple(val.shape)) if isinstance(value, Value) else value


def numbers_at(sizes: Mapping[str, int]) -> Callable[[Any], Any]:
    """Return a function that evaluates polynomials (to integers) and quotients (to floats) at ``sizes``. It returns any
    other argument as it is.

    The values of the polynomials must be integers.
    """
    values: dict[Polynomial, int] = {}

    def number(x: Any) -> Any:
        if isinstance(x, Polynomial):
            if x not in values:
                values[x] = _whole(x.at(sizes))
            return values[x]
        return number(x.numerator) / number(x.denominator) if isinstance(x, Quotient) else x

    return number


def roles_at(roles: Sequence[Role], layouts: Sequence[Any], number: Callable[[Any], Any]) -> tuple[Role, ...]:
    """Return the ``roles`` of outputs with the layouts that they have at given sizes. ``layouts`` describes the layouts
    by polynomials, as in `SizedGraph`; ``number`` evaluates a polynomial.

    Args:
        number: maps a polynomial to its value at the sizes (`numbers_at`).
    """
    out = []
    for role, dims in zip(roles, layouts, strict=True):
        if dims is not None:
            assert role.layout is not None
            digits = [[Digit(number(radix), axis) for radix, axis in dim] for dim in dims]
            role = replace(role, layout=role.layout.replace(dims=digits))
        out.append(role)
    return tuple(out)


def _whole(value: Fraction) -> int:
    """Convert ``value``, a fraction that must be an integer, to an int."""
    assert value.denominator == 1, value
    return int(value)
