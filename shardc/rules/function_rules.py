"""Rules for ``cond``, ``scan`` and ``while_loop``: on one rank, the same op with functions of local shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import getitem
from typing import Any, TypeVar

import torch
from torch import fx

from shardc._compat import FakeTensorMode
from shardc.custom_ops.flops import function_flops
from shardc.custom_ops.function_ops import OPS, Function, named, register
from shardc.ir.layout import Digit, Digits, Layout
from shardc.rules import scans
from shardc.rules.function_factors import Factored, Graph, Pending, Rows, SpecOf
from shardc.rules.rule import Builder, Emitted, Local, Rule
from shardc.rules.spec import project

aten = torch.ops.aten
T = TypeVar("T")
FindRule = Callable[[object], Rule | None]


def rules(find_rule: FindRule, spec_of: SpecOf) -> list[Rule]:
    """Return the rules of the ops that run functions: ``cond``, ``scan``, ``while_loop`` and its gradient.

    Args:
        find_rule, spec_of: give the rules and specs of the ops in the functions.
    """
    # Parameters, not imports: the package that looks rules up imports this module.
    text, localize = "as the ops in its functions", partial(_localize, find_rule=find_rule, spec_of=spec_of)
    return [
        Rule(f"shardc_function.{kind}", lambda call: Factored(call, spec_of).spec(), text, localize) for kind in OPS
    ]


def _localize(local: Local, find_rule: FindRule, spec_of: SpecOf) -> Emitted:
    """Emit and return a ``cond``, ``scan`` or ``while_loop`` on one rank, with functions of local shapes. Each op in a
    function is written on shards by its own rule; no function communicates.
    """
    # With whole, unpadded operands the functions stay as they are. A padded scan has more slices than steps.
    whole = all(
        not layout.axes and layout.shape == value.shape
        for layout, value in zip(local.operands, local.call.operands, strict=True)
    )
    if whole and not (local.call.target is OPS["scan"] and scans.is_padded(local)):
        return local.same()
    factored = Factored(local.call, spec_of)
    on_rank = _OnRank(local, factored, find_rule)
    operands: list[Emitted] = list(local.operand("operands"))
    # A carry that becomes a pending sum starts as one: with its value on one rank and zeros on the others.
    for at, pending in enumerate(factored.carried[: factored.initial]):
        operands[at] = term(local.builder, operands[at], on_rank.axes(pending))
    # All bodies before any is finished: each takes the coordinates that any of them reads.
    bodies = [on_rank.body(graph) for graph in factored.graphs]
    graphs, kind = tuple(body.finish() for body in bodies), factored.function.kind
    function = Function(kind, graphs, factored.function.counts, function_flops(kind, graphs))
    # Its result is not used: an equal function that was loaded has no example values on its nodes.
    register(function)
    operands += [local.builder.coordinate(axes) for axes in on_rank.coordinates]
    if kind == "scan":
        return scans.on_rank(local, function, operands)
    return local.builder.call(local.call.target, operands, function.name)


def term(builder: Builder, x: Emitted, axes: Sequence[str]) -> Emitted:
    """Turn the replicated value ``x`` into a pending sum over ``axes``: emit and return this rank's term, which is
    ``x`` on the first rank along the axes and zeros on the others.
    """
    if not axes:
        return x
    elsewhere = builder.call(aten.ne.Scalar, builder.coordinate(tuple(axes)), 0)  # true on all ranks but the first
    elsewhere = builder.call(aten.view.default, elsewhere, [1] * len(builder.shape(x)))  # to broadcast to x
    return builder.call(aten.masked_fill.Scalar, x, elsewhere, 0)


class _OnRank:
    """Builder of the graphs that one rank runs for the functions of a call: ``cond``, ``scan`` or ``while_loop``. It
    knows the digits (the split) of each sub-dim, and so the layout of each value in the functions.

    Args:
        local: the call, with the layouts of its operands and results.
        factored: the graphs of its functions, and the sub-dims of all values in them.
        find_rule: gives the rules of the ops in the functions.

    Attributes:
        coordinates: axes of the coordinates that the graphs read, as further operands.
        digits: sub-dim -> its digits, from the layouts of operands and results; others are not split.
    """

    def __init__(self, local: Local, factored: Factored, find_rule: FindRule) -> None:
        self.local, self.factored, self.find_rule = local, factored, find_rule
        self.mesh = local.operands[0].mesh
        self.coordinates: dict[tuple[str, ...], None] = {}  # axes whose coordinates the graphs read (an ordered set)
        self.digits: dict[int, Digits] = {}  # sub-dim -> how the layouts of operands and results split it
        values = [
            *zip(factored.operands, local.operands, strict=True),
            *zip(factored.results, local.results, strict=True),
        ]
        for rows, layout in values:
            self._learn(rows, layout)

    def _learn(self, rows: Rows, layout: Layout) -> None:
        """Record the digits of each sub-dim of ``rows``, the dims of a value with ``layout``. Digits are factors of
        an index, each local or bound to a mesh axis; they say how the sub-dim is split.
        """
        leaves = [tuple(self.factored.sub_dims.leaves(row)) for row in rows]
        # Digits of a dim of several sub-dims are divided among them, as the factors of any op.
        parts = project(self.local.spec, self.factored.dims(rows), layout) if any(len(x) > 1 for x in leaves) else {}
        for row, digits in zip(leaves, layout.dims, strict=True):
            for sub_dim in row:  # a dim may be padded, if it is one sub-dim
                self.digits[sub_dim] = digits if len(row) == 1 else parts[self.factored.factor(sub_dim)]

    def _digits(self, row: Iterable[int]) -> list[Digit]:
        """Return the digits (factors of the index, each local or bound to a mesh axis) of a dim that consists of the
        sub-dims ``row``. A sub-dim that no operand or result has (inside a function only) is one local digit.
        """
        sub_dims = self.factored.sub_dims
        return [d for x in sub_dims.leaves(row) for d in self.digits.get(x, (Digit(sub_dims.size(x)),))]

    def axes(self, pending: Pending) -> list[str]:
        """Return the axes over which the sub-dims ``pending`` are split."""
        return [axis for _, axis in self._digits(sorted(pending)) if axis is not None]

    def layouts(self, graph: Graph, node: fx.Node) -> tuple[Layout, ...]:
        """Return the layout of each result of ``node``. A dim is split as its sub-dims are; a sum over a split sub-dim
        is pending over the axes of the split.
        """
        return tuple(
            Layout(self.mesh, list(map(self._digits, rows)), [(axis, "sum") for axis in self.axes(pending)])
            for rows, pending in zip(graph.rows[node], graph.pending[node], strict=True)
        )

    def body(self, graph: Graph) -> _Body:
        """Return a builder with the local form of the function ``graph``: the ops that one rank runs for it."""
        builder = _Body(self.local.builder.device, self.coordinates)
        env: dict[fx.Node, Any] = {}  # node of the graph -> its local value, or a list of them
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                (layout,) = self.layouts(graph, node)
                env[node] = builder.argument(layout.local_shape, graph.vals[node].dtype)
            elif node.target is getitem:
                # A rule returns the results of an op as a list, or as one node that has them all.
                results, index = env[node.args[0]], node.args[1]
                env[node] = (
                    results[index] if isinstance(results, list | tuple) else builder.call(getitem, results, index)
                )
            elif node.op == "call_function":
                env[node] = self._op(graph, node, env, builder)
        builder.results = [env[node] for node in graph.outputs]
        # The branches must leave the same sums pending; a result that one of them has whole is made a term.
        if self.factored.function.kind == "cond":
            outputs = zip(builder.results, graph.outputs, self.factored.pending, strict=True)
            builder.results = [
                term(builder, x, self.axes(of_both - graph.pending[node][0])) for x, node, of_both in outputs
            ]
        return builder

    def _op(self, graph: Graph, node: fx.Node, env: dict[fx.Node, Any], builder: _Body) -> Emitted:
        """Emit the op ``node`` on one rank, by its rule, and return its result; ``env``: node -> its local value."""
        op = graph.ops[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: env[x])
        rule = self.find_rule(node.target)
        if rule is None or op.spec is None:  # its operands are whole
            return builder.call(op.call.target, *args, **kwargs)
        operands = tuple(self.layouts(graph, x)[0] for x in op.operands)
        # Of the results that are tensors.
        results = tuple(x for x, value in zip(self.layouts(graph, node), op.call.results, strict=True) if value)
        return rule.localize(Local(builder, op.call, op.spec, operands, results, args, kwargs))


class _Body:
    """Builder of a function's graph on one rank, as rules use it to emit ops (`shardc.rules.rule.Builder`). Each node
    has an example value, from which shapes are read.

    Args:
        device: device of its values.
        wanted: axes of the coordinates that graphs of the function take, behind other arguments. All graphs of the
            function share this dict (an ordered set), and add to it.

    Attributes:
        inner: the graph.
        results: the nodes that it returns.
    """

    def __init__(self, device: torch.device, wanted: dict[tuple[str, ...], None]) -> None:
        # ``wanted`` is shared: axes of the coordinates that any graph of the function takes. ``inner``: the graph.
        self.device, self.wanted, self.inner, self._mode = device, wanted, fx.Graph(), FakeTensorMode()
        self.results: list[Any] = []  # set by the caller
        self._arguments: list[fx.Node] = []  # placeholders of the function's arguments, in order
        self._coordinates: dict[tuple[str, ...], fx.Node] = {}  # axes -> placeholder of the rank's index along them
        self._once: dict[object, Any] = {}  # key -> what `once` has emitted for it

    def argument(self, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Add and return the placeholder of one more tensor argument of the function."""
        self._arguments.append(self._placeholder(shape, dtype))
        return self._arguments[-1]

    def _placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Add and return a placeholder, with an example value of this shape and dtype."""
        node = self.inner.placeholder("argument")
        with self._mode:
            node.meta["val"] = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return node

    def call(self, target: Callable[..., object], *args: Any, **kwargs: Any) -> fx.Node:
        """Add and return a call of ``target``, and run it on the example values."""
        node = self.inner.call_function(target, args, kwargs)
        with self._mode:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            node.meta["val"] = target(*args, **kwargs)
        return node

    def coordinate(self, axes: tuple[str, ...]) -> fx.Node:
        """Return the placeholder of this rank's index along ``axes``, int64 [1], which the op gets as an operand."""
        self.wanted[axes] = None
        if axes not in self._coordinates:
            self._coordinates[axes] = self._placeholder([1], torch.int64)
        return self._coordinates[axes]

    def key(self) -> Emitted:
        """Refuse to give the key of random draws."""
        raise AssertionError("a function draws no random numbers")

    def group(self, axes: tuple[str, ...]) -> tuple[int, str]:
        """Refuse to give a process group."""
        raise AssertionError(f"a function does not communicate over {axes}")

    def shape(self, x: Any) -> tuple[int, ...]:
        """Return the local shape of the node ``x``."""
        return tuple(x.meta["val"].shape)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return ``make()``, or its earlier result in this graph for the same ``key``."""
        if key not in self._once:
            self._once[key] = make()
        value: T = self._once[key]
        return value

    def finish(self) -> fx.Graph:
        """Finish the graph of the function, with its results as outputs; return the graph. Its arguments are those of
        the function, then a coordinate for each of the axes ``wanted``, whether or not this graph reads it.
        """
        for axes in self.wanted:
            coordinate = self.coordinate(axes)
            self._arguments[-1].append(coordinate)  # puts the node behind the last argument
            self._arguments.append(coordinate)
        self.inner.output(tuple(self.results))
        self.inner.eliminate_dead_code()
        named(self.inner)  # so that equal functions have the same hash
        self.inner.lint()
        return self.inner
