"""Schedule: where collectives start and where they are waited for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.order import places, reorder

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

# What may stand between a wait and the output.
_FINISHING = (
    c10d.wait_tensor.default, aten.reshape.default, aten.sum.dim_IntList, aten.slice.Tensor, aten.div.Tensor,
)  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """Starts collectives early and waits for them late; the values are the same.

    Takes: one half of a local graph, bucketed. A collective starts as soon as its inputs are there, one whose
    inputs are all there from the beginning (a parameter's gather) under the compute before the present use of
    another, as far ahead as ``max_in_flight`` allows. A wait stands in front of the first use. The collectives
    start in one order, the same on every rank, since every rank has this graph.

    Args:
        max_in_flight: bytes of results that may be on their way or waiting for their first use, of collectives
            that are started ahead; -1 for no limit.
        blocking: leave every collective where it is, and wait for it there.
    """

    max_in_flight: int
    blocking: bool = False
    name = "schedule"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        wished = places(gm.graph)
        starts = [n for n in gm.graph.nodes if is_start(n)]
        if self.blocking:
            wished |= {wait: wished[node] + 0.1 for node in starts for wait in waits_of(node)}
            reorder(gm.graph, wished)
            gm.recompile()
            return gm
        uses = {node: _first_use(node, wished) for node in starts}
        for node in starts:
            ready = max((wished[x] for x in node.all_input_nodes if x.op != "placeholder"), default=None)
            if ready is not None:
                wished[node] = ready + 0.25
            for wait in waits_of(node):
                wished[wait] = min((wished[user] for user in wait.users), default=float("inf")) - 0.25
        self._prefetch([n for n in starts if _always_ready(n)], uses, wished)
        _drain(gm.graph, starts, wished)
        reorder(gm.graph, wished)
        gm.recompile()
        return gm

    def _prefetch(self, gathers: list[fx.Node], uses: dict[fx.Node, float], wished: dict[fx.Node, float]) -> None:
        """Starts each gather behind the first use of an earlier one, so that those after it may fly together."""
        gathers.sort(key=lambda node: (uses[node], wished[node]))
        for at, node in enumerate(gathers):
            ahead, flying = at, result_bytes(node)
            while ahead > 0:
                flying += result_bytes(gathers[ahead - 1])
                if 0 <= self.max_in_flight < flying:
                    break
                ahead -= 1
            place = uses[gathers[ahead - 1]] + 0.3 if ahead > 0 else -1.0
            wished[node] = min(place, uses[node] - 0.5)


def _drain(graph: fx.Graph, starts: list[fx.Node], wished: dict[fx.Node, float]) -> None:
    """Waits for a collective whose results only leave the graph when the next such one starts, or at the end."""
    leaving = _leaving(graph)
    drained = [node for node in starts if waits_of(node) and all(wait in leaving for wait in waits_of(node))]
    drained.sort(key=wished.__getitem__)
    for at, node in enumerate(drained):
        place = wished[drained[at + 1]] + 0.1 if at + 1 < len(drained) else float("inf")
        work = waits_of(node)
        while work:
            tail = work.pop()
            wished[tail] = max(wished[tail], place)
            work += [user for user in tail.users if user in leaving]


def _leaving(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose every use leads to the graph's output through local moves and sums of what came."""
    out: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.target in _FINISHING and node.users:
            if all(user.op == "output" or user in out for user in node.users):
                out.add(node)
    return out


def is_start(node: fx.Node) -> bool:
    """Whether ``node`` starts a collective."""
    return (
        node.op == "call_function"
        and getattr(node.target, "namespace", "") in ("_c10d_functional", "shardc")
        and node.target is not c10d.wait_tensor.default
    )


def waits_of(node: fx.Node) -> list[fx.Node]:
    """The waits on the collective ``node``, through the items of a coalesced one."""
    out = []
    for user in node.users:
        out += [user] if user.target is c10d.wait_tensor.default else waits_of(user)
    return out


def result_bytes(node: fx.Node) -> int:
    """Bytes of what the collective ``node`` makes."""
    made = ir.info(node).value
    values = made if isinstance(made, tuple) else (made,)
    return sum(prod(v.shape) * v.itemsize for v in values if v is not None)


def _always_ready(node: fx.Node) -> bool:
    return all(x.op == "placeholder" for x in node.all_input_nodes)


def _first_use(node: fx.Node, wished: dict[fx.Node, float]) -> float:
    return min((wished[user] for wait in waits_of(node) for user in wait.users), default=float("inf"))
