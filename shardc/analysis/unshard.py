"""Selective unsharding: which parameters stay whole from forward to backward, where memory is left for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor, fx

from shardc.analysis.cost import CostModel
from shardc.analysis.sequence import gathered_parameters
from shardc.ir.mesh import Mesh
from shardc.ir.tally import arguments_of, collective_kind, group_axes, wire_elements


@dataclass(frozen=True)
class Gathered:
    """What it takes to gather a parameter again.

    Args:
        name: of the parameter.
        seconds: of its collectives.
        held: bytes of the gathered parameter, on each rank.
    """

    name: str
    seconds: float
    held: int


def keep_within(graph: fx.Graph, mesh: Mesh, levels: Mapping[str, int], budget: int, cost: CostModel) -> dict[str, int]:
    """``levels`` with 2 in the place of 3 for the parameters that save most time per byte, up to ``budget`` bytes.

    Args:
        graph: the localized joint graph.
        levels: reshard level of each parameter; those of level 3 are gathered again in backward.
        budget: bytes on each rank for what stays whole; -1 for no limit.
    """
    if not budget:
        return dict(levels)
    again = [found for name, level in levels.items() if level == 3 and (found := _gathered(graph, mesh, name, cost))]
    out, left = dict(levels), budget
    for one in sorted(again, key=lambda one: (-one.seconds / one.held, one.name)):
        if budget < 0 or one.held <= left:
            out[one.name] = 2
            left -= one.held
    return out


def _gathered(graph: fx.Graph, mesh: Mesh, name: str, cost: CostModel) -> Gathered | None:
    """What gathering the parameter takes; None where it is not gathered."""
    seconds, held = 0.0, 0
    for node in gathered_parameters(graph, {name: 3}):
        made = node.meta["val"]
        if isinstance(made, Tensor):
            held = max(held, made.numel() * made.dtype.itemsize)
        kind = collective_kind(node)
        if kind is None:
            continue
        axes = group_axes(arguments_of(node)["group_name"], mesh)
        assert axes is not None, f"{node} is over no group of {mesh}"
        ranks = prod(map(mesh.size, axes))
        sent = [x.meta["val"] for x in node.all_input_nodes]
        wire = sum(wire_elements(kind, ranks, x.numel()) * x.dtype.itemsize for x in sent)
        seconds += cost.best_seconds(kind, ranks, wire)
    return Gathered(name, seconds, held) if held else None
