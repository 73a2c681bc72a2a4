"""Prefetching of gathers: which ops can move to an earlier place together with a gather, and where the plan's prefetch
entries put gathers.

A parameter that is moved to the device, cast, padded or transposed before its gather delays that gather no more than an
input does: buckets and the schedule may move such a collective to an earlier place, and its ops with it. Entries of the
plan (`shardc.plan.entries.Prefetch`) name gathers that start before a module computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from torch import fx

from shardc.cost.compute import is_dense
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT, move_kind, waits_of
from shardc.ir.comm_volume import arguments_of, collective_kind
from shardc.ir.graph import Value, output_node
from shardc.ir.module_paths import is_in
from shardc.passes.op_calls import is_start, result_bytes
from shardc.plan.entries import Prefetch

# Below this an op costs no more than its launch, and keeping its result longer costs no memory worth counting.
SMALL = 1 << 16  # bytes


def prefetchable(graph: fx.Graph) -> frozenset[fx.Node]:
    """Returns the ops that can be moved to an earlier place together with a gather, since they depend on inputs alone:
    moves to the device, casts before gathers, float8 maxima, and the waits of these.

    They can stand anywhere before their use. Matrix products and other collectives are never among them. Ops before a
    collective count only if nothing else reads their results (small ones excepted), and if these have at most twice the
    bytes of its own result, since they are held longer when it is prefetched.
    """
    free: set[fx.Node] = set()  # the result
    # What ops in `free` may read: inputs, the starts and waits in `free`, and light ops that depend on these alone.
    early: set[fx.Node] = set()
    # What the graph returns stays in place: it is held until the end, and would be from an earlier place on.
    returned = set(output_node(graph).all_input_nodes)
    for node in graph.nodes:
        if node.op == "placeholder":
            early.add(node)
        elif node.op != "call_function" or not early.issuperset(node.all_input_nodes) or move_kind(node) == "to_host":
            continue
        elif is_start(node):
            # Before a maximum there may be large ops (the magnitudes of a weight), of which only the maximum is held.
            is_maximum = _is_maximum(node)
            ops_before = _ops_before(node, free, any_size=is_maximum)
            free |= ops_before or set()
            # A maximum and a move stand before a gather and move with it; a gather itself is placed by the callers.
            moves_along = is_maximum or move_kind(node) == "to_device"
            if ops_before is not None and moves_along and node not in returned:
                free.add(node)
                early.add(node)
        elif node.target is WAIT:  # of one of these starts: of others the start is not in ``early``
            # A small result may be returned: the backward reads the maximum by which a weight was scaled.
            if node not in returned or ir.value(node).nbytes <= SMALL:
                free.add(node)
                early.add(node)
        # A light op becomes free only where a collective reads it (`_ops_before`).
        elif _tensor_bytes(node) is not None and not is_dense(node) and node not in returned:
            early.add(node)
    return frozenset(free)


def _is_maximum(start: fx.Node) -> bool:
    """Returns whether ``start`` starts a small all-reduce of a maximum, as it is needed for the float8 scales of
    weights.
    """
    small = result_bytes(start) <= SMALL
    return small and collective_kind(start) == "all_reduce" and arguments_of(start)["reduce_op"] == "max"


def _ops_before(start: fx.Node, free: set[fx.Node], any_size: bool = False) -> set[fx.Node] | None:
    """Returns the ops before the collective ``start`` that can move together with it, back to inputs or to ops in
    ``free`` (which can move already). Returns None if these ops hold too many bytes (unless ``any_size``), or if other
    ops read the result of one that is not small.
    """
    ops: set[fx.Node] = set()
    # Results of these ops are held longer, from the earlier place on; so many bytes of them are worth it.
    bytes_left = inf if any_size else max(SMALL, 2 * result_bytes(start))
    todo = list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        if node.op == "placeholder" or node in free or node in ops:
            continue
        bytes_left -= _tensor_bytes(node) or 0
        if bytes_left < 0:
            return None
        ops.add(node)
        todo += node.all_input_nodes
    # A large result that other ops read would be held from the earlier place until these.
    readers = ops | {start}
    large = [node for node in ops if (_tensor_bytes(node) or 0) > SMALL]
    return ops if all(readers.issuperset(node.users) for node in large) else None


def sink_to_first_use(graph: fx.Graph, free: frozenset[fx.Node], priority: dict[fx.Node, float]) -> None:
    """Moves each op in ``free`` to just before its first user: changes its position in ``priority`` (node -> position),
    in place. So the ops that a gather reads follow it to its new place.
    """
    for node in reversed(graph.nodes):  # users first
        if node in free:
            priority[node] = min((priority[user] for user in node.users), default=priority[node]) - 1e-3


def _tensor_bytes(node: fx.Node) -> int | None:
    """Returns the bytes of a local op's result; None if it is not a single tensor."""
    value = ir.info(node).value
    return value.nbytes if isinstance(value, Value) else None


