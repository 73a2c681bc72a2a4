"""Inner features of experts: the factor of a body that an axis may split, and the body of one rank's share of it.

An expert's last product sums over its hidden features. Where these come, through the rules of the body's ops, from
parts of the parameters alone, each rank can compute some of them: its results are terms of a sum, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.bodies import Body, Dims, PerRow, register
from shardc.ir.flops import is_dense
from shardc.ir.graph import Value
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh
from shardc.passes.calls import operands_of, plain
from shardc.rules import find_rule, spec_of
from shardc.rules.rule import Call, Local
from shardc.rules.spec import Spec, from_results, infer

aten = torch.ops.aten
INNER = "f"
Layouts = dict[fx.Node, tuple[Layout, ...]]


class _Whole(Exception):
    """The body cannot be split in this way."""


def with_inner(body: Body) -> Body:
    """``body``, which knows its inner features if it has some."""
    for node in reversed(body.forward.nodes):
        if node.op != "call_function" or not is_dense(node.target) or (spec := spec_of(_call(node))) is None:
            continue
        for factor in sorted(set(dict(spec.reduce)) - {f for one in spec.results for dim in one for f in dim}):
            try:
                return replace(body, inner=_dims(body, node, spec, factor), at=_at)
            except _Whole:
                continue
    return body


def _at(body: Body, params: tuple[Layout, ...]) -> Body:
    return register(_shard(body, params))


# --- which parts of the parameters


def _dims(body: Body, node: fx.Node, spec: Spec, factor: str) -> tuple[Dims, ...]:
    """The factors of each parameter's dims, where ``factor`` of ``node`` is the inner one.

    Raises:
        _Whole: it does not come from parameters alone, or what is left is no sum.
    """
    size = spec.size(factor)
    ranks = next((n for n in range(2, size + 1) if size % n == 0), 0)
    if not ranks:
        raise _Whole
    mesh = Mesh(x=ranks)
    split = (Digit(ranks, "x"), Digit(size // ranks))
    demands: Layouts = {}
    for x, dims in zip(operands_of(node), spec.operands, strict=True):
        digits = [[d for f in one for d in (split if f == factor else (Digit(spec.size(f)),))] for one in dims]
        _demand(demands, x, 0, Layout(mesh, digits))
    for other in reversed(body.forward.nodes):
        if other in demands and other.op == "call_function" and other.target is not getitem:
            _ask(demands, other, mesh)
    params = [n for n in body.forward.nodes if n.op == "placeholder" and n.name.startswith("p")]
    layouts = tuple(demands.get(n, (Layout.whole(mesh, ir.value(n).shape),))[0] for n in params)
    rows = [n for n in body.forward.nodes if n.op == "placeholder" and n.name in ("rows", "scale")]
    if not any(layout.bound for layout in layouts) or any(demands[n][0].bound for n in rows if n in demands):
        raise _Whole
    _shard(body, layouts)
    return tuple(tuple(_factors(at, dim, digits, size) for dim, digits in enumerate(layout.dims))
                 for at, layout in enumerate(layouts))  # fmt: skip


def _factors(at: int, dim: int, digits: Sequence[Digit], size: int) -> tuple[tuple[str, int], ...]:
    """The factors of one dim, which the trial axis splits where the inner one begins."""
    out, names = [], iter(range(3))
    left = list(digits)
    while left:
        radix, axis = left.pop(0)
        if axis is not None:
            below = left.pop(0).radix if left and left[0].axis is None else 1
            if (radix * below) % size:
                raise _Whole
            out.append((INNER, size))
            radix = radix * below // size
        if radix > 1:
            out.append((f"p{at}.{dim}.{next(names)}", radix))
    return tuple(out)


def _demand(demands: Layouts, node: fx.Node, number: int, layout: Layout) -> None:
    if node.target is getitem:
        return _demand(demands, node.args[0], node.args[1], layout)
    values = ir.info(node).tensors
    known = list(demands.get(node, (Layout.whole(layout.mesh, v.shape) for v in values)))
    if known[number].bound and known[number] != layout:
        raise _Whole
    known[number] = layout
    demands[node] = tuple(known)
    return None


def _ask(demands: Layouts, node: fx.Node, mesh: Mesh) -> None:
    """Asks of what ``node`` is made of what it is asked for."""
    spec = spec_of(_call(node))
    for number, wanted in enumerate(demands[node]):
        if not wanted.bound:
            continue
        strategy = None if spec is None else from_results(spec, mesh, number, wanted)
        if strategy is None:
            raise _Whole
        for x, layout in zip(operands_of(node), strategy.operands, strict=True):
            if layout.bound:
                _demand(demands, x, 0, layout)


# --- one rank's share


@lru_cache(maxsize=1024)
def _shard(body: Body, params: tuple[Layout, ...]) -> Body:
    """``body`` of one rank, whose parameters lie as ``params`` say (without the experts' dim).

    Raises:
        _Whole: an op would need something else of its operands, or what comes out is no term of a sum.
    """
    mesh = params[0].mesh
    over = sorted({axis for layout in params for axis in layout.bound}, key=mesh.order)
    given = {f"p{at}": layout for at, layout in enumerate(params)}
    forward, layouts = _localized(body.forward, given, mesh)
    out, *saved = _results(body.forward)
    _check(layouts[out][0], Layout.whole(mesh, ir.value(out).shape).with_partial(over))
    kept = [layouts[node][0] for node in saved]
    if any(layout.dim_axes(0) for layout in kept):
        raise _Whole
    backward = None
    if body.backward is not None:
        given |= {f"saved{at}": layout for at, layout in enumerate(kept)}
        backward, layouts = _localized(body.backward, given, mesh)
        made = _results(backward)
        for at, node in enumerate(_results(body.backward)):
            if node is not None:
                one = params[at - 2] if at > 1 else Layout.whole(mesh, ir.value(node).shape)
                made[at] = _term(made[at], layouts[node][0], one, [axis for axis in over if axis not in one.bound])
        ir.output_node(backward).args = (tuple(made),)
    rows = tuple(PerRow(layout.local_shape[1:], one.dtype) for layout, one in zip(kept, body.saved, strict=True))
    ranks = prod(mesh.size(axis) for axis in over)
    flops = (body.flops[0] // ranks, body.flops[1] // ranks)
    return Body(forward, backward, body.result, rows, flops)


def _term(node: fx.Node, have: Layout, one: Layout, axes: Sequence[str]) -> fx.Node:
    """``node`` as a term over ``axes`` of what lies as ``one``; each rank gives its share of what all have."""
    if not axes or have != one:
        _check(have, one.with_partial(axes))
        return node
    with node.graph.inserting_before(ir.output_node(node.graph)):
        return node.graph.call_function(aten.div.Scalar, (node, prod(one.mesh.size(axis) for axis in axes)))


def _check(have: Layout, want: Layout) -> None:
    if have != want:
        raise _Whole


def _results(graph: fx.Graph) -> list[Any]:
    end: Any = ir.output_node(graph).args[0]
    return list(end)


def _localized(graph: fx.Graph, given: Mapping[str, Layout], mesh: Mesh) -> tuple[fx.Graph, Layouts]:
    """``graph`` at local sizes, and the layouts of its values; inputs that are not ``given`` are whole."""
    builder = _Builder(fx.Graph())
    env: dict[fx.Node, fx.Node] = {}
    layouts: Layouts = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = builder.graph.placeholder(node.name)
            if (value := ir.info(node).value) is not None:
                assert isinstance(value, Value)
                layouts[node] = (given.get(node.name) or Layout.whole(mesh, value.shape),)
                builder.shapes[env[node]] = layouts[node][0].local_shape
        elif node.op == "output":
            builder.graph.output(fx.map_arg(node.args[0], lambda x: env[x]))
        elif node.target is getitem:
            layouts[node] = (layouts[node.args[0]][node.args[1]],)
            env[node] = builder.call(getitem, env[node.args[0]], node.args[1])
            builder.shapes[env[node]] = layouts[node][0].local_shape
        else:
            layouts[node] = _node(node, env, layouts, builder, mesh)
    return builder.graph, layouts


def _node(
    node: fx.Node, env: dict[fx.Node, fx.Node], layouts: Layouts, builder: _Builder, mesh: Mesh
) -> tuple[Layout, ...]:
    call = _call(node)
    spec, rule = spec_of(call), find_rule(node.target)
    operands = tuple(layouts[x][0] for x in operands_of(node))
    if not operands:
        env[node] = builder.call(node.target, *_mapped(node.args, env), **_mapped(node.kwargs, env))
        made = tuple(Layout.whole(mesh, v.shape) for v in ir.info(node).tensors)
    else:
        if spec is not None and node.target.overloadpacket is aten.sum:  # of terms it is a term
            spec = replace(spec, linear=(frozenset({0}),))
        given = env
        if node.target is aten.add.Tensor and any(layout.partial for layout in operands):
            given, operands = _added(node, env, operands, builder)
        found = "no rule" if spec is None or rule is None else infer(spec, operands)
        if isinstance(found, str) or spec is None or rule is None:
            raise _Whole(f"{node.target}: {found}")
        made, sizes = found, {n: _rows_of(node) for n in node.all_input_nodes if ir.info(n).value is None}
        args, kwargs = (fx.map_arg(x, lambda n: sizes.get(n) or given[n]) for x in (node.args, node.kwargs))
        builder.size = (next((env[n] for n in sizes), None), _places(node, sizes))
        env[node] = rule.localize(Local(builder, call, spec, operands, made, args, kwargs))
        builder.size = (None, frozenset())
    if len(made) == 1:
        builder.shapes[env[node]] = made[0].local_shape
    return made


def _added(
    node: fx.Node, env: dict[fx.Node, fx.Node], operands: tuple[Layout, ...], builder: _Builder
) -> tuple[dict[fx.Node, fx.Node], tuple[Layout, ...]]:
    """Operands of an add of a term and of what is no term, as a bias: each rank adds its share of that."""
    axes = [axis for axis, _ in next(layout.partial for layout in operands if layout.partial)]
    ranks = prod(operands[0].mesh.size(axis) for axis in axes)
    given, layouts = dict(env), []
    for x, layout in zip(operands_of(node), operands, strict=True):
        if not layout.axes:
            given[x], layout = builder.call(aten.div.Scalar, env[x], ranks), layout.with_partial(axes)
            builder.shapes[given[x]] = layout.local_shape
        layouts.append(layout)
    return given, tuple(layouts)


def _mapped(arguments: Any, env: Mapping[fx.Node, fx.Node]) -> Any:
    return fx.map_arg(arguments, lambda n: env[n])


def _places(node: fx.Node, sizes: Mapping[fx.Node, int]) -> frozenset[int]:
    """Where the number of rows stands in lists among the arguments of ``node``."""
    lists = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, (list, tuple))]
    return frozenset(at for one in lists for at, x in enumerate(one) if isinstance(x, fx.Node) and x in sizes)


def _rows_of(node: fx.Node) -> int:
    """The number of rows that ``node`` was traced with."""
    graph = node.graph
    rows = next(n for n in graph.nodes if n.name == "rows")
    return ir.value(rows).shape[0]


def _call(node: fx.Node) -> Call:
    """The call of a node of a body, at the number of rows that it was traced with."""
    sizes = {n: _rows_of(node) for n in node.all_input_nodes if ir.info(n).value is None}
    args, kwargs = (fx.map_arg(x, lambda n: sizes.get(n, n)) for x in (node.args, node.kwargs))
    values = tuple(v and Value(v.dtype, v.shape) for v in ir.info(node).values)
    return Call(node.target, tuple(map(plain, args)), tuple(sorted((k, plain(a)) for k, a in kwargs.items())), values)


@dataclass
class _Builder:
    """Spells the ops of a body on one rank; the rank itself must not matter."""

    graph: fx.Graph

    def __post_init__(self) -> None:
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.size: tuple[fx.Node | None, Iterable[int]] = (None, ())

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        node, places = self.size

        def sized(x: Any) -> Any:
            if node is None or not isinstance(x, (list, tuple)) or not all(isinstance(n, int) for n in x):
                return x
            return [node if at in places else n for at, n in enumerate(x)]

        return self.graph.call_function(target, tuple(map(sized, args)), {k: sized(x) for k, x in kwargs.items()})

    def shape(self, x: Any) -> tuple[int, ...]:
        if x not in self.shapes:
            raise _Whole
        return self.shapes[x]

    def coordinate(self, axes: tuple[str, ...]) -> Any:
        raise _Whole

    def key(self) -> Any:
        raise _Whole

    def group(self, axes: tuple[str, ...]) -> tuple[int, str]:
        raise _Whole

    def once(self, key: Any, make: Any) -> Any:
        return make()
