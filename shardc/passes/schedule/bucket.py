"""Bucket: fuses collectives of the same kind, group, dtype and reduce op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from shardc._compat import OpOverload
from shardc.cost.hardware import Hardware, price, route
from shardc.cost.step_sequence import is_coordinate
from shardc.ir import graph as ir
from shardc.ir.comm import ALL_REDUCE, GATHER, REDUCE_SCATTER
from shardc.ir.comm_volume import arguments_of, collective_kind, group_of
from shardc.ir.mesh import Mesh
from shardc.ir.rewriter import GraphRewriter, positions, reorder
from shardc.passes.op_calls import is_start, leaving
from shardc.passes.schedule.prefetch import prefetchable, sink_to_first_use

c10d = torch.ops._c10d_functional

# The coalesced op of each collective: torch's own, or the one that sends messages between ranks.
_NATIVE = {
    c10d.all_gather_into_tensor.default: c10d.all_gather_into_tensor_coalesced.default,
    c10d.reduce_scatter_tensor.default: c10d.reduce_scatter_tensor_coalesced.default,
    c10d.all_reduce.default: c10d.all_reduce_coalesced.default,
}
_DIRECT = {
    c10d.all_gather_into_tensor.default: GATHER,
    c10d.reduce_scatter_tensor.default: REDUCE_SCATTER,
    c10d.all_reduce.default: ALL_REDUCE,
}


@dataclass(frozen=True)
class ByLink:
    """Chooses a bucket size for each process group by its links, so that latency is a twentieth of a bucket's time.

    A bucket holds at most one repeated block of the model, so that the first gather is not later than with a unit per
    block (FSDP2), and at most a sixty-fourth of a rank's memory.

    Args:
        hardware: bandwidth and latency of the links, and a rank's memory.
        mesh: the mesh, from which follows which links the ranks of a group use.
    """

    hardware: Hardware
    mesh: Mesh

    def __repr__(self) -> str:
        return f"ByLink({self.hardware.name!r}, {self.mesh!r})"

    def max_bytes(self, graph: fx.Graph, collectives: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Returns collective -> the limit of bytes of a bucket that it may join (per rank, of the larger one of input
        and result). Collectives of the same op and group have the same limit.
        """
        block_bytes: dict[tuple[Any, str], Counter[str]] = {}  # (op, group) -> repeated block -> its bytes
        params = _parameter_of(graph)
        for node in collectives:
            if block := _repeated_block(params.get(node, "")):
                block_bytes.setdefault(_op_and_group(node), Counter())[block] += _wire_size(node)
        limits = {_op_and_group(node): self._by_latency(node) for node in collectives}
        # At most one repeated block, so that its first gather is not later than with a unit per block.
        for op_and_group, by_block in block_bytes.items():
            limits[op_and_group] = min(limits[op_and_group], max(by_block.values()))
        return {node: limits[_op_and_group(node)] for node in collectives}

    def _by_latency(self, node: fx.Node) -> int:
        """Returns the size in bytes of a bucket of collectives like ``node`` at which latency is a twentieth of the
        time, at most a sixty-fourth of a rank's memory.
        """
        axes, _ = group_of(node, self.mesh)
        where = route(self.mesh, axes, self.hardware.node)  # how the group's ranks lie on nodes
        latency = price(self.hardware, str(collective_kind(node)), where, 0.0).seconds  # of zero bytes
        return int(min(20 * latency * where.ring_bandwidth(self.hardware), self.hardware.memory / 64))


def _parameter_of(graph: fx.Graph) -> dict[fx.Node, str]:
    """Returns node -> name of a parameter, for nodes that are computed from it alone (such as its gather), or that lead
    to its gradient alone (such as its reduce-scatter).
    """
    out = {node: ir.role(node).name for node in ir.placeholders(graph, "param")}
    for node in graph.nodes:
        # A coordinate (the rank's index) only selects a slice. None stands for an input of any other origin.
        names = {out.get(x) for x in node.all_input_nodes if not is_coordinate(x)}
        if node.op == "call_function" and len(names) == 1 and (name := names.pop()) is not None:
            out[node] = name
    # The same from the outputs backwards.
    grads = {x: role.name for role, x in ir.outputs(graph) if role.kind == "grad" and isinstance(x, fx.Node)}
    for node in reversed(graph.nodes):
        names = {grads.get(user) for user in node.users if user.op != "output"}
        if node not in grads and len(names) == 1 and (name := names.pop()) is not None:
            grads[node] = name
    return grads | out


