"""Propagate: a layout for every value, and what each op needs of its operands."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from shardc.ir import graph as ir
from shardc.passes.greedy import Greedy
from shardc.passes.problem import Chooser, Problem


@dataclass(frozen=True)
class Propagate:
    """Gives every value a layout; ``Info.needs`` then says which reshards are missing.

    Args:
        problem: what the plan fixes.
        chooser: chooses the rest; nothing behind this pass knows how.
    """

    problem: Problem
    chooser: Chooser = Greedy()
    name = "propagate"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        wanted = self.chooser(self.problem, gm.graph)
        ir.output_node(gm.graph).meta[ir.ROLES] = tuple(
            replace(role, layout=wanted[node]) if isinstance(node, fx.Node) else role
            for role, node in ir.outputs(gm.graph)
        )
        return gm
