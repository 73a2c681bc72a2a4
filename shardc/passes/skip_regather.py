"""Skip regather: forward reads a parameter as it was gathered first."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardc.ir import graph as ir
from shardc.passes.partition import drop_dead


@dataclass(frozen=True)
class SkipRegather:
    """Reads ``w.full`` in the place of ``w.full.regathered`` where one half has both; they are equal.

    Takes: one half of a local graph, as it was cut. What `KeepPart` slices for backward is an output of forward, which
    has no gather of that.
    """

    name = "skip_regather"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        named = {ir.info(node).name: node for node in gm.graph.nodes if node.op != "output"}
        again = {node: named.get(name.removesuffix(ir.REGATHERED)) for name, node in named.items()}
        for node, whole in again.items():
            if whole is not None and whole is not node:
                node.replace_all_uses_with(whole)
                drop_dead(gm.graph)
        return gm
