"""Reshard: inserts a reshard node for each use that needs a value in another layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.rewriter import GraphRewriter, Inserter
from shardc.passes.op_calls import operands_of, with_operands


@dataclass(frozen=True)
class Reshard:
    """Inserts one ``reshard`` for each (value, layout) that some use needs and the value does not have.

        %w: f32[8@tp,4]                     %w: f32[8@tp,4]
        %y = mm(%x, %w)                 ->  %w.at: f32[8,4] = reshard(%w)
        (needs %w: f32[8,4])                %y = mm(%x, %w.at)

    *Requires:* values have layouts and ops have needs (`Propagate`). *Ensures:* layouts agree at every use, and every
    output has the layout of its role.
    """

    name = "reshard"
    requires = ("propagate",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        inserted: dict[tuple[fx.Node, Layout], fx.Node] = {}  # (value, layout) -> the reshard, for all later uses
        rewriter = GraphRewriter(gm.graph)

        def resharded(x: fx.Node, want: Layout | None, user: fx.Node | None, consumer: str) -> fx.Node:
            """Returns ``x`` at layout ``want``, through a reshard if it has another layout. The reshard stands before
            ``user`` or, if that is None, right after ``x``. ``consumer``: name of the op that it is for.
            """
            if want is None or ir.layout(x) == want:
                return x
            if (x, want) not in inserted:
                record = ir.info(x)
                # A reshard is recomputed or saved as its user is, and names it unless a plan entry led to the value.
                origin = replace(record.origin, region=0, policy="", consumer="" if record.origin.cause else consumer)
                if user is not None:
                    used = ir.info(user).origin
                    origin = replace(origin, phase=used.phase, region=used.region)
                place = Inserter(rewriter, user or _after(x), replace(record, origin=origin), suffix="at")
                inserted[x, want] = place.typed(replace(ir.value(x), layout=want), ops.reshard, x)
            return inserted[x, want]

        for node in list(gm.graph.nodes):
            if node.op == "output":
                ir.change_outputs(gm.graph, lambda role, x: resharded(x, role.layout, None, role.name))
            elif node.op == "call_function" and (needs := ir.info(node).needs) is not None:
                operands, name = operands_of(node), ir.info(node).name
                now = [resharded(x, want, node, name) for x, want in zip(operands, needs, strict=True)]
                if now != operands:
                    node.args, node.kwargs = with_operands(node, now)
        return gm


def _after(x: fx.Node) -> fx.Node:
    """Returns the node before which a reshard of ``x`` is inserted: the first one after ``x`` that is neither a
    placeholder nor an attribute, as these stand at the start of a graph.
    """
    after = x.next
    while after.op in ("placeholder", "get_attr"):
        after = after.next
    return after
