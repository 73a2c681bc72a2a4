"""Propagate: chooses a layout for every value, and the layouts that each op needs of its operands."""

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
    """Input of a layout chooser: the layouts that the plan fixes, and the cost model.

    Args:
        mesh: the mesh.
        cost: the cost model.
        batch_axes: axes that split the batch; outputs stay split over these only, by default.
        output_layout: maps (index, name, natural layout) of a forward output to (layout, plan entry).
        pin_layout: maps (tag name, current layout) of a tagged activation to (layout, plan entry).
        grad_layouts: parameter -> storage layout of its gradient.
        compute_layouts: parameter -> its compute layout, which its gradient has before it is reduced over the batch.
        reduce: "mean" or "sum": combines the ranks' tangents of an output that is replicated over a batch axis.
        strict: an op without a rule is an error.
        deferred: parameters whose gradients are not reduced, or over some axes only.
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
    """Interface of a layout chooser. It gives every value of a graph a layout, and every op the layouts that it needs
    of its operands (``Info.needs``).
    """

    def __call__(self, problem: Problem, graph: fx.Graph) -> Mapping[fx.Node, Layout]:
        """Writes a layout on every value of ``graph``, and on every op the layouts that it needs of its operands.
        Returns output -> the layout in which it leaves the graph.
        """


@dataclass(frozen=True)
class Propagate:
    """Gives every value a layout, and every op the layouts that it needs of its operands (``Info.needs``).

        %x: f32[8@dp,4]                     %x: f32[8@dp,4]
        %y = mm(%x, %w)                 ->  %y: f32[8@dp,2] = mm(%x, %w)     (needs [8@dp,4], [4,2])

    *Requires:* placeholders except tangents have layouts (`Seed`). *Ensures:* every value has a layout, every op its
    needs, and every output's role the layout in which the caller gets it.

    Args:
        problem: what the plan fixes.
        chooser: chooses the rest; later passes do not depend on which one it is.
    """

    problem: Problem
    chooser: Chooser
    name = "propagate"
    requires = ("seed",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        wanted = self.chooser(self.problem, gm.graph)
        # A chooser writes on nodes; the layouts in which outputs leave are recorded in their roles, for `Reshard`.
        ir.output_node(gm.graph).meta[ir.ROLES] = tuple(
            replace(role, layout=wanted[node]) if isinstance(node, fx.Node) else role
            for role, node in ir.outputs(gm.graph)
        )
        return gm


# --- functions with which choosers write layouts on nodes


def decide(node: fx.Node, strategy: Strategy) -> None:
    """Writes ``strategy`` on ``node``: the layouts that it needs of its operands, and those of its results."""
    record = replace(ir.info(node), needs=strategy.operands)
    if isinstance(record.value, tuple):
        # A strategy has layouts of tensors only; other results are None.
        results = iter(strategy.results)
        ir.set_info(node, record.at(tuple(None if v is None else next(results) for v in record.value)))
    else:
        ir.set_info(node, record.at(strategy.results[0]) if record.value is not None else record)


def pin(problem: Problem, node: fx.Node, source: Layout) -> None:
    """Turns a tag (the marker of a named activation, with layout ``source``) into a reshard to the layout that the plan
    pins.
    """
    layout, cause = problem.pin_layout(node.kwargs["name"], source)
    record = ir.info(node)
    node.target, node.kwargs = ops.reshard, {}
    ir.set_info(node, replace(record.at(layout), origin=replace(record.origin, cause=cause)))


def lay_out_getitem(node: fx.Node) -> None:
    """Gives a getitem the layout of the result that it reads."""
    source, index = node.args
    value = ir.info(source).values[index]
    assert value is not None
    ir.set_info(node, ir.info(node).at(value.layout))


def padded(node: fx.Node, source: Layout) -> Strategy:
    """Returns the strategy of a ``pad`` whose operand has layout ``source``: the dim that grows is replicated."""
    dim, size = node.kwargs["dim"], node.kwargs["size"]
    base = source.unbind(source.dim_axes(dim))
    # A `Digit` without an axis: the dim at its new size, split by nothing.
    return Strategy((base,), (base.replace(dims=[*base.dims[:dim], (Digit(size),), *base.dims[dim + 1 :]]),))
