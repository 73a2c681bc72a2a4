"""Derives the backward graph for a loss that uses only some outputs, from the backward graph for all outputs."""

from __future__ import annotations

from torch import fx

from shardc import _compat
from shardc.ir import graph as ir
from shardc.ir.arena import PLAN
from shardc.ir.executable import Half
from shardc.lower.inductor import give_values
from shardc.passes import PlanMemory, PruneUnusedGrads
from shardc.passes.pipeline import Hook, Pipeline
from shardc.precompiled.save import untied


def backward_for(used: frozenset[int], backward: Half, *hooks: Hook) -> fx.GraphModule:
    """Return the backward graph for a loss that uses the outputs ``used``.

    It depends only on the text of ``backward``, which ranks have compared, so a rank that compiled the program and one
    that loaded it derive the same graph.

    Args:
        backward: the backward half for all outputs; it is not changed.
    """
    gm = untied(backward.gm)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            node.meta = {ir.KEY: node.meta[ir.KEY]}
    ir.output_node(gm.graph).meta.pop(PLAN, None)
    with _compat.no_autocast():
        give_values(gm)
    return Pipeline((PruneUnusedGrads(used), PlanMemory(backward.mesh))).run(gm, *hooks)
