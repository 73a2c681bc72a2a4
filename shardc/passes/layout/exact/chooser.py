"""Exact: chooses every op's strategy and every value's layout so that the sum of all costs is least.

Layouts that the plan fixes are kept; `shardc.solver` finds the others, with a lower bound on the cost of any solution.

`OpenLayoutProblem` also chooses storage layouts and the axes of the batch. A parameter's labels are then pairs of a
compute and a storage layout. Storage is the compute layout, or is split further over the axes of an ``fsdp`` entry. A
label costs its gathers and its memory; the gradient is resharded to the storage layout. One more variable has as labels
the sets of axes that split the batch of all inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import getitem

import numpy as np
from torch import fx

from shardc.cost import redistribute
from shardc.errors import ShardcWarning
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.passes import local_regions
from shardc.passes.layout.exact.axis_strategies import (
    Closure,
    Slot,
    combine_axes,
    nested,
    slot_of,
    spec_at,
)
from shardc.passes.layout.exact.prices import Traffic, prices, traffic_of
from shardc.passes.layout.exact.problem import Builder, Table, Use, kernel_seconds
from shardc.passes.layout.greedy import Greedy
from shardc.passes.layout.propagate import Problem, decide, lay_out_getitem, padded, pin
from shardc.passes.layout.seed import gathered
from shardc.passes.op_calls import operands_of
from shardc.rules.spec import Spec, Strategy, merge, strategies
from shardc.solver import Energy, solve

GATHERS = 2.0  # of a parameter per step


@dataclass(frozen=True)
class Weights:
    """Weights of seconds in the total cost; communication that compute may hide counts less than 1.

    Args:
        gather: weight of parameters' gathers.
        reduce: weight of the reductions of parameters' gradients.
        of: maps a node to the number of nodes of the whole model that it represents (more than 1 for folded blocks).
    """

    gather: float = 0.2
    reduce: float = 0.2
    of: Callable[[fx.Node], float] = lambda node: 1.0


@dataclass(frozen=True)
class Exact:
    """Chooses the strategies and layouts of least total cost.

    Args:
        weights: weights of seconds in that cost.
    """

    weights: Weights = Weights()

    def __call__(self, problem: Problem, graph: fx.Graph) -> Mapping[fx.Node, Layout]:
        choice = LayoutProblem(problem, graph, self.weights)
        return choice.apply(solve(choice.energy()).labels)


@dataclass
class LayoutProblem:
    """The layout problem of one graph: builds variables and costs for the solver, and writes a solution on the nodes.

    Args:
        problem: the layouts that the plan fixes, and the cost model.
        graph: the seeded joint graph.
        weights: weights of seconds in the total cost.
        like: a problem of the same layouts and graph, with other weights or choices; what they share is taken from it.

    Attributes:
        options: node -> its strategies, which are the labels of its variable.
        variable: node -> number of its variable.
        ways: for each axis of more than one rank, node -> its strategies over that axis alone.
        kernels: op -> predicted seconds of each of its strategies, without weights.
    """

    problem: Problem
    graph: fx.Graph
    weights: Weights = Weights()
    like: LayoutProblem | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Builds variables and costs. Takes over from ``like``, a problem of the same graph, what does not differ."""
        self.mesh, self.cost = self.problem.mesh, self.problem.cost
        self.builder = Builder(self.cost)  # collects variables and costs
        self.options: dict[fx.Node, tuple[Strategy, ...]] = {}
        self.variable: dict[fx.Node, int] = {}
        self.kernels: dict[fx.Node, Table] = {}
        like, self.like = self.like, None  # of a chain of problems, only the last one stays in memory
        # Nodes as they are before any solution is written on them, layouts that are not chosen, and memory traffic:
        # none of these depends on weights or choices.
        if like is None:
            self.seeded = [(x, x.target, x.kwargs, ir.info(x)) for x in self.graph.nodes if x.op != "output"]
            self.boundary, self.traffic = _outside(self.problem, self.graph), traffic_of(self.graph)
        else:
            self.seeded, self.boundary, self.traffic = like.seeded, like.boundary, like.traffic
            for node, target, kwargs, record in self.seeded:  # undo what `apply` of ``like`` wrote on them
                node.target, node.kwargs = target, kwargs
                ir.set_info(node, record)
        # A copy, from which `_start` deletes what it leaves open: the next problem takes over the whole ``boundary``.
        self.outside = replace(self.boundary, fixed=dict(self.boundary.fixed), wanted=dict(self.boundary.wanted))
        self._start()
        self.seeds, axes = self._seeds(), [axis for axis in self.mesh.axes if self.mesh.size(axis) > 1]
        # The search for strategies starts from seeds and fixed layouts alone. If ``like`` has the same, so are the
        # strategies and the seconds of kernels, and the expensive search is skipped.
        if like is None or like.seeds != self.seeds or like.outside.fixed != self.outside.fixed:
            self.closures = [Closure(self.graph, self.mesh, axis, self.seeds) for axis in axes]
            self.ways = [closure.run() for closure in self.closures]
        else:
            self.closures, self.ways, self.kernels = like.closures, like.ways, like.kernels
            self.options = {node: like.options[node] for node in like.kernels}
        self._add_ops()
        self._add_values()
        self._finish()

    def _start(self) -> None:
        """Hook for subclasses, called before strategies are enumerated."""

    def _finish(self) -> None:
        """Hook for subclasses, called when all variables and costs are built."""

    def energy(self, byte: float = 0.0) -> Energy:
        """Returns the energy that the solver minimizes: the sum of all costs in seconds, in which a byte of memory
        counts as ``byte`` seconds.
        """
        return self.builder.energy(byte)

    def bytes(self, labels: Sequence[int]) -> float:
        """Returns the bytes of memory that the solution ``labels``, one label per variable, needs on a rank."""
        return self.builder.bytes(labels)

    def apply(self, labels: Sequence[int]) -> dict[fx.Node, Layout]:
        """Writes a solution on the graph: a layout on each value, and on each op the layouts that it needs of its
        operands. Returns output -> the layout in which it leaves the graph. ``labels``: one per variable, for an op the
        number of its strategy in `options`.

        It may be called again with another solution; the first call has turned tags (markers of named activations) into
        reshards.
        """
        for node in self.graph.nodes:
            if node.target is getitem:
                lay_out_getitem(node)
            elif node in self.variable:
                strategy = self.options[node][labels[self.variable[node]]]
                if node.target is ops.tag:
                    pin(self.problem, node, strategy.operands[0])
                elif node.target is ops.reshard and strategy.operands:  # a tag, before the first call
                    ir.set_info(node, ir.info(node).at(strategy.results[0]))
                # Other reshards, and unpads, are those of parameters and inputs, whose layouts the plan fixes.
                elif node.op == "call_function" and node.target not in (ops.reshard, ops.unpad):
                    decide(node, strategy)
                elif node.op == "placeholder" and ir.is_tensor(node):
                    ir.set_info(node, ir.info(node).at(strategy.results[0]))
        return self.outside.wanted

    # --- variables

    def _seeds(self) -> dict[Slot, list[Layout]]:
        """Returns value -> layouts that are given for it: those of inputs, outputs and pinned activations. The search
        for strategies of ops starts from these.
        """
        seeds: dict[Slot, list[Layout]] = {}
        for node, layout in (*self.outside.fixed.items(), *self.outside.pinned.items()):
            seeds.setdefault((node, 0), []).append(layout)
        for node, layout in self.outside.wanted.items():
            seeds.setdefault(slot_of(node), []).append(layout)
        return seeds

    def _add_ops(self) -> None:
        """Adds a variable to the problem for each op and input. The labels of the variable are the strategies of the
        node.
        """
        for node in self.graph.nodes:
            # A getitem has no variable: its source has the strategies. Nor has what returns no tensor.
            if node.op == "output" or node.target is getitem or not ir.info(node).tensors:
                continue
            if node not in self.kernels:  # else `options` is taken from ``like``
                self.options[node] = self._options(node)
            options = self.options[node]
            self.variable[node] = self.builder.add_variable(self._costs(node, options), self._memory(node))

    def _costs(self, node: fx.Node, options: tuple[Strategy, ...]) -> Table:
        """Returns the predicted seconds on a rank for each of ``options``, the strategies of ``node``."""
        costs = np.zeros(len(options))  # of inputs, and of ops without a rule
        if node.target is ops.tag:  # the reshard from the layout in which it is produced to the pinned one
            item = ir.value(node).itemsize
            costs = np.array([redistribute.seconds(o.operands[0], o.results[0], item, self.cost) for o in options])
        elif node in self.kernels:
            costs = self.kernels[node]
        elif (spec := spec_at(node)) is not None:
            costs = kernel_seconds(node, spec, options, self.traffic.get(node, Traffic()), self.cost)
            self.kernels[node] = costs
        return self.weights.of(node) * costs

    def _memory(self, node: fx.Node) -> Table | float:
        """Returns the bytes that a node keeps on each rank for a whole step, one number per strategy or one for all.
        Here it is 0; subclasses count parameters.
        """
        return 0.0

    def _options(self, node: fx.Node) -> tuple[Strategy, ...]:
        """Returns the strategies among which the solver chooses for ``node``. An op with a spec has those that
        combine one strategy per mesh axis (`ways`), and more for operands of fixed layout.
        """
        if node in self.outside.fixed:
            return (Strategy((), (self.outside.fixed[node],)),)
        if node.op != "call_function":
            return (Strategy((), tuple(Layout.whole(self.mesh, v.shape) for v in ir.info(node).tensors)),)
        # A tag and a pad add no choice: one strategy for each layout that their operand may have.
        if node.target is ops.tag:
            bases = dict.fromkeys(self._produced(*slot_of(node.args[0])))
            return tuple(Strategy((b,), (self.problem.pin_layout(node.kwargs["name"], b)[0],)) for b in bases)
        if node.target is ops.pad:
            return tuple(dict.fromkeys(padded(node, base) for base in self._produced(*slot_of(node.args[0]))))
        if node.target in local_regions.OPS:
            return (local_regions.strategy_of(node, self.mesh),)
        spec = spec_at(node)
        operands = [ir.value(x) for x in operands_of(node)]
        if spec is None:  # no rule: every rank computes it on whole operands
            whole = [tuple(Layout.whole(self.mesh, v.shape) for v in vs) for vs in (operands, ir.info(node).tensors)]
            return (Strategy(*whole),)
        combined = combine_axes(spec, self.mesh, tuple(tuple(ways[node]) for ways in self.ways))
        return combined + self._strategies_of_fixed_operands(node, spec, combined)

    def _strategies_of_fixed_operands(
        self, node: fx.Node, spec: Spec, combined: tuple[Strategy, ...]
    ) -> tuple[Strategy, ...]:
        """Returns further strategies that take the operands in exactly the layouts that are fixed for them. They are
        not in ``combined``, which does not have every nesting of axes.
        """
        operands = operands_of(node)
        fixed = [self.outside.fixed.get(x) for x in operands]
        if all(layout is None for layout in fixed):
            return ()
        layouts = [f or Layout.whole(self.mesh, ir.value(x).shape) for f, x in zip(fixed, operands, strict=True)]
        # Of an op with a `Routed`, only those in ``combined`` are sure to be as the plan requires.
        have = set(combined)
        return (
            tuple(strategy for strategy in strategies(spec, layouts) if strategy not in have)
            if spec.routed is None
            else ()
        )

    def _produced(self, maker: fx.Node, index: int) -> tuple[Layout, ...]:
        """Returns the layouts that result ``index`` of ``maker`` gets from the strategies of ``maker``, one per
        strategy.
        """
        # Strategies have layouts of the results that are tensors only.
        at = [i for i, v in enumerate(ir.info(maker).values) if v is not None].index(index)
        return tuple(option.results[at] for option in self.options[maker])

    # --- values

    def _add_values(self) -> None:
        """Adds a variable to the problem for each value that is used. The labels of the variable are the value's
        layouts.
        """
        uses: dict[Slot, list[Use]] = {}
        # Three kinds of use: by an op, as an output in a layout that is not chosen, and those of subclasses.
        for node in self.graph.nodes:
            if node.target is getitem or node not in self.variable or node in self.outside.fixed:
                continue
            for at, operand in enumerate(operands_of(node) if node.op == "call_function" else ()):
                needs = tuple(option.operands[at] for option in self.options[node])
                uses.setdefault(slot_of(operand), []).append(Use(self.variable[node], needs, self.weights.of(node)))
        for node, layout in self.outside.wanted.items():
            # A reshard of a parameter's gradient is its reduction, which may overlap with compute.
            weight = self.weights.reduce if node in self.outside.grads else 1.0
            uses.setdefault(slot_of(node), []).append(Use(None, (layout,), weight * self.weights.of(node)))
        for node, use in self._extra_uses():
            uses.setdefault(slot_of(node), []).append(use)
        for (maker, index), value_uses in uses.items():
            value = ir.info(maker).values[index]
            assert value is not None
            memory_weight = self.weights.of(maker) if self._is_saved(maker, index) else 0.0
            self.builder.add_value(
                self.variable[maker], self._produced(maker, index), value_uses, value.itemsize, memory_weight
            )

    def _is_saved(self, maker: fx.Node, index: int) -> bool:
        """Returns whether result ``index`` of ``maker``, an op of forward, is saved: it has its own memory, and
        backward reads it or a view of it.
        """
        # What has no traffic is a view and has no memory of its own.
        if maker.op != "call_function" or ir.info(maker).origin.phase != "forward" or maker not in self.traffic:
            return False
        readers = [u for u in maker.users if u.target is not getitem]
        readers += [v for u in maker.users if u.target is getitem and u.args[1] == index for v in u.users]
        while readers:
            user = readers.pop()
            if user.op == "call_function" and ir.info(user).origin.phase == "backward":
                return True
            if user.op == "call_function" and user not in self.traffic:  # a view of it
                readers += user.users
        return False

    def _extra_uses(self) -> list[tuple[fx.Node, Use]]:
        """Hook for subclasses. Returns (value, `Use`) for uses by something that is not an op, such as a choice of
        storage layouts.
        """
        return []


