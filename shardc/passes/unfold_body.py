"""Where a graph's nodes repeat: the ops of one phase, the periods of blocks among them, and what place a node has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from shardc.ir import graph as ir


class Place(NamedTuple):
    """Which of a period's nodes (or of a block's parameters) a node is, and of which block."""

    role: Any
    block: int


@dataclass
class Body:
    """The ops of one phase of a graph, and where they repeat.

    Args:
        nodes: in order.
        name: of the phase.
        step: 1 where later periods are of later blocks, -1 where they are of earlier ones.
        period: nodes of a block.
        whole: the blocks whose periods are all there and alike, in the order of the nodes.
        start, end: the nodes that have places.
    """

    nodes: list[fx.Node]
    name: str
    step: int
    period: int = 0
    whole: list[int] = field(default_factory=list)
    start: int = 0
    end: int = 0


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def phases(graph: fx.Graph) -> list[Body]:
    """The ops of forward, then those of backward: of a joint graph, or of a forward that computes some of them."""
    ops = calls(graph)
    of = {phase: [n for n in ops if ir.info(n).origin.phase == phase] for phase in ("forward", "backward")}
    return [Body(of["forward"], "forward", 1), Body(of["backward"], "early", -1)]
