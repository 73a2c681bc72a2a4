"""Ops of a graph as seen by layout passes: the rule's `Call`, operands, and the predicted seconds of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from shardc.cost import redistribute
from shardc.cost.model import Pricing
from shardc.custom_ops.flops import is_attention
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import arguments_of, wire_elements
from shardc.ir.graph import Value
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.op_traits import CAST, moves_data, starts
from shardc.rules import spec_of
from shardc.rules.rule import Call
from shardc.rules.spec import Spec, Strategy, strategies

aten = torch.ops.aten


def call_of(node: fx.Node) -> Call:
    """Converts an op node to a `Call`: target, arguments and results at global shapes, without layouts. Calls are
    hashable, and equal for ops of equal shapes, so that what follows from them is computed once.
    """
    return Call(
        target=node.target,
        args=tuple(plain(a) for a in node.args),
        kwargs=tuple(sorted((k, plain(a)) for k, a in node.kwargs.items())),
        results=tuple(v and Value(v.dtype, v.shape) for v in ir.info(node).values),  # None for no tensor
    )


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Returns the tensor operands of ``node`` in schema order, lists flattened, as `Call.operands` has them."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [x for x in node.all_input_nodes if ir.is_tensor(x)]
    arguments, out = arguments_of(node), []
    for argument in schema.arguments:
        item = arguments.get(argument.name)
        items = item if isinstance(item, (list, tuple)) else (item,)
        out += [x for x in items if isinstance(x, fx.Node) and ir.is_tensor(x)]
    return out


def with_operands(node: fx.Node, operands: list[fx.Node]) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """Returns (args, kwargs) of ``node`` with its operands, in the order of `operands_of`, replaced by ``operands``."""
    replacements, old = iter(operands), set(operands_of(node))
    schema = getattr(node.target, "_schema", None)
    # `map_arg` goes through args, then kwargs: with kwargs in schema order it meets operands in that of `operands_of`.
    order = [a.name for a in schema.arguments if a.name in node.kwargs] if schema else node.kwargs
    kwargs = {name: node.kwargs[name] for name in order}
    args, kwargs = fx.map_arg((node.args, kwargs), lambda x: next(replacements) if x in old else x)
    return args, kwargs


def plain(argument: Any) -> Any:
    """Returns ``argument`` in hashable form: a node becomes its `Value` (dtype and shape), a list becomes a tuple."""
    if isinstance(argument, fx.Node):
        value = ir.info(argument).value
        return Value(value.dtype, value.shape) if isinstance(value, Value) else value
    if isinstance(argument, (list, tuple)):
        return tuple(plain(a) for a in argument)
    return argument


def move_of(node: fx.Node) -> Spec | None:
    """Returns the factors (`Spec`) of an op that only moves one operand (a view, a transpose), None for other nodes."""
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return None
    spec = spec_of(call_of(node))
    return spec if spec is not None and spec.moves and len(spec.operands) == len(spec.results) == 1 else None


# Ops that, like views, may stand between a collective and the output, or between two collectives on the way there.
_FINISHING = {WAIT, CAST, aten.sum.dim_IntList, aten.div.Tensor}


def is_start(node: fx.Node) -> bool:
    """Returns whether ``node`` starts a collective, or a move between host and device."""
    return node.op == "call_function" and starts(node.target)


def result_bytes(node: fx.Node) -> int:
    """Returns the bytes per rank of the results of a collective or move."""
    return sum(value.nbytes for value in ir.info(node).tensors)


def leaving(graph: fx.Graph) -> dict[fx.Node, int]:
    """Returns the nodes that only carry results of collectives to the output (waits, views, casts, sums of received
    terms, further collectives, copies to the host), as a dict: node -> number of collectives before it.
    """
    out = only_to_output(graph, lambda node: moves_data(node.target) or node.target in _FINISHING or is_start(node))
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node in out:
            counts = [level.get(x, 0) + is_start(x) for x in node.all_input_nodes if x in out or is_start(x)]
            if any(counts):  # else no collective is before it
                level[node] = max(counts)
    return level


def only_to_output(graph: fx.Graph, accepts: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Returns the nodes that ``accepts`` accepts and whose uses all lead to the output through such nodes."""
    out: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.users and accepts(node) and all(user.op == "output" or user in out for user in node.users):
            out.add(node)
    return out


def before_other_starts(leaves: dict[fx.Node, int]) -> set[fx.Node]:
    """Returns those of ``leaves``, a result of `leaving`, that lead to a further collective or move, or are one."""
    leading: set[fx.Node] = set()
    for node in reversed(leaves):  # in the graph's order: users before operands
        if is_start(node) or not leading.isdisjoint(node.users):
            leading.add(node)
    return leading