@dataclass(frozen=True)
class Outside:
    """Layouts that the solver does not choose: those of inputs, outputs and pinned activations.

    Args:
        fixed: placeholder, constant or pinned reshard -> its layout.
        wanted: output -> the layout in which the caller gets it.
        pinned: tagged activation -> the layout that the greedy sweep gives it.
        grads: the outputs that are gradients of parameters.
    """

    fixed: dict[fx.Node, Layout]
    wanted: dict[fx.Node, Layout]
    pinned: dict[fx.Node, Layout]
    grads: frozenset[fx.Node]


def _outside(problem: Problem, graph: fx.Graph) -> Outside:
    """Returns the `Outside` of a graph: the layouts of inputs and pins, and those of outputs and tangents as `Greedy`
    chooses them on a copy of the graph, since it writes on its nodes.
    """
    copy = ir.copied(graph)
    twins = dict(zip(graph.nodes, copy.nodes, strict=True))  # node -> its copy
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a view turns", ShardcWarning)  # about layouts that are not used
        greedy_wanted = Greedy()(problem, copy)
    fixed, pinned = {}, {}
    for node, twin in twins.items():
        if node.op in ("placeholder", "get_attr") or node.target in (ops.reshard, ops.unpad):
            if ir.is_tensor(node):
                fixed[node] = ir.layout(twin)
        elif node.target is ops.tag:
            pinned[node] = ir.layout(twin)
    wanted = {node: greedy_wanted[twin] for node, twin in twins.items() if twin in greedy_wanted}
    grads = frozenset(n for r, n in ir.outputs(graph) if r.kind == "grad" and isinstance(n, fx.Node))
    return Outside(fixed, wanted, pinned, grads)


