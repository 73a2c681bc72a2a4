"""Spells the collectives of a local graph by the algorithms that the cost model finds fastest.

    reduce_scatter   natively, or an all-to-all whose pieces each rank reduces by itself
    all_gather       natively, or an all-to-all of as many copies as there are ranks
    all_reduce       natively, or a reduce-scatter and an all-gather, each by its fastest algorithm

All move the same bytes. Which is fastest is a matter of the backend: gloo runs a reduce-scatter as a
whole all-reduce, so that there the all-to-all wins. A cost model that was not measured on the backend
(`python -m shardc calibrate`) has no opinion, and all stay native.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from shardc.cost.model import CostModel
from shardc.ir.graph import NameScope, info, set_info, value
from shardc.ir.mesh import Mesh
from shardc.ir.tally import arguments_of, group_axes
from shardc.passes.algorithms.algorithm import Algorithm, Group, Spelling
from shardc.passes.algorithms.exchange import ExchangedGather, ExchangedScatter
from shardc.passes.algorithms.native import Native
from shardc.passes.algorithms.two_steps import TwoSteps

__all__ = ["ALGORITHMS", "Algorithm", "Algorithms", "Group", "Spelling"]

c10d = torch.ops._c10d_functional
_KINDS = {
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.all_reduce.default: "all_reduce",
}

# Of equally fast ones the first is taken.
ALGORITHMS: tuple[Algorithm, ...] = (*map(Native, _KINDS.values()), ExchangedScatter(), ExchangedGather(), TwoSteps())


@dataclass(frozen=True)
class Algorithms:
    """Replaces native collectives where another algorithm is faster.

    Takes a local graph with fake values, in any order; leaves coalesced collectives alone. What starts a
    collective stays where it was, what its result needs comes after the wait.

    Args:
        mesh: says how many ranks a group has.
        cost: a measured cost model.
        algorithms: those that there are.
    """

    mesh: Mesh
    cost: CostModel
    algorithms: tuple[Algorithm, ...] = ALGORITHMS
    name = "algorithms"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        native = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in _KINDS]
        names = NameScope.of(gm.graph) if native else NameScope()
        changed = [node for node in native if self._spelled(node, names)]
        if changed:
            gm.graph.lint()
            gm.recompile()
        return gm

    def _spelled(self, node: fx.Node, names: NameScope) -> bool:
        """Whether ``node`` was replaced by a faster algorithm."""
        arguments, kind = arguments_of(node), _KINDS[node.target]
        x: fx.Node = arguments["input"]
        axes = group_axes(name := arguments["group_name"], self.mesh)
        assert axes is not None, f"{node} is over no group of {self.mesh}"
        group = Group(name, prod(self.mesh.size(axis) for axis in axes), self.cost, self.algorithms)
        best = group.best(kind, value(x))
        if isinstance(best, Native):
            return False
        (wait,) = node.users
        result = best.spell(x, Spelling(node, wait, group, arguments.get("reduce_op", ""), names))
        set_info(result, info(wait))  # it takes the place, and the name, of what was waited for
        wait.replace_all_uses_with(result)
        for gone in (wait, node):
            node.graph.erase_node(gone)
        return True
