"""Check that a schedule waits for its collectives as late as `Schedule` promises."""

from __future__ import annotations

from bisect import bisect_right
from operator import getitem

from torch import fx

from shardc.ir import grammar
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import collective_kind
from shardc.ir.provenance import collective_of
from shardc.passes.op_calls import is_start, leaving
from shardc.passes.prefetchable import prefetchable
from shardc.verify.subject import Broken, Subject


def check_waits(subject: Subject) -> Broken:
    """Checks that no op computes between a wait and its first use; yields each wait that is too early, with the reason.

    A collective whose result only leaves the graph has to be waited for after the start of another one, or after all
    compute.
    """
    nodes, place, graph = subject.nodes, subject.place, subject.gm.graph
    leaves = leaving(graph)
    starts = [place[node] for node in subject.calls if collective_kind(node) is not None]
    last = max((place[node] for node in subject.calls if _computes(node) and node not in leaves), default=0)
    sent_on: set[fx.Node] = set()  # nodes that lead to another collective, or move, before the output
    for node in reversed(nodes):
        if node in leaves and (is_start(node) or not sent_on.isdisjoint(node.users)):
            sent_on.add(node)
    for wait in subject.calls:
        if wait.target is not WAIT or wait in sent_on or (start := collective_of(wait)) is None:
            continue
        if wait not in leaves:
            first = min(map(place.__getitem__, wait.users), default=0)
            blocking = _idle(graph, nodes[place[wait] + 1 : first])
        elif start in leaves:  # a second reduction, which starts when the first is done
            continue
        elif bisect_right(starts, place[start]) == bisect_right(starts, place[wait]) and last > place[wait]:
            blocking = _idle(graph, [node for node in nodes[place[wait] + 1 : last + 1] if node not in leaves])
        else:
            continue
        if blocking is not None:
            yield (
                wait,
                f"it is waited for in front of {grammar.name_text(ir.info(blocking).name)}, which does not need it",
            )


def _computes(node: fx.Node) -> bool:
    return not is_start(node) and node.target is not WAIT and node.target is not getitem


def _idle(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node | None:
    """Returns the first of ``nodes`` that is compute and not `prefetchable` (free to move); None if there is none."""
    computing = [node for node in nodes if _computes(node)]
    ready = prefetchable(graph) if computing else frozenset()
    return next((node for node in computing if node not in ready), None)