Stored = tuple[Layout, Layout]  # (compute layout, storage layout)


@dataclass(frozen=True)
class StorageChoice:
    """The choices of storage layouts and batch axes that the plan leaves open.

    Args:
        over: axes over which parameters may be sharded in storage and gathered for compute.
        params: maps (name, compute layout) to the possible storage layouts; none for a parameter that the plan fixes,
            and none for a compute layout that the plan does not allow.
        batch: the sets of axes that may split the batch, each in mesh order; none if the plan fixes them.
        copies: copies of a parameter's shard in memory: itself, its gradient, the states of its optimizer.
    """

    over: tuple[str, ...]
    params: Callable[[str, Layout], Sequence[Layout]]
    batch: tuple[tuple[str, ...], ...]
    copies: float = 0.0


@dataclass
class OpenLayoutProblem(LayoutProblem):
    """The layout problem of one graph whose plan fixes only some parameters and inputs.

    Args:
        free: the layouts to choose from.

    Attributes:
        storages: open parameter -> its labels, pairs of compute and storage layout.
        rows: input or tangent that has the batch's dim -> its layout for each set of batch axes.
        results: output that has the batch's dim -> its layout for each set of batch axes.
        param_of: gradient of an open parameter -> the parameter.
        batch_variable: number of the variable of the axes that split the batch.
    """

    free: StorageChoice = field(default_factory=lambda: StorageChoice((), lambda name, compute: (), ((),)))

    # --- reading a solution

    def stored(self, labels: Sequence[int]) -> dict[str, Stored]:
        """Returns name of an open parameter -> its (compute layout, storage layout) in the solution ``labels``, one
        label per variable.
        """
        return {ir.info(node).name: found[labels[self.variable[node]]] for node, found in self.storages.items()}

    def batch(self, labels: Sequence[int]) -> tuple[str, ...]:
        """Returns the axes that split the batch in the solution ``labels``, one label per variable."""
        return self.free.batch[labels[self.batch_variable]] if self.free.batch else ()

    # --- the problem

    def _start(self) -> None:
        """Lists the possible layouts of what the plan leaves open: open parameters, and inputs and outputs whose dim 0
        is the batch. Their present layouts are no longer fixed.
        """
        self.storages: dict[fx.Node, list[Stored]] = {}
        self.rows: dict[fx.Node, list[Layout]] = {}
        for node in ir.placeholders(self.graph):
            role = ir.role(node)
            if role.kind == "param" and self.free.params(ir.info(node).name, ir.layout(node)):
                self.storages[node] = []  # filled by `_options`, when its compute layouts are enumerated
            elif role.kind == "input" and self.free.batch and ir.is_tensor(node) and not ir.layout(node).axes:
                self.rows[node] = [_split_over_batch(ir.layout(node), axes) for axes in self.free.batch]
        self.results: dict[fx.Node, list[Layout]] = {}
        if self.free.batch:
            # Sizes of the inputs' dim 0: an output whose dim 0 has one of them is taken to have the batch there, too.
            self._tied_outputs({ir.value(node).shape[0] for node in self.rows if ir.value(node).shape})
        for node in (*self.storages, *self.rows):
            del self.outside.fixed[node]
        # A gradient has to arrive in the storage layout of its parameter, which is open itself (`_extra_uses`).
        open_params = {ir.info(node).name: node for node in self.storages}
        grads = [(x, role.name) for role, x in ir.outputs(self.graph) if role.kind == "grad" and isinstance(x, fx.Node)]
        self.param_of = {grad: open_params[name] for grad, name in grads if name in open_params}
        for grad in self.param_of:
            del self.outside.wanted[grad]
        # Its labels are the choices of batch axes, which inputs and outputs have in common (`_finish`).
        self.batch_variable = self.builder.add_variable(np.zeros(max(len(self.free.batch), 1)))

    def _tied_outputs(self, sizes: set[int]) -> None:
        """Lists the layouts of each output and of its tangent, one for each choice of batch axes. An output is split
        over these axes if the size of its dim 0 is in ``sizes`` (the batch's), else it is replicated.
        """
        by_index: dict[int, list[Layout]] = {}
        for role, node in ir.outputs(self.graph):
            if role.kind == "output" and isinstance(node, fx.Node):
                whole = Layout.whole(self.mesh, ir.value(node).shape)
                is_batch = bool(whole.shape) and whole.shape[0] in sizes
                by_index[role.index] = [_split_over_batch(whole, axes if is_batch else ()) for axes in self.free.batch]
                self.results[node] = by_index[role.index]
                self.outside.wanted.pop(node, None)  # no longer fixed: it follows the choice
        # Along an axis that splits only other outputs, the tangent of an output is one term on each rank: a partial
        # sum (or mean). ``split``: for each choice, the axes that split any output.
        op = "avg" if self.problem.reduce == "mean" else "sum"
        split = [{a for layouts in by_index.values() for a in layouts[at].bound} for at in range(len(self.free.batch))]
        ranks = self.mesh.untimed.axes  # without the axis of microbatches, which are terms of one rank's loss
        for node in ir.placeholders(self.graph, "tangent"):
            self.rows[node] = [
                layout.with_partial([a for a in ranks if a in split[at] and a not in layout.bound], op)
                for at, layout in enumerate(by_index[ir.role(node).index])
            ]

    def _seeds(self) -> dict[tuple[fx.Node, int], list[Layout]]:
        """Returns value -> layouts from which the search for strategies starts. To those of the base class it adds
        layouts of inputs that split the batch.
        """
        return super()._seeds() | {(node, 0): rows for node, rows in self.rows.items()}

    def _options(self, node: fx.Node) -> tuple[Strategy, ...]:
        """Returns every strategy of ``node``; for an open parameter, one per (compute, storage) layout."""
        if node in self.rows:
            return tuple(Strategy((), (layout,)) for layout in self.rows[node])
        if node in self.storages:
            name = ir.info(node).name
            self.storages[node] = [(c, s) for c in self._computes(node) for s in self.free.params(name, c)]
            return tuple(Strategy((), (compute,)) for compute, _ in self.storages[node])
        return super()._options(node)

    def _costs(self, node: fx.Node, options: tuple[Strategy, ...]) -> Table:
        """Returns the predicted seconds of each of the strategies ``options``. For a parameter whose layouts are open,
        these are the seconds of gathering it.
        """
        if node not in self.storages:
            return super()._costs(node, options)
        item = max(ir.value(x).itemsize for x in gathered(node) or (node,))  # a cast before the gather makes it cheaper
        gathers = [prices((storage,), (compute,), item, self.cost)[0, 0] for compute, storage in self.storages[node]]
        return self.weights.of(node) * self.weights.gather * GATHERS * np.array(gathers)

    def _memory(self, node: fx.Node) -> Table | float:
        """Returns the bytes that a node keeps on each rank, for each of its strategies. For a parameter whose layouts
        are open, these are the bytes of its shard, gradient and optimizer state.
        """
        if node not in self.storages:
            return super()._memory(node)
        size = self.weights.of(node) * self.free.copies * ir.value(node).itemsize
        return size * np.array([storage.local_numel for _, storage in self.storages[node]])

    def _computes(self, node: fx.Node) -> list[Layout]:
        """Returns a parameter's possible compute layouts; none is split over axes that are for storage only."""
        if ir.layout(node).axes:  # the plan splits it
            return [ir.layout(node)]
        choices = []
        # For each axis, None (it splits nothing) or one split over the whole axis.
        for closure in self.closures:
            layouts = closure.layouts.get((node, 0), {}) if closure.axis not in self.free.over else {}
            # An axis with ":" is a part of one ("tp:1x2").
            choices.append([None, *(x for x in layouts if not x.partial and not any(":" in a for a in x.bound))])
        out: dict[Layout, None] = {}
        for choice in product(*choices):
            if (compute := joined(ir.layout(node), [x for x in choice if x is not None])) is not None:
                out[compute] = None
        return list(out)

    def _extra_uses(self) -> list[tuple[fx.Node, Use]]:
        """Returns (value, `Use`) for values that leave the graph: gradients, which need the storage layouts of their
        parameters, and outputs, which need layouts by the batch axes.
        """
        uses = []
        for grad, param in self.param_of.items():
            layouts = tuple(storage for _, storage in self.storages[param])
            uses.append((grad, Use(self.variable[param], layouts, self.weights.reduce * self.weights.of(param))))
        uses += [(node, Use(self.batch_variable, tuple(layouts))) for node, layouts in self.results.items()]
        return uses

    def _finish(self) -> None:
        """Adds pair costs of inf that forbid an input to be split over other axes than the chosen batch axes."""
        for node in self.rows:
            # Label k of either variable is choice k of batch axes: any pair but (k, k) is forbidden.
            tie = np.where(np.eye(len(self.free.batch), dtype=bool), 0.0, np.inf)
            self.builder.pairs.append((self.batch_variable, self.variable[node], tie))


def joined(whole: Layout, alone: Sequence[Layout]) -> Layout | None:
    """Returns the layout that combines the layouts ``alone`` of one tensor, each split over a single axis; None if they
    clash. ``whole``: the layout that splits nothing.
    """
    dims = list(whole.dims)
    for layout in alone:
        for dim, digits in enumerate(layout.dims):
            if any(d.axis is not None for d in digits):
                # At other digits of the dim than the axes before, or else inside of their shards.
                joint = merge(whole.mesh, dims[dim], digits) or nested(whole.mesh, dims[dim], digits)
                if joint is None:
                    return None
                dims[dim] = joint
    return whole.replace(dims=dims)


def _split_over_batch(layout: Layout, axes: Sequence[str]) -> Layout:
    """Returns ``layout`` with dim 0 split over ``axes``; ``layout`` itself if their sizes do not divide dim 0."""
    split: Layout | None = layout  # None: the axes so far do not divide dim 0
    for axis in axes:
        split = split.split(0, axis) if split is not None and layout.ndim else split
    return split or layout
