"""What is there from the start of a half: its inputs, and what moves and a few cheap ops make of them.

A parameter that is moved, cast, padded or turned before it is gathered is as good as there from the beginning, and so
is a count of the targets. Buckets and the schedule may take such a collective to an earlier place, its ops with it.
"""

from __future__ import annotations

from torch import fx

from shardc.cost.fused_kernels import is_dense
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.graph import Value, output_node
from shardc.ir.host import move_kind
from shardc.passes.starts import is_start, result_bytes

# Below this an op costs its launch and no more, and what it makes may lie about.
SMALL = 1 << 16  # bytes


def from_start(graph: fx.Graph) -> frozenset[fx.Node]:
    """Moves to the device, the waits for these, and ops in front of moves and collectives, that need inputs alone.

    They can stand anywhere in front of their use, so what uses them alone is as free as what uses inputs. They are no
    matrix products, nothing that communicates, and, but for small ones, make what only their collective needs: no more
    bytes than twice what it makes itself.
    """
    free: set[fx.Node] = set()
    early: set[fx.Node] = set()  # what needs no more than inputs, free or not
    output = output_node(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            early.add(node)
        elif node.op != "call_function" or not early.issuperset(node.all_input_nodes):
            continue
        elif move_kind(node) == "to_host":
            continue
        elif is_start(node):
            ops = _ops_before(node, free)
            free |= ops or set()
            if ops is not None and move_kind(node) == "to_device" and output not in node.users:
                free.add(node)
                early.add(node)
        elif node.target is WAIT:
            if output not in node.users:
                free.add(node)
                early.add(node)
        elif _bytes(node) is not None and not is_dense(node) and output not in node.users:
            early.add(node)
    return frozenset(free)


def _ops_before(start: fx.Node, free: set[fx.Node]) -> set[fx.Node] | None:
    """The ops between inputs (or what is free already) and ``start``; None where they are too much."""
    ops: set[fx.Node] = set()
    left = max(SMALL, 2 * result_bytes(start))
    todo = list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        if node.op == "placeholder" or node in free or node in ops:
            continue
        left -= _bytes(node) or 0
        if left < 0:
            return None
        ops.add(node)
        todo += node.all_input_nodes
    only = ops | {start}
    large = [node for node in ops if (_bytes(node) or 0) > SMALL]
    return ops if all(only.issuperset(node.users) for node in large) else None


def pull(graph: fx.Graph, free: frozenset[fx.Node], priority: dict[fx.Node, float]) -> None:
    """Wishes what is ``free`` right in front of its first use, as that is wished."""
    for node in reversed(graph.nodes):
        if node in free:
            priority[node] = min((priority[user] for user in node.users), default=priority[node]) - 1e-3


def _bytes(node: fx.Node) -> int | None:
    """The size of what a local op makes; None where it is not one tensor."""
    value = ir.info(node).value
    return value.nbytes if isinstance(value, Value) else None
