"""Reshard: every disagreement between a producer's layout and a consumer's need, as a node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.graph import NameScope
from shardc.ir.layout import Layout
from shardc.passes.calls import operands_of, with_operands


@dataclass(frozen=True)
class Reshard:
    """Inserts one ``reshard`` for each (value, layout) that some use needs and the value does not have.

    Takes: a graph whose values have layouts and whose ops say what they need. Guarantees: layouts agree at
    every use, and every output is in the layout that the outside wants.
    """

    name = "reshard"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        names = NameScope.of(gm.graph)
        made: dict[tuple[fx.Node, Layout], fx.Node] = {}
        for node in list(gm.graph.nodes):
            if node.op == "output":
                ir.change_outputs(gm.graph, lambda role, x: _at(gm.graph, names, made, x, role.layout, None, role.name))
            elif node.op == "call_function" and (needs := ir.info(node).needs) is not None:
                operands = operands_of(node)
                cause = ir.info(node).name
                now = [
                    _at(gm.graph, names, made, x, want, node, cause) for x, want in zip(operands, needs, strict=True)
                ]
                if now != operands:
                    node.args, node.kwargs = with_operands(node, now)
        return gm


def _after(x: fx.Node) -> fx.Node:
    """The node in front of which a reshard of ``x`` stands as early as it can."""
    after = x.next
    while after.op in ("placeholder", "get_attr"):
        after = after.next
    return after


def _at(
    graph: fx.Graph,
    names: NameScope,
    made: dict[tuple[fx.Node, Layout], fx.Node],
    x: fx.Node,
    want: Layout | None,
    user: fx.Node | None,
    cause: str,
) -> fx.Node:
    """``x`` at layout ``want``: itself, a reshard made before, or a new one, of the phase and the region of its use.

    Args:
        user: what wants it, in front of which a new one stands; None for the outside.
    """
    record = ir.info(x)
    if want is None or ir.layout(x) == want:
        return x
    if (x, want) not in made:
        phase = record.origin.phase if user is None else ir.info(user).origin.phase
        region = 0 if user is None else ir.info(user).origin.region
        with graph.inserting_before(_after(x) if user is None else user):
            node = graph.call_function(ops.reshard, (x,))
        origin = replace(record.origin, phase=phase, cause=record.origin.cause or f"needed by {cause}", region=region)
        fresh = replace(record, name=names.fresh(f"{record.name}.at"), origin=origin, role=None, needs=None)
        made[x, want] = ir.set_info(node, fresh.at(want))
    return made[x, want]