# (entry, gather, op before which the gather has to start)
Wanted = list[tuple[Prefetch, fx.Node, fx.Node]]


def prioritize(graph: fx.Graph, entries: Sequence[Prefetch], priority: dict[fx.Node, float], limit: int) -> Wanted:
    """Moves gathers of the modules that a plan entry lists in front of the first op of the entry's own module: changes
    their positions in ``priority``, in place. Gathers that are read before that op stay. Returns (entry, gather, that
    first op) of each other one.

    Args:
        priority: position of each node in the new order, changed in place.
        limit: bytes that may be in flight; -1 for no limit.

    Raises:
        PlanError: an entry needs more bytes in flight than ``limit``.
    """
    wanted: Wanted = []
    params_of = parameters(graph) if entries else {}
    for entry in entries:
        # The first op that computes in the entry's module: not a gather of its parameters, nor a cast of one.
        first = next((n for n in graph.nodes if n not in params_of and is_in(ir.info(n).origin.module, entry.module)
                      and n.op == "call_function" and not is_start(n) and not _is_wait(n)), None)  # fmt: skip
        if first is None:  # this half computes nothing in the module
            continue
        in_flight = 0
        for gather in (n for n in params_of if collective_kind(n) == "all_gather"):
            is_listed = any(is_in(name, module) for name in params_of[gather] for module in entry.modules)
            if not is_listed:
                continue
            first_use = min(priority[user] for wait in waits_of(gather) for user in wait.users)
            # Gathers that this module or an op before it reads start earlier anyway.
            if first_use > priority[first]:
                in_flight += result_bytes(gather)
                wanted.append((entry, gather, first))
                priority[gather] = min(priority[gather], priority[first] - 0.5)
        if 0 <= limit < in_flight:
            raise PlanError(
                f"{in_flight} B of gathers would be in flight when {entry.module!r} computes; max_in_flight is {limit}",
                plan_entry=str(entry),
                fix=f"write Options(max_in_flight={in_flight}), or list fewer modules",
            )
    return wanted


def check(graph: fx.Graph, wanted: Wanted) -> None:
    """Raises PlanError if a gather of ``wanted``, a result of `prioritize`, does not precede the op that its entry
    names.
    """
    place = {node: at for at, node in enumerate(graph.nodes)} if wanted else {}
    for entry, gather, first in wanted:
        if place[gather] > place[first]:
            raise PlanError(
                f"the gather {ir.info(gather).name!r} cannot start before {entry.module!r} computes",
                plan_entry=str(entry),
                fix="leave its module out, or write Plan(overlap=True)",
            )


def parameters(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """Returns node -> names of parameters, for each node that is computed from parameters (or their saved slices)
    alone.
    """
    names: dict[fx.Node, frozenset[str]] = {}
    reads = ir.output_node(graph).meta.get(ir.READS, {})
    for node in graph.nodes:
        if node.op == "placeholder":
            # A kept part is a saved value here; `Partition` recorded which parameter it is of.
            role = reads.get(node.name) if ir.info(node).is_kept_part else ir.info(node).role
            if role is not None and role.kind == "param":
                names[node] = frozenset([role.name])
            elif role is not None and role.kind == "coordinate":  # the rank's index, which selects a slice
                names[node] = frozenset()
        elif node.op == "call_function" and node.all_input_nodes and all(x in names for x in node.all_input_nodes):
            names[node] = frozenset().union(*(names[x] for x in node.all_input_nodes))
    return names


def _is_wait(node: fx.Node) -> bool:
    """Returns whether ``node`` waits for a collective or move."""
    return any(is_start(x) for x in node.all_input_nodes)
