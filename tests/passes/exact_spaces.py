"""Every strategy of every op, collected a second time: slowly, from the layouts themselves.

Nothing here is from `shardc.passes.layout.exact`. One mesh axis at a time, strategies are collected by running every op
on all layouts that its operands may have until no new one comes; over two axes, they are joined dim by dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.layout import Digit, Layout, canonical
from shardc.ir.mesh import Mesh
from shardc.passes.op_calls import call_of, operands_of
from shardc.rules import spec_of
from shardc.rules.spec import Dims, Spec, Strategy, carries, infer, place, project, results_of, strategies

aten = torch.ops.aten
Bound = tuple[int, int, int, str]  # dim, stride, radix, axis


def spaces(graph: fx.Graph, mesh: Mesh, known: Mapping[fx.Node, Iterable[Layout]]) -> dict[fx.Node, list[Strategy]]:
    """Every strategy of every op."""
    alone = [_alone(graph, mesh, axis, known) for axis in mesh.axes]
    out = {}
    for node in ops_of(graph):
        found: dict[Strategy, None] = {}
        for pair in itertools.product(*(one[node] for one in alone)):
            if (made := _joined(spec_of_op(node), mesh, pair)) is not None:
                found[made] = None
        operands = operands_of(node)
        if any(x.op == "placeholder" for x in operands):  # inputs as they lie
            have = [ir.layout(x) if x.op == "placeholder" else Layout.whole(mesh, ir.value(x).shape) for x in operands]
            found |= dict.fromkeys(strategies(spec_of_op(node), have))
        out[node] = list(found)
    return out


def _alone(
    graph: fx.Graph, mesh: Mesh, axis: str, known: Mapping[fx.Node, Iterable[Layout]]
) -> dict[fx.Node, dict[Strategy, None]]:
    """Every strategy over one axis."""
    layouts = {node: {Layout.whole(mesh, ir.value(node).shape): None} for node in graph.nodes if node.op != "output"}
    found: dict[fx.Node, dict[Strategy, None]] = {node: {} for node in ops_of(graph)}

    def learn(node: fx.Node, one: Strategy) -> None:
        found[node][one] = None
        for x, layout in zip((*operands_of(node), node), (*one.operands, *one.results), strict=True):
            layouts[x][layout] = None

    for node, some in known.items():
        for layout in some:
            others = [a for a in layout.axes if a.partition(":")[0] != axis]
            layouts[node][layout.unbind(others).without_partial(others)] = None
    for node in ops_of(graph):
        spec, size = spec_of_op(node), mesh.size(axis)
        for factor, length in spec.sizes:
            if spec.splittable(factor) and length % size == 0:
                split = {factor: canonical(mesh, (Digit(size, axis), Digit(length // size)))}
                operands = tuple(Layout(mesh, place(spec, dims, split)) for dims in spec.operands)
                learn(node, Strategy(operands, results_of(spec, mesh, split)))
    before = -1
    while (now := sum(map(len, layouts.values())) + sum(map(len, found.values()))) != before:
        before = now
        for node in ops_of(graph):
            spec = spec_of_op(node)
            for at, x in enumerate(operands_of(node)):
                for layout in [*layouts[x]]:
                    learn(node, _split(spec, spec.operands[at], layout))
                    for one in _carried(spec, at, layout):
                        learn(node, one)
            for layout in [*layouts[node]]:
                learn(node, _split(spec, spec.results[0], layout))
    return found


def _split(spec: Spec, dims: Dims, layout: Layout) -> Strategy:
    """The strategy whose factors lie as an operand or result with ``dims`` says, as far as they can."""
    mesh, split = layout.mesh, project(spec, dims, layout.without_partial())
    return Strategy(tuple(Layout(mesh, place(spec, d, split)) for d in spec.operands), results_of(spec, mesh, split))


def _carried(spec: Spec, at: int, layout: Layout) -> Iterable[Strategy]:
    """The strategies that let what is pending in operand ``at`` through."""
    mesh, sizes = layout.mesh, [[prod(map(spec.size, factors)) for factors in dims] for dims in spec.operands]
    for pair in layout.partial:
        for where in {*spec.linear, frozenset({0})}:
            if at in where and carries(spec, pair[1], where):
                operands = [
                    Layout.whole(mesh, s).with_partial([pair[0]] * (i in where), pair[1]) for i, s in enumerate(sizes)
                ]
                yield Strategy(tuple(operands), results_of(spec, mesh, {}, [pair]))


def _joined(spec: Spec, mesh: Mesh, pair: Sequence[Strategy]) -> Strategy | None:
    """The strategy that is each of ``pair`` over its axis."""
    sides = [(*one.operands, *one.results) for one in pair]
    layouts = [_stacked(mesh, found) for found in zip(*sides, strict=True)]
    if any(layout is None for layout in layouts):
        return None
    count = len(pair[0].operands)
    operands, results = layouts[:count], layouts[count:]
    made = infer(spec, operands, results)  # type: ignore[arg-type]
    return Strategy(tuple(operands), tuple(results)) if made == tuple(results) else None  # type: ignore[arg-type]


@lru_cache(maxsize=1 << 16)
def _stacked(mesh: Mesh, layouts: tuple[Layout, ...]) -> Layout | None:
    """A tensor that lies over each axis as one of ``layouts``; of two axes at one place, the later is under."""
    dims: list[list[Digit]] = []
    for dim, length in enumerate(layouts[0].shape):
        taken: list[tuple[int, int, str]] = []  # top, bottom, axis
        for layout in layouts:
            below, mine = 1, []
            for radix, axis in reversed(layout.dims[dim]):
                if axis is not None:
                    mine.append((below * radix, radix, axis))
                below *= radix
            for top, radix, axis in reversed(mine):
                while (over := next((t for t in taken if t[0] > top / radix and t[1] < top), None)) is not None:
                    top = over[1]
                if top % radix:
                    return None
                taken.append((top, top // radix, axis))
        at, digits = length, []
        for top, bottom, axis in sorted(taken, reverse=True):
            if at % top or top % bottom:
                return None
            digits += [Digit(at // top), Digit(top // bottom, axis)]
            at = bottom
        dims.append([*digits, Digit(at)])
    pending = [pair for layout in layouts for pair in layout.partial]
    return None if len({op for _, op in pending}) > 1 else Layout(mesh, dims, pending)


def ops_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def spec_of_op(node: fx.Node) -> Spec:
    spec = spec_of(call_of(node))
    assert spec is not None
    return spec
