"""Detects whether a pass has changed a graph, so that an unchanged one is not verified twice."""

from __future__ import annotations

from operator import is_

from torch import fx

from shardc.ir.arena import PLAN
from shardc.ir.graph import KEY, ROLES


class State:
    """Snapshot of the parts of a graph that checks read."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        # Dicts, not a tuple for each node: many new objects trigger Python's garbage collector.
        self.targets = {node: node.target for node in self.nodes}
        self.args, self.kwargs = {node: node.args for node in self.nodes}, {node: node.kwargs for node in self.nodes}
        self.records = {node: node.meta.get(KEY) for node in self.nodes}
        self.values = [node.meta.get("val") for node in self.nodes]  # compared as objects: tensors have no truth
        self.ends = [self.nodes[-1].meta.get(key) for key in (ROLES, PLAN)]

    def is_of(self, other: State | None) -> bool:
        """Return whether the graph is the same as in ``other``."""
        if other is None or self.nodes != other.nodes or self.ends != other.ends or not self.computes(other):
            return False
        return all(map(is_, self.values, other.values))

    def computes(self, other: State | None) -> bool:
        """Return whether it has the same ops on the same operands as ``other``, in any order."""
        if other is None or self.targets != other.targets or self.args != other.args:
            return False
        return self.kwargs == other.kwargs and self.records == other.records
