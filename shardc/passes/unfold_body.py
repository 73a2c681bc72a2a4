"""Bodies (the ops of one phase of a graph), the periods of blocks in them, and the place of a node in its period."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from shardc.ir import graph as ir


class Place(NamedTuple):
    """Position of a node in a period (or among a block's parameters), and its block."""

    role: Any
    block: int


@dataclass
class Body:
    """Ops of one phase of a graph, and the stretch in which they repeat.

    Args:
        nodes: in order.
        name: of the phase.
        step: 1 if later periods belong to later blocks (forward), -1 if to earlier ones (backward).
        period: number of nodes of a block.
        whole: the blocks whose periods are complete and equal, in the order of the nodes.
        start, end: range of the nodes that have places.
    """

    nodes: list[fx.Node]
    name: str
    step: int
    period: int = 0
    whole: list[int] = field(default_factory=list)
    start: int = 0
    end: int = 0


def calls(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes that are neither inputs nor the output."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def phases(graph: fx.Graph) -> list[Body]:
    """Returns the bodies of forward and backward, of a joint graph or of a forward that runs some backward ops."""
    ops = calls(graph)
    of = {phase: [n for n in ops if ir.info(n).origin.phase == phase] for phase in ("forward", "backward")}
    return [Body(of["forward"], "forward", 1), Body(of["backward"], "early", -1)]
