"""Skip regather: forward reads a parameter as it was gathered first."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardc.ir import graph as ir
from shardc.ir.rewriter import GraphRewriter


@dataclass(frozen=True)
class SkipRegather:
    """Reads ``w.full`` in the place of ``w.full.regathered`` where one half has both; they are equal.

    Takes: one half of a local graph, as it was cut. What `KeepPart` slices for backward is an output of forward, which
    has no gather of that.
    """

    name = "skip_regather"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        named = {ir.info(node).name: node for node in calls}
        regathered = {name: node for node in calls if (name := ir.info(node).regathers) in named}  # the last op of each
        for name, node in regathered.items():
            node.replace_all_uses_with(named[name])
        if regathered:
            GraphRewriter(gm.graph).erase_unused()
        return gm
