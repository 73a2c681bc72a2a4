"""Reshard: every disagreement between a producer's layout and a consumer's need, as a node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.rewriter import GraphRewriter, Inserter
from shardc.passes.calls import operands_of, with_operands


@dataclass(frozen=True)
class Reshard:
    """Inserts one ``reshard`` for each (value, layout) that some use needs and the value does not have.

    Takes: a graph whose values have layouts and whose ops say what they need. Guarantees: layouts agree at
    every use, and every output is in the layout that the outside wants.
    """

    name = "reshard"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        inserted: dict[tuple[fx.Node, Layout], fx.Node] = {}
        rewriter = GraphRewriter(gm.graph)

        def at(x: fx.Node, want: Layout | None, user: fx.Node | None, consumer: str) -> fx.Node:
            """``x`` at layout ``want``, in front of ``user``; for None of the outside, right behind ``x``."""
            if want is None or ir.layout(x) == want:
                return x
            if (x, want) not in inserted:
                record = ir.info(x)
                origin = replace(record.origin, region=0, consumer="" if record.origin.cause else consumer)
                if user is not None:
                    used = ir.info(user).origin
                    origin = replace(origin, phase=used.phase, region=used.region)
                place = Inserter(rewriter, user or _after(x), replace(record, origin=origin), "at")
                inserted[x, want] = place.typed(replace(ir.value(x), layout=want), ops.reshard, x)
            return inserted[x, want]

        for node in list(gm.graph.nodes):
            if node.op == "output":
                ir.change_outputs(gm.graph, lambda role, x: at(x, role.layout, None, role.name))
            elif node.op == "call_function" and (needs := ir.info(node).needs) is not None:
                operands, name = operands_of(node), ir.info(node).name
                now = [at(x, want, node, name) for x, want in zip(operands, needs, strict=True)]
                if now != operands:
                    node.args, node.kwargs = with_operands(node, now)
        return gm


def _after(x: fx.Node) -> fx.Node:
    """The node in front of which a reshard of ``x`` stands as early as it can."""
    after = x.next
    while after.op in ("placeholder", "get_attr"):
        after = after.next
    return after
