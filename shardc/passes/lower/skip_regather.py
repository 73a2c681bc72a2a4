"""Skip regather: drops the second gather of a parameter (meant for backward) from a half that contains the
first one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardc.ir import graph as ir
from shardc.ir.rewriter import GraphRewriter


@dataclass(frozen=True)
class SkipRegather:
    """Drops the second gather of a parameter (``w.full.regathered``) in a half that also has the first (``w.full``);
    its users read the first.

        %y = mm(%x, %w.full.regathered)     ->  %y = mm(%x, %w.full)

    *Requires:* one half of a local graph, from `Partition`. *Ensures:* forward gathers each parameter once; the slice
    that `KeepPart` takes for backward is its output.
    """

    name = "skip_regather"
    requires = ("partition",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        named = {ir.info(node).name: node for node in calls}
        # Name of a first gather in this half -> the second gather: the last of its ops, as later ones replace earlier.
        regathered = {name: node for node in calls if (name := ir.info(node).regathers) in named}
        for name, node in regathered.items():
            node.replace_all_uses_with(named[name])
        if regathered:
            GraphRewriter(gm.graph).erase_unused()
        return gm