def _repeated_block(name: str) -> str:
    """Returns the repeated block of a parameter, its name up to the first number, such as ``layers.0`` of
    ``layers.0.attn.weight``; "" if it is in none.
    """
    parts = name.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return "" if first is None else ".".join(parts[: first + 1])


def _op_and_group(node: fx.Node) -> tuple[Any, str]:
    """Returns (op, name of the process group) of a collective, by which limits of buckets are chosen."""
    return node.target, str(arguments_of(node)["group_name"])


@dataclass(frozen=True)
class Bucket:
    """Fuses collectives of the same kind into larger ones, up to a size in bytes and without delaying any use of their
    results.

        %a = all_gather(%w0)                %ab = all_gather_coalesced([%w0, %w1])
        %b = all_gather(%w1)            ->  %a, %b = getitem(%ab, 0), getitem(%ab, 1)

    A coalesced collective reads its inputs in place and has one result for each. A bucket stands after the last of its
    inputs and before the first use of its results, so no use waits for more than the bucket itself.

    *Requires:* one half (forward, backward or inference) of a local graph. *Ensures:* values are the same, and so is
    the order of all other ops.

    Args:
        size: bytes of a bucket's larger side, per rank; -1 for no limit, 0 for no buckets. `ByLink`: by group.
        direct: lower every collective, even a single one, to messages between ranks (`shardc.ir.comm`), which on gloo
            copies less and takes less time than gloo's own collectives.
    """

    size: int | ByLink
    direct: bool = False
    name = "bucket"
    requires = ("partition",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        priority = positions(gm.graph)  # node -> position in the new order
        rewriter = GraphRewriter(gm.graph)
        free = prefetchable(gm.graph)
        for bucket in self._buckets(gm.graph, priority, free):
            if len(bucket.members) > 1 or self.direct:  # direct messages have a coalesced op only
                self._coalesce(rewriter, bucket, priority)
        # Casts and moves before a member may stand later than the bucket now: put them before it.
        sink_to_first_use(gm.graph, free, priority)
        reorder(gm.graph, priority)
        gm.recompile()
        return gm

    def _buckets(self, graph: fx.Graph, order: dict[fx.Node, float], free: frozenset[fx.Node]) -> list[_OpenBucket]:
        """Returns the collectives grouped into buckets: each joins the last bucket of its kind if it fits, or opens a
        new one.

        Args:
            order: position of each node.
            free: ops that can move to an earlier position, as from `prefetchable`.
        """
        buckets: list[_OpenBucket] = []
        newest: dict[tuple[object, ...], _OpenBucket] = {}  # by kind: only the last bucket of each may grow
        bucket_of: dict[fx.Node, _OpenBucket] = {}  # of the waits of its members, and of what only moves these
        level = leaving(graph)  # nodes on the way from a collective to the output -> number of collectives before
        fusible = _in_turn(graph, free, level)
        limits = (
            dict.fromkeys(fusible, self.size) if isinstance(self.size, int) else self.size.max_bytes(graph, fusible)
        )
        for node in fusible:
            # The arguments behind the input: reduce op, number of ranks, group. Chunks of a collective (`piece`) stay
            # apart, as each overlaps with compute on another chunk.
            key = (node.target, ir.value(node).dtype, node.args[1:], ir.info(node).piece)
            ready = -1.0  # position of the last input; inputs of the graph are there from the start
            for x in node.all_input_nodes:
                if x in bucket_of:
                    # An input from another bucket is ready when that one is, so its place is fixed from here on.
                    bucket_of[x].closed = True
                    ready = max(ready, bucket_of[x].position)
                elif x.op != "placeholder" and x not in free:
                    ready = max(ready, order[x])
            # What only leaves the graph is used at its end.
            used = [order[user] for wait in node.users if wait not in level for user in wait.users]
            use = min(used, default=float(len(order)))
            bucket = _OpenBucket([node], first=order[node], ready=ready, use=use, size=_wire_size(node))
            if key in newest and newest[key].has_room_for(bucket, limits[node]):
                newest[key].add(bucket)
            else:
                newest[key] = bucket
                buckets.append(bucket)
            work = list(node.users)
            while work:  # what only moves or casts its results is ready when this bucket is
                bucket_of[x := work.pop()] = newest[key]
                work += [user for user in x.users if (user in level or user in free) and not is_start(user)]
        return buckets

    def _coalesce(self, rewriter: GraphRewriter, bucket: _OpenBucket, priority: dict[fx.Node, float]) -> None:
        """Replaces the collectives of a bucket by one coalesced collective, and sets the new node's position in
        ``priority``. The old waits read its results.
        """
        first, end = bucket.members[0], ir.output_node(rewriter.graph)
        # A coalesced op that sends messages between ranks, or torch's own.
        target: OpOverload = (_DIRECT if self.direct else _NATIVE)[first.target]
        values = tuple(ir.value(node) for node in bucket.members)
        # Anywhere: the order of nodes follows from ``priority``.
        at = rewriter.before(end, like=first, suffix="bucket")
        # The members' other arguments (reduce op, number of ranks, group) are the same.
        fused = at.typed(values, target, [node.args[0] for node in bucket.members], *first.args[1:])
        fused.meta["val"] = [node.meta["val"] for node in bucket.members]
        priority[fused] = bucket.position
        for number, node in enumerate(bucket.members):
            result = rewriter.before(end, like=node).call(getitem, fused, number)
            priority[result] = bucket.position
            for wait in node.users:  # not before the bucket, which may stand later than this member did
                priority[wait] = max(priority[wait], bucket.position)
            del priority[node]
            rewriter.replace(node, result, rename=True)


def _in_turn(graph: fx.Graph, free: frozenset[fx.Node], level: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Returns the collectives that can be fused, in the order in which they join buckets: the prefetchable ones first,
    and one that reads another one's result after it. A second reduction of a gradient comes after all first ones, since
    the bucket that it reads cannot grow any more; so do gathers and maxima behind a maximum.

    Args:
        free: the prefetchable ops.
        level: number of collectives before a node that leads to an output, as from `leaving`.
    """
    # Of a free op, the number of collectives and moves in a row that it depends on; ``level`` has that of gradients.
    before: dict[fx.Node, int] = {}
    for node in filter(free.__contains__, graph.nodes):
        before[node] = max((before[x] + is_start(x) for x in node.all_input_nodes if x in before), default=0)
    fusible = [node for node in graph.nodes if node.op == "call_function" and node.target in _NATIVE]
    # The sort is stable: otherwise in the order of the graph.
    return sorted(fusible, key=lambda node: (node not in free, before.get(node, level.get(node, 0))))


@dataclass
class _OpenBucket:
    """A bucket that may still grow.

    Attributes:
        members: its collectives.
        first, ready, use: positions of its first member, of its last input and of the first use of a result.
        size: bytes of its larger side, per rank.
        closed: no further member may join, since another bucket depends on its position.
    """

    members: list[fx.Node]
    first: float
    ready: float
    use: float
    size: int
    closed: bool = False

    @property
    def position(self) -> float:
        """Returns the position of the bucket: its first member's, or right after its last input if that is later."""
        return max(self.first, self.ready + 0.5)

    def has_room_for(self, other: _OpenBucket, limit: int) -> bool:
        """Returns whether the bucket ``other`` can join this one: this one is not closed, together they have at most
        ``limit`` bytes (-1: no limit; 0: no buckets), and all inputs are there before the first use of a result.
        """
        fits = limit < 0 or self.size + other.size <= limit
        place = max(self.first, self.ready + 0.5, other.ready + 0.5)  # of both together, as `position`
        return limit != 0 and not self.closed and fits and place < min(self.use, other.use)

    def add(self, other: _OpenBucket) -> None:
        """Adds the members of ``other``, and moves the bucket behind their inputs."""
        self.members += other.members
        self.ready, self.use = max(self.ready, other.ready), min(self.use, other.use)
        self.size += other.size


def _wire_size(node: fx.Node) -> int:
    """Returns the bytes, per rank, of the larger one of a collective's input and result."""
    return max(ir.value(node).nbytes, ir.value(node.args[0]).nbytes)
