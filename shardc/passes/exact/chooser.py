"""Exact: choose every op's strategy and every value's layout so that the sum of all costs is least.

What the plan says stays as it is; what it leaves open is found by `shardc.solver`, with a bound that says how much
better any other choice could be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import numpy as np
from torch import fx

from shardc.cost import redistribute
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Digit, Layout
from shardc.passes import region
from shardc.passes.calls import operands_of
from shardc.passes.exact.crossed import crossed
from shardc.passes.exact.problem import Builder, Label, Use, kernel_seconds
from shardc.passes.exact.ways import Closure, Slot, Way, slot_of, spec_at
from shardc.passes.exact.work import Work, work_of
from shardc.passes.greedy import Greedy
from shardc.passes.propagate import Problem
from shardc.rules.spec import Strategy, strategies
from shardc.solver import Solution, solve

HIDDEN = 0.2  # what a second counts of a reduction of a parameter's gradient, which later compute hides


@dataclass(frozen=True)
class Exact:
    """Chooses the strategies and layouts of least total cost.

    Args:
        seconds: after which the best that was found is taken.
        found: called with the solution.
    """

    seconds: float = 60.0
    found: Callable[[Solution], None] | None = field(default=None, repr=False, compare=False)

    def __call__(self, problem: Problem, graph: fx.Graph) -> Mapping[fx.Node, Layout]:
        chosen = Choice(problem, graph)
        solution = solve(chosen.energy(), seconds=self.seconds)
        if self.found is not None:
            self.found(solution)
        return chosen.apply(solution.labels)


@dataclass
class Choice:
    """The problem of one graph, and how a solution of it is written on the graph's nodes."""

    problem: Problem
    graph: fx.Graph

    def __post_init__(self) -> None:
        self.mesh, self.cost = self.problem.mesh, self.problem.cost
        self.builder = Builder(self.cost)
        self.options: dict[fx.Node, tuple[Strategy, ...]] = {}
        self.variable: dict[fx.Node, int] = {}
        self.outside = _outside(self.problem, self.graph)
        self.work = work_of(self.graph)
        self._ways()
        self._ops()
        self._values()

    def energy(self) -> Any:
        return self.builder.energy()

    def apply(self, labels: Sequence[int]) -> dict[fx.Node, Layout]:
        """Writes layouts and needs; returns the layouts in which outputs are wanted."""
        for node in self.graph.nodes:
            if node.target is getitem:
                made = ir.info(node.args[0]).value
                ir.set_info(node, ir.info(node).at(made[node.args[1]].layout))
            elif node in self.variable:
                self._decide(node, self.options[node][labels[self.variable[node]]])
        return self.outside.wanted

    def _decide(self, node: fx.Node, strategy: Strategy) -> None:
        record = ir.info(node)
        if node.target is ops.tag:
            cause = self.problem.pin_layout(node.kwargs["name"], strategy.operands[0])[1]
            node.target, node.kwargs = ops.reshard, {}
            ir.set_info(node, replace(record.at(strategy.results[0]), origin=replace(record.origin, cause=cause)))
            return
        if node.op == "call_function" and node.target not in (ops.reshard, ops.unpad):
            record = replace(record, needs=strategy.operands)
        if isinstance(record.value, tuple):
            made = iter(strategy.results)
            ir.set_info(node, record.at(tuple(None if v is None else next(made) for v in record.value)))
        else:
            ir.set_info(node, record.at(strategy.results[0]) if record.value is not None else record)

    # --- variables

    def _ways(self) -> None:
        known: dict[Slot, list[Layout]] = {}
        for node, layout in self.outside.fixed.items():
            known.setdefault((node, 0), []).append(layout)
        for node, layout in self.outside.wanted.items():
            known.setdefault(slot_of(node), []).append(layout)
        for node in self.graph.nodes:
            if node.target is ops.tag:
                known.setdefault((node, 0), []).append(self.outside.pinned[node])
        self.known = known
        axes = [axis for axis in self.mesh.axes if self.mesh.size(axis) > 1]
        self.closures = [Closure(self.graph, self.mesh, axis, known) for axis in axes]
        self.ways = [closure.run() for closure in self.closures]

    def _ops(self) -> None:
        for node in self.graph.nodes:
            if node.op == "output" or node.target is getitem or not ir.info(node).tensors:
                continue
            self.options[node] = options = self._options(node)
            costs = np.zeros(len(options))
            spec = spec_at(node)
            if spec is not None:
                costs = kernel_seconds(node, spec, options, self.work.get(node, Work()), self.cost)
            elif node.target is ops.tag:
                item = ir.value(node).itemsize
                costs = np.array([redistribute.seconds(o.operands[0], o.results[0], item, self.cost) for o in options])
            self.variable[node] = self.builder.variable(costs)

    def _options(self, node: fx.Node) -> tuple[Strategy, ...]:
        """Every strategy of ``node``."""
        if node in self.outside.fixed:
            return (Strategy((), (self.outside.fixed[node],)),)
        if node.op != "call_function":
            return (Strategy((), tuple(Layout.whole(self.mesh, v.shape) for v in ir.info(node).tensors)),)
        if node.target is ops.tag:
            bases = dict.fromkeys(self._made(node.args[0]))
            return tuple(Strategy((b,), (self.problem.pin_layout(node.kwargs["name"], b)[0],)) for b in bases)
        if node.target is ops.pad:
            return tuple(dict.fromkeys(_padded(node, base) for base in self._made(node.args[0])))
        if node.target in region.OPS:
            return (region.strategy_of(node, self.mesh),)
        spec = spec_at(node)
        operands = [ir.value(x) for x in operands_of(node)]
        if spec is None:
            whole = [tuple(Layout.whole(self.mesh, v.shape) for v in vs) for vs in (operands, ir.info(node).tensors)]
            return (Strategy(*whole),)
        found = crossed(spec, self.mesh, tuple(tuple(ways[node]) for ways in self.ways))
        return found + self._fitting(node, spec, found)

    def _fitting(self, node: fx.Node, spec: Any, found: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Strategies that take what is fixed as it is, where axes nest otherwise than `crossed` has them."""
        operands = operands_of(node)
        fixed = [self.outside.fixed.get(x) for x in operands]
        if all(layout is None for layout in fixed):
            return ()
        whole = [f or Layout.whole(self.mesh, ir.value(x).shape) for f, x in zip(fixed, operands, strict=True)]
        have = set(found)
        return tuple(one for one in strategies(spec, whole) if one not in have)

    def _made(self, node: fx.Node) -> list[Layout]:
        """The layouts in which ``node`` may be made."""
        maker, index = slot_of(node)
        at = [i for i, v in enumerate(ir.info(maker).values) if v is not None].index(index)
        return [option.results[at] for option in self.options[maker]]

    # --- values

    def _values(self) -> None:
        uses: dict[Slot, list[tuple[fx.Node | None, int, float]]] = {}
        for node in self.graph.nodes:
            if node.target is getitem or node in self.outside.fixed and node.target in (ops.reshard, ops.unpad):
                continue
            if node.op == "call_function" and node in self.variable:
                for at, operand in enumerate(operands_of(node)):
                    uses.setdefault(slot_of(operand), []).append((node, at, 1.0))
        for node in self.outside.wanted:
            uses.setdefault(slot_of(node), []).append((None, self.outside.places[node], self.outside.weight(node)))
        self.labels: dict[Slot, tuple[int, tuple[Label, ...]]] = {}
        for (maker, index), found in uses.items():
            at = [i for i, v in enumerate(ir.info(maker).values) if v is not None].index(index)
            made = tuple(option.results[at] for option in self.options[maker])
            item = ir.info(maker).values[index].itemsize
            self.labels[maker, index] = self.builder.value(
                self.variable[maker], made, [self._use(user, place, weight) for user, place, weight in found], item
            )

    def _use(self, user: fx.Node | None, place: int, weight: float) -> Use:
        if user is None:
            return Use(None, (list(self.outside.wanted.values())[place],), weight)
        return Use(self.variable[user], tuple(option.operands[place] for option in self.options[user]), weight)


@dataclass(frozen=True)
class Outside:
    """What is not to be chosen.

    Args:
        fixed: layouts of placeholders, constants and pinned reshards.
        wanted: of outputs.
        pinned: of tagged activations, as the greedy sweep finds them.
        grads: the outputs that are gradients of parameters.
    """

    fixed: dict[fx.Node, Layout]
    wanted: dict[fx.Node, Layout]
    pinned: dict[fx.Node, Layout]
    grads: frozenset[fx.Node]

    @property
    def places(self) -> dict[fx.Node, int]:
        return {node: at for at, node in enumerate(self.wanted)}

    def weight(self, node: fx.Node) -> float:
        return HIDDEN if node in self.grads else 1.0


def _outside(problem: Problem, graph: fx.Graph) -> Outside:
    """What the plan fixes; what the outputs and tangents are is found by the greedy sweep on a copy."""
    copy = ir.copied(graph)
    twins = dict(zip(graph.nodes, copy.nodes, strict=True))
    found = Greedy()(problem, copy)
    fixed, pinned = {}, {}
    for node, twin in twins.items():
        if node.op in ("placeholder", "get_attr") or node.target in (ops.reshard, ops.unpad):
            if ir.is_tensor(node):
                fixed[node] = ir.layout(twin)
        elif node.target is ops.tag:
            pinned[node] = ir.layout(twin)
    wanted = {node: found[twin] for node, twin in twins.items() if twin in found}
    grads = frozenset(n for r, n in ir.outputs(graph) if r.kind == "grad" and isinstance(n, fx.Node))
    return Outside(fixed, wanted, pinned, grads)


def _padded(node: fx.Node, source: Layout) -> Strategy:
    """``pad`` takes the dim that it grows whole."""
    dim, size = node.kwargs["dim"], node.kwargs["size"]
    base = source.unbind(source.dim_axes(dim))
    return Strategy((base,), (base.replace(dims=[*base.dims[:dim], (Digit(size),), *base.dims[dim + 1 :]]),))
