"""Propagate: a layout for every value, and what each op needs of its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import fx

from shardc.cost.model import Pricing
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh
from shardc.rules.spec import Strategy

OutputLayout = Callable[[int, str, Layout], tuple[Layout, str]]
PinLayout = Callable[[str, Layout], tuple[Layout, str]]


@dataclass(frozen=True)
class Problem:
    """What the plan says, and what strategies are priced by.

    Args:
        mesh, cost: what strategies are priced on.
        batch_axes: axes that split the batch; outputs stay split over these only, by default.
        output_layout: (index, name, natural layout) -> (layout, plan entry) of a forward output.
        pin_layout: (tag name, layout as it comes) -> (layout, plan entry) of a tagged activation.
        grad_layouts: storage layout of each parameter's gradient, by name.
        compute_layouts: compute layout of each parameter, by name: what its gradient has before the batch axes.
        reduce: "mean" or "sum": what the gradient of an output that is whole over a batch axis is of the ranks'.
        strict: an op without a rule is an error.
        deferred: parameters whose gradients stay as they come, pending sums and all.
    """

    mesh: Mesh
    cost: Pricing
    batch_axes: tuple[str, ...]
    output_layout: OutputLayout
    pin_layout: PinLayout
    grad_layouts: dict[str, Layout] = field(default_factory=dict)
    compute_layouts: dict[str, Layout] = field(default_factory=dict)
    reduce: str = "mean"
    strict: bool = False
    deferred: Deferred = NOTHING


class Chooser(Protocol):
    """Gives every value of a seeded graph a layout, and every op its ``Info.needs``.

    The verifier checks behind it that every op's needs and layouts agree with its rule, and that what is pinned stayed.
    """

    def __call__(self, problem: Problem, graph: fx.Graph) -> Mapping[fx.Node, Layout]:
        """Returns the layout in which each output of ``graph`` is wanted."""


@dataclass(frozen=True)
class Propagate:
    """Gives every value a layout; ``Info.needs`` then says which reshards are missing.

    Args:
        problem: what the plan fixes.
        chooser: chooses the rest; nothing behind this pass knows how.
    """

    problem: Problem
    chooser: Chooser
    name = "propagate"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        wanted = self.chooser(self.problem, gm.graph)
        ir.output_node(gm.graph).meta[ir.ROLES] = tuple(
            replace(role, layout=wanted[node]) if isinstance(node, fx.Node) else role
            for role, node in ir.outputs(gm.graph)
        )
        return gm


# --- what choosers write on nodes


def decide(node: fx.Node, strategy: Strategy) -> None:
    """Writes on ``node`` what it needs of its operands, and the layouts of its results."""
    record = replace(ir.info(node), needs=strategy.operands)
    if isinstance(record.value, tuple):
        results = iter(strategy.results)
        ir.set_info(node, record.at(tuple(None if v is None else next(results) for v in record.value)))
    else:
        ir.set_info(node, record.at(strategy.results[0]) if record.value is not None else record)


def pin(problem: Problem, node: fx.Node, source: Layout) -> None:
    """Makes a tag, whose operand comes in ``source``, the reshard to what the plan says."""
    layout, cause = problem.pin_layout(node.kwargs["name"], source)
    record = ir.info(node)
    node.target, node.kwargs = ops.reshard, {}
    ir.set_info(node, replace(record.at(layout), origin=replace(record.origin, cause=cause)))


def take(node: fx.Node) -> None:
    """Gives a result that is taken out of several its layout."""
    source, index = node.args
    value = ir.info(source).values[index]
    assert value is not None
    ir.set_info(node, ir.info(node).at(value.layout))


def padded(node: fx.Node, source: Layout) -> Strategy:
    """The strategy of a ``pad`` of what comes in ``source``: it takes the dim that it grows whole."""
    dim, size = node.kwargs["dim"], node.kwargs["size"]
    base = source.unbind(source.dim_axes(dim))
    return Strategy((base,), (base.replace(dims=[*base.dims[:dim], (Digit(size),), *base.dims[dim + 1 :]]),))
