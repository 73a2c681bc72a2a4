"""Checks that the ops that implement a collective have its operand, group and reduction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import arguments_of, collective_kind
from shardc.ir.graph import info

aten = torch.ops.aten
# Reduce op of a collective -> local ops that may combine the ranks' terms.
_TOGETHER: dict[str, tuple[Any, ...]] = {
    "sum": (aten.sum.dim_IntList, aten.add.Tensor),
    "avg": (aten.mean.dim, aten.sum.dim_IntList, aten.add.Tensor),
    "max": (aten.amax.default, aten.maximum.default),
    "min": (aten.amin.default, aten.minimum.default),
    "product": (aten.prod.dim_int, aten.mul.Tensor),
}


@dataclass(frozen=True)
class Collective:
    """A collective of one tensor.

    Args:
        value, operand: fingerprints (`shardc.verify.identity`) of its result and its operand.
        group: name of its process group.
        reduces: reduce op, "" if it does not reduce.
    """

    value: bytes
    operand: bytes
    group: str
    reduces: str

    def is_spelled_by(self, result: fx.Node, prints: Mapping[fx.Node, Any]) -> bool:
        """Return whether ``result`` depends on the operand only, through collectives of this group and reduce op."""
        sent, reduced = False, not self.reduces
        seen, todo = {result}, [result]
        while todo:
            node = todo.pop()
            if node.op != "call_function":
                return False
            if collective_kind(node) is not None:
                arguments = arguments_of(node)
                if arguments["group_name"] != self.group or arguments.get("reduce_op", self.reduces) != self.reduces:
                    return False
                sent, reduced = True, reduced or "reduce_op" in arguments
            reduced |= node.target in _TOGETHER.get(self.reduces, ())
            fresh = {x for x in node.all_input_nodes if prints[x] != self.operand} - seen
            seen |= fresh
            todo += fresh
        return sent and reduced


def collectives(graph: fx.Graph, prints: Mapping[fx.Node, Any]) -> dict[str, Collective]:
    """Return the name of the wait -> `Collective`, for each collective of one tensor in ``graph``."""
    out = {}
    for wait in graph.nodes:
        start = wait.args[0] if wait.target is WAIT else None
        if start is None or start.target is getitem or collective_kind(start) is None:
            continue
        (_, operand), *rest = arguments_of(start).items()
        attributes = dict(rest)
        if isinstance(operand, fx.Node):
            record = Collective(
                prints[wait], prints[operand], attributes["group_name"], attributes.get("reduce_op", "")
            )
            out[info(wait).name] = record
    return out
