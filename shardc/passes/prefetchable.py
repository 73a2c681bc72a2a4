"""Prefetchable ops: those computed from inputs of a forward or backward graph by copies, casts and cheap ops.

A parameter that is moved, cast, padded or transposed before its gather delays that gather no more than an input does.
Buckets and the schedule may move such a collective to an earlier place, and its ops with it.
"""

from __future__ import annotations

from torch import fx

from shardc.cost.fused_kernels import is_dense
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT, move_kind
from shardc.ir.graph import Value, output_node
from shardc.passes.op_calls import is_start, result_bytes

# Below this an op costs no more than its launch, and keeping its result longer costs no memory worth counting.
SMALL = 1 << 16  # bytes


def prefetchable(graph: fx.Graph) -> frozenset[fx.Node]:
    """Returns the prefetchable ops: moves to the device with their waits, and the ops before moves and collectives.

    They depend on inputs alone, so they can stand anywhere before their use. Matrix products and collectives are never
    among them. Ops before a collective count only if nothing else reads their results (small ones excepted), and if
    these have no more than twice the bytes of its own result: they are held longer when it is prefetched.
    """
    free: set[fx.Node] = set()
    early: set[fx.Node] = set()  # nodes that depend on inputs alone, prefetchable or not
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
    """Returns the ops between inputs (or prefetchable ops) and ``start``; None if their results are too large."""
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


def sink_to_first_use(graph: fx.Graph, free: frozenset[fx.Node], priority: dict[fx.Node, float]) -> None:
    """Gives each op in ``free`` a priority (its position in the new order) just before that of its first user."""
    for node in reversed(graph.nodes):
        if node in free:
            priority[node] = min((priority[user] for user in node.users), default=priority[node]) - 1e-3


def _bytes(node: fx.Node) -> int | None:
    """Returns the bytes of a local op's result; None if it is not a single tensor."""
    value = ir.info(node).value
    return value.nbytes if isinstance(value, Value) else None
