"""Collectives: lower every reshard to collectives and local slices, a marker node for each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx
from torch.fx.node import Argument

from shardc.cost.model import CostModel, Pricing
from shardc.cost.redistribute import Step, steps
from shardc.ir import ops
from shardc.ir.graph import info, layout, value
from shardc.ir.rewriter import GraphRewriter, Inserter

SUFFIX = {
    "all_gather": "gathered",
    "reduce_scatter": "scattered",
    "all_reduce": "summed",
    "all_to_all": "moved",
    "permute_ranks": "swapped",
    "shard": "shard",
    "to_partial": "term",
}
REDUCING = ("reduce_scatter", "all_reduce", "to_partial")
STEPS = frozenset(ops.MARKERS[kind] for kind in SUFFIX)


@dataclass(frozen=True)
class Collectives:
    """Replaces each ``ops.reshard`` by the cheapest steps from its input's layout to its own.

        %w: f32[8@fsdp,4]                       %w: f32[8@fsdp,4]
        %w.at: f32[8,4] = reshard(%w)       ->  %w.full: f32[8,4] = all_gather(%w, axis="fsdp")

    A reshard between equal layouts is removed. Each new node is named after the reshard's input and keeps the reshard's
    origin; an all-gather that ends a reshard is called ``.full``.

    *Requires:* layouts agree at every use except that of a reshard (`Reshard`). *Ensures:* there are no reshards; every
    other node is as before.

    Args:
        cost: decides between sequences of steps.
    """

    cost: Pricing = CostModel()
    name = "collectives"
    requires = ("reshard",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        reshards = dict.fromkeys(node for node in gm.graph.nodes if node.target is ops.reshard)
        rewriter = GraphRewriter(gm.graph, reusable=reshards)
        for node in reshards:
            self._spell(node, rewriter)
        gm.recompile()
        return gm

    def _spell(self, reshard: fx.Node, rewriter: GraphRewriter) -> None:
        last = reshard.args[0]
        assert isinstance(last, fx.Node)
        record = replace(info(reshard), name=info(last).name)
        plan = steps(layout(last), layout(reshard), value(reshard).itemsize, self.cost)
        for step in plan:
            suffix = "full" if step.kind == "all_gather" and step is plan[-1] else SUFFIX[step.kind]
            target, result = ops.MARKERS[step.kind], replace(value(reshard), layout=step.dst)
            last = Inserter(rewriter, reshard, record, suffix).typed(result, target, last, **_options(step))
        rewriter.replace(reshard, last)


def _options(step: Step) -> dict[str, Argument]:
    options: dict[str, Argument] = {"axis": ",".join(step.axes)}
    if step.kind in REDUCING:
        assert step.op is not None
        options["op"] = step.op
    return options


def step_of(node: fx.Node) -> Step:
    """Returns the `Step` (one collective or slice of a reshard) that a marker node stands for."""
    before = node.args[0]
    assert isinstance(before, fx.Node) and node.target in STEPS, f"{node} is not a step of a reshard"
    kind = node.target.__name__
    axes = tuple(axis for axis in str(node.kwargs["axis"]).split(",") if axis)
    op = str(node.kwargs.get("op", "sum")) if kind in REDUCING else None
    return Step(kind, axes, op, layout(before), layout(node))
