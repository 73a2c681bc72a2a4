"""Selective unsharding: which parameters stay whole from forward to backward, where memory is left for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isinf

from torch import Tensor, fx

from shardc.cost.pricing import Pricing
from shardc.cost.sequence import gathered_parameters
from shardc.ir import graph as ir
from shardc.ir.mesh import Mesh
from shardc.ir.tally import collective_kind, group_of, wire_elements


@dataclass
class Gathered:
    """What it takes to gather a parameter again.

    Args:
        name: of the parameter.
        seconds: that its collectives add to those of their buckets.
        held: bytes of the gathered parameter, on each rank.
        again: the place of the op of backward that uses it first; infinite where no gradient needs it.
    """

    name: str
    seconds: float = 0.0
    held: int = 0
    again: float = inf

    @property
    def order(self) -> tuple[bool, float, float, str]:
        """What saves most time for its bytes first; of equal ones what backward waits for first.

        That is what the forward used last: it is held for the shortest time, and its second gather would have the least
        compute to hide behind.
        """
        saved = float(f"{self.seconds / self.held:.6g}")  # of alike parameters the same
        return isinf(self.again), -saved, self.again, self.name


def keep_within(
    graph: fx.Graph, mesh: Mesh, levels: Mapping[str, int], budget: int, cost: Pricing, bucket: int
) -> dict[str, int]:
    """``levels`` with 2 in the place of 3 for the parameters that save most time per byte, up to ``budget`` bytes.

    Args:
        graph: the localized joint graph.
        levels: reshard level of each parameter; those of level 3 are gathered again in backward.
        budget: bytes on each rank for what stays whole; -1 for no limit.
        bucket: bytes of the buckets in which collectives share a latency: -1 for all in one, 0 for none.
    """
    if not budget:
        return dict(levels)
    out, left = dict(levels), budget
    for one in sorted(_gathered_again(graph, mesh, levels, cost, bucket), key=lambda one: one.order):
        if budget < 0 or one.held <= left:
            out[one.name] = 2
            left -= one.held
    return out


def _gathered_again(
    graph: fx.Graph, mesh: Mesh, levels: Mapping[str, int], cost: Pricing, bucket: int
) -> list[Gathered]:
    """The parameters of level 3, but for empty ones and those of which the plan keeps a part."""
    whole = gathered_parameters(graph, {name: 3 for name, level in levels.items() if level == 3})
    made_of: dict[fx.Node, set[str]] = {}
    found: dict[str, Gathered] = {}
    parts: set[str] = set()
    for at, node in enumerate(graph.nodes):
        if node in whole:
            for name in _parameters(node, made_of):
                one, made = found.setdefault(name, Gathered(name)), node.meta["val"]
                one.seconds += _seconds(node, mesh, cost, bucket)
                if isinstance(made, Tensor):
                    one.held = max(one.held, made.numel() * made.dtype.itemsize)
                if ir.info(node).name.endswith(ir.KEPT):
                    parts.add(name)
        elif node.op == "call_function" and ir.info(node).origin.phase == "backward":
            for name in {name for read in node.all_input_nodes if read in whole for name in made_of[read]}:
                found[name].again = min(found[name].again, at)
    return [one for one in found.values() if one.held and one.name not in parts]


def _parameters(node: fx.Node, known: dict[fx.Node, set[str]]) -> set[str]:
    """The parameters that ``node`` is made of."""
    if node not in known:
        if node.op == "placeholder":
            record = ir.info(node)
            known[node] = {record.name} if record.role is not None and record.role.kind == "param" else set()
        else:
            known[node] = set().union(*(_parameters(read, known) for read in node.all_input_nodes))
    return known[node]


def _seconds(node: fx.Node, mesh: Mesh, cost: Pricing, bucket: int) -> float:
    """What a collective adds to its bucket; nothing where ``node`` is none."""
    kind = collective_kind(node)
    if kind is None:
        return 0.0
    axes, ranks = group_of(node, mesh)
    sent = [x.meta["val"] for x in node.all_input_nodes]
    wire = sum(wire_elements(kind, ranks, x.numel()) * x.dtype.itemsize for x in sent)
    if not bucket:
        return cost.collective_seconds(kind, mesh, axes, wire)
    others = bucket if bucket > 0 else wire
    together = cost.collective_seconds(kind, mesh, axes, others + wire)
    return together - cost.collective_seconds(kind, mesh, axes, others)
