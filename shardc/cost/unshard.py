"""Selects parameters that stay unsharded from forward to backward, within a memory budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isinf

from torch import Tensor, fx

from shardc.cost.model import Pricing
from shardc.cost.step_sequence import gathered_parameters
from shardc.ir import graph as ir
from shardc.ir.comm_volume import collective_kind, group_of, wire_elements
from shardc.ir.mesh import Mesh


@dataclass
class Gathered:
    """The cost of gathering a parameter a second time, for backward.

    Args:
        name: name of the parameter.
        seconds: time that its collectives add to those of their buckets.
        size: bytes of the unsharded parameter.
        first_use: position of the first backward op that uses it; infinite if no gradient needs it.
    """

    name: str
    seconds: float = 0.0
    size: int = 0
    first_use: float = inf

    @property
    def order(self) -> tuple[bool, float, float, str]:
        """The sort key: the most seconds saved per byte first; on a tie the one that backward uses first.

        That one is unsharded for the shortest time, since forward used it last, and its second gather would have the
        least compute to overlap with.
        """
        saved = float(f"{self.seconds / self.size:.6g}")  # rounded, so that it is equal for equal parameters
        return isinf(self.first_use), -saved, self.first_use, self.name


def keep_within(
    graph: fx.Graph, mesh: Mesh, levels: Mapping[str, int], budget: int, cost: Pricing, bucket: int
) -> dict[str, int]:
    """Return ``levels`` with ZeRO-2 for ZeRO-3 where it saves the most time per byte, within ``budget``.

    Args:
        graph: the localized joint graph.
        levels: FSDP level of each parameter; those of level 3 are gathered again in backward.
        budget: bytes per rank for unsharded parameters; -1 for no limit.
        bucket: bytes of a bucket, whose collectives share one latency; -1: all are in one bucket, 0: no buckets.
    """
    if not budget:
        return dict(levels)
    out, left = dict(levels), budget
    for param in sorted(_gathered_again(graph, mesh, levels, cost, bucket), key=lambda param: param.order):
        if budget < 0 or param.size <= left:
            out[param.name] = 2
            left -= param.size
    return out


def _gathered_again(
    graph: fx.Graph, mesh: Mesh, levels: Mapping[str, int], cost: Pricing, bucket: int
) -> list[Gathered]:
    """Return the ZeRO-3 parameters, without empty ones and those of which forward saves a slice (`KeepPart`)."""
    whole = gathered_parameters(graph, {name: 3 for name, level in levels.items() if level == 3})
    made_of: dict[fx.Node, set[str]] = {}
    by_name: dict[str, Gathered] = {}
    parts: set[str] = set()
    for at, node in enumerate(graph.nodes):
        if node in whole:
            for name in _parameters(node, made_of):
                param, value = by_name.setdefault(name, Gathered(name)), node.meta["val"]
                param.seconds += _seconds(node, mesh, cost, bucket)
                if isinstance(value, Tensor):
                    param.size = max(param.size, value.numel() * value.dtype.itemsize)
                if ir.info(node).kept:
                    parts.add(name)
        elif node.op == "call_function" and ir.info(node).origin.phase == "backward":
            for name in {name for read in node.all_input_nodes if read in whole for name in made_of[read]}:
                by_name[name].first_use = min(by_name[name].first_use, at)
    return [param for param in by_name.values() if param.size and param.name not in parts]


def _parameters(node: fx.Node, cache: dict[fx.Node, set[str]]) -> set[str]:
    """Return the names of the parameters from which ``node`` is computed; ``cache`` is filled."""
    if node not in cache:
        if node.op == "placeholder":
            record = ir.info(node)
            cache[node] = {record.name} if record.role is not None and record.role.kind == "param" else set()
        else:
            cache[node] = set().union(*(_parameters(read, cache) for read in node.all_input_nodes))
    return cache[node]


def _seconds(node: fx.Node, mesh: Mesh, cost: Pricing, bucket: int) -> float:
    """Return the time that a collective adds to its bucket; 0 if ``node`` is not a collective."""
    kind = collective_kind(node)
    if kind is None:
        return 0.0
    axes, ranks = group_of(node, mesh)
    operands = [x.meta["val"] for x in node.all_input_nodes]
    wire = sum(wire_elements(kind, ranks, x.numel()) * x.dtype.itemsize for x in operands)
    if not bucket:
        return cost.collective_seconds(kind, mesh, axes, wire)
    others = bucket if bucket > 0 else wire
    combined = cost.collective_seconds(kind, mesh, axes, others + wire)
    return combined - cost.collective_seconds(kind, mesh, axes, others)