PIN_PENALTY = 1e4  # factor on the cost of resharding a value whose layout the plan pins; it pins none over time


@dataclass(frozen=True)
class Work:
    """Properties of an op that its compute time depends on.

    Args:
        dtypes: dtypes of the operands, then of the results.
        attention: whether the op is an attention kernel.
    """

    dtypes: tuple[torch.dtype, ...]
    attention: bool = False

    @staticmethod
    def of(call: Call) -> Work:
        """Returns the `Work` of ``call``: the dtypes of its operands and results, and whether it is an attention
        kernel.
        """
        values = (*call.operands, *call.results)
        return Work(tuple(v.dtype for v in values if v is not None), is_attention(call.target))


@dataclass(frozen=True)
class Gradient:
    """Marks a value that is used, through linear ops, by one parameter's gradient only.

    Args:
        target: layout (batch axes excepted) in which the value should be, so that the gradient has its compute layout
            without a reshard; None if it cannot be derived.
        batch_axes: axes that are ignored: over these the value stays a partial sum until the gradient's reduction.
    """

    target: Layout | None
    batch_axes: tuple[str, ...]

    def seconds(self, layout: Layout, itemsize: int, cost: Pricing) -> float:
        """Returns the predicted seconds to reshard the value from ``layout`` to ``target``. Reductions over batch axes
        are not counted: every gradient needs these.
        """
        if self.target is None:
            return 0.0
        reduced = layout.unbind(self.batch_axes).without_partial(self.batch_axes)
        return redistribute.seconds(reduced, self.target, itemsize, cost)


@lru_cache(maxsize=65536)
def priced(
    spec: Spec,
    operands: tuple[Layout, ...],
    reachable: tuple[frozenset[Layout], ...],
    pinned: tuple[bool, ...],
    work: Work,
    grad: Gradient | None,
    cost: Pricing,
) -> tuple[tuple[float, Strategy], ...]:
    """Returns (seconds, strategy) for each strategy that follows from the operands' layouts. One of them splits
    nothing, unless the plan requires a split.

    Memoised, so that repeated layers are priced once. The seconds are those of the reshards of operands, of later
    reductions, and of the compute of each rank.

    Args:
        spec: the op's factors.
        operands: layouts that the operands have.
        reachable: for each operand, further layouts that it has been resharded to for an earlier use, at no cost now.
        pinned: for each operand, whether the plan fixes its layout.
        work: further properties that the compute time depends on.
        grad: the gradient that the result leads to, if it leads to nothing else.
        cost: the cost model.
    """
    out = []
    for strategy in strategies(spec, operands):
        # Reshards of operands. ``dtypes`` is longer, as it has the results' dtypes, too.
        price = sum(
            redistribute.seconds(have, want, dtype.itemsize, cost, PIN_PENALTY if pin else 1.0)
            for have, want, seen, pin, dtype in zip(
                operands, strategy.operands, reachable, pinned, work.dtypes, strict=False
            )
            if have != want and want not in seen
        )
        itemsize = work.dtypes[-1].itemsize  # of the result
        if grad is not None:
            price += grad.seconds(strategy.results[0], itemsize, cost)
        else:
            price += _later_reductions(spec, operands, strategy, itemsize, cost)
        price += compute_seconds(spec, strategy, work, cost)
        out.append((price, strategy))
    return tuple(out)


def compute_seconds(spec: Spec, strategy: Strategy, work: Work, cost: Pricing) -> float:
    """Returns the predicted compute seconds of each rank, with the communication inside the op that compute does not
    hide; 0 for an op that only moves data, such as a view.
    """
    if spec.moves:
        return 0.0
    layouts = (*strategy.operands, *strategy.results)
    moved = sum(layout.local_numel * dtype.itemsize for layout, dtype in zip(layouts, work.dtypes, strict=True))
    computed = cost.compute_seconds(operations(spec, strategy), moved, work.dtypes[0], work.attention)
    return with_sending(spec, strategy.operands, work, cost, computed)


def operations(spec: Spec, strategy: Strategy) -> float:
    """Returns the floating-point operations of one rank under ``strategy``. Ranks that have to compute one after
    another (as in a split scan) do not divide the operations among them.
    """
    layouts = (*strategy.operands, *strategy.results)
    if spec.in_turn:
        # Axes over which ranks take turns.
        in_turn_axes = {
            axis for layout, dims in zip(strategy.operands, spec.operands, strict=True)
            for dim, factors in enumerate(dims) if spec.in_turn & set(factors) for axis in layout.dim_axes(dim)
        }  # fmt: skip
        layouts = tuple(layout.unbind(in_turn_axes) for layout in layouts)
    return spec.flops / shares(layouts)


