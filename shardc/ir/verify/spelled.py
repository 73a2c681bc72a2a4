"""Checks that what stands for a collective, written by an algorithm, is made of what that takes, among its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from shardc.ir.comm import WAIT
from shardc.ir.graph import info
from shardc.ir.tally import arguments_of, collective_kind

aten = torch.ops.aten
# What may bring the ranks' terms together, by the op that a collective reduces with.
_TOGETHER: dict[str, tuple[Any, ...]] = {
    "sum": (aten.sum.dim_IntList, aten.add.Tensor),
    "avg": (aten.mean.dim, aten.sum.dim_IntList, aten.add.Tensor),
    "max": (aten.amax.default, aten.maximum.default),
    "min": (aten.amin.default, aten.minimum.default),
    "product": (aten.prod.dim_int, aten.mul.Tensor),
}


@dataclass(frozen=True)
class Collective:
    """What a collective of one tensor gives.

    Args:
        value, given: the fingerprints of its result and of what it takes.
        group: the name of its ranks' group.
        reduces: how it reduces, "" if it does not.
    """

    value: bytes
    given: bytes
    group: str
    reduces: str

    def is_spelled_by(self, result: fx.Node, found: Mapping[fx.Node, Any]) -> bool:
        """Return whether ``result`` is made of what it takes alone, by collectives of its group, and by a reduction
        like its.

        Args:
            found: the fingerprints of the values above ``result``.
        """
        sent, reduced = False, not self.reduces
        seen, todo = {result}, [result]
        while todo:
            node = todo.pop()
            if node.op != "call_function":
                return False
            if collective_kind(node) is not None:
                given = arguments_of(node)
                if given["group_name"] != self.group or given.get("reduce_op", self.reduces) != self.reduces:
                    return False
                sent, reduced = True, reduced or "reduce_op" in given
            reduced |= node.target in _TOGETHER.get(self.reduces, ())
            fresh = {x for x in node.all_input_nodes if found[x] != self.given} - seen
            seen |= fresh
            todo += fresh
        return sent and reduced


def collectives(graph: fx.Graph, found: Mapping[fx.Node, Any]) -> dict[str, Collective]:
    """Return the collectives of one tensor in ``graph``, by the names of what waits for them."""
    out = {}
    for wait in graph.nodes:
        start = wait.args[0] if wait.target is WAIT else None
        if start is None or start.target is getitem or collective_kind(start) is None:
            continue
        (_, given), *rest = arguments_of(start).items()
        said = dict(rest)
        if isinstance(given, fx.Node):
            record = Collective(found[wait], found[given], said["group_name"], said.get("reduce_op", ""))
            out[info(wait).name] = record
    return out