def with_sending(spec: Spec, operands: Sequence[Layout], work: Work, cost: Pricing, computed: float) -> float:
    """Returns the seconds of an op with the communication inside it: ``computed`` (seconds of compute) plus the seconds
    of routed rows or ring attention that compute does not hide.

    In a ring a rank computes on one block while the next one arrives.

    Args:
        operands: the operands' layouts.
        computed: compute seconds of the op on one rank.
    """
    if spec.routed is None:
        return computed
    axes_of: dict[str, tuple[str, ...]] = {}  # factor -> the axes that split it
    for layout, dims in zip(operands, spec.operands, strict=True):
        for dim, factors in enumerate(dims):
            axes_of |= {factor: layout.dim_axes(dim) for factor in factors if factor not in axes_of}
    row_axes, owner_axes = axes_of.get(spec.routed.rows, ()), axes_of.get(spec.routed.owners, ())
    # Rows (tokens, queries) and owners (experts, keys) are on different ranks if an axis splits both.
    mesh, sent = operands[0].mesh, tuple(axis for axis in row_axes if axis in owner_axes)
    if not sent:
        return computed
    rows = spec.size(spec.routed.rows) // prod([mesh.size(axis) for axis in row_axes])  # of a rank
    ranks = prod([mesh.size(axis) for axis in sent])
    over_axes = tuple(sorted(sent, key=mesh.order))
    if spec.routed.moving:  # keys go to the queries
        part = sum(operands[at].local_numel * work.dtypes[at].itemsize for at in spec.routed.moving)
        trips = spec.routed.trips  # how often they are sent
        overlapped = computed / trips if spec.routed.around else None  # in a ring; else they are gathered first
        return computed + trips * passing_seconds(mesh, over_axes, part, overlapped, cost)
    # Tokens go to the experts. ``elements`` counts those of a row there and back together: half of them go each way.
    wire = wire_elements("all_to_all", ranks, rows * spec.routed.elements) * work.dtypes[0].itemsize
    return computed + 2 * cost.collective_seconds("all_to_all", mesh, over_axes, wire / 2)


def passing_seconds(mesh: Mesh, axes: tuple[str, ...], part: float, computed: float | None, cost: Pricing) -> float:
    """Returns the predicted exposed seconds of passing each rank's ``part`` bytes to all other ranks along ``axes``: in
    a ring beside ``computed`` seconds of the op's compute or, if that is None, by an all-gather before it.
    """
    ranks = prod([mesh.size(axis) for axis in axes])
    if computed is None:
        return cost.collective_seconds("all_gather", mesh, axes, (ranks - 1) * part)
    trip = cost.collective_seconds("permute_ranks", mesh, axes, part)
    # All but the last of ``ranks`` blocks are computed on while the next one arrives.
    return (ranks - 1) * max(trip - computed / ranks, 0.0)


def shares(layouts: tuple[Layout, ...]) -> int:
    """Returns how many ranks share the work of an op, given the ``layouts`` of its operands and results: the product
    of the sizes of the axes that split any of them.
    """
    mesh = layouts[0].mesh
    axes = {axis for layout in layouts for axis in layout.bound}
    # A part of an axis (`tp:1x2`): another tensor may bind the whole axis. Cut in equal parts, none counts twice.
    if any(":" in axis for axis in axes):
        edges = mesh.edges(axes)
        axes = {part for axis in axes for part in mesh.parts(axis, edges)}
    return prod([mesh.size(axis) for axis in axes])


def _later_reductions(
    spec: Spec, operands: tuple[Layout, ...], strategy: Strategy, itemsize: int, cost: Pricing
) -> float:
    """Returns the predicted seconds of the reductions that remain after an op because its operands are partial already:
    the pending reductions that ``strategy`` passes on to the results.

    The pending sum of a contraction itself is not counted: it comes with every strategy that splits the contraction.
    """
    pending_before = {axis for layout in operands for axis, _ in layout.partial}  # axes of the operands' partial sums
    total = 0.0
    for layout in strategy.results:
        carried = [axis for axis, _ in layout.partial if axis in pending_before]
        if carried:
            total += redistribute.seconds(layout, layout.without_partial(carried), itemsize, cost)
    # The factor decides ties only: ops that move data carry the partial sum (their consumer decides its layout), others
    # reduce first.
    return total * (0.999 if spec.moves else 1.001)
