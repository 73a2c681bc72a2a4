"""Lists the copies that communication causes in a step: bytes moved within a rank only to be sent, or after they
arrive.

An all-gather receives each shard at its place in the result, so its only copy is that of the rank's own shard. More
copies occur if a layout splits a dim other than the leading one: the split dim is moved to the front before sending,
and back after the wait. Small tensors that share a message (`shardc.ir.packing`) are copied into it and out of it.

Casts and arithmetic are not counted, nor copies inside a library's collective. The list is an upper bound: Inductor may
fuse a copy into the op that produces its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc.cost.fused_kernels import tensor_bytes
from shardc.cost.step_sequence import aliased
from shardc.ir import graph as ir
from shardc.ir.comm import ALL_REDUCE, GATHER, IN_MESSAGES, REDUCE_SCATTER, WAIT, is_ring
from shardc.ir.comm_volume import collective_kind, group_of
from shardc.ir.mesh import Mesh
from shardc.ir.op_traits import COPIES
from shardc.ir.packing import Packing, rows_of

aten = torch.ops.aten

# Values of `Copy.reason`.
OWN_SHARD = "own shard to its place in the gathered result"
TOGETHER = "terms of an all-reduce into one buffer"
INTO_MESSAGE = "small tensors into the message that they share"
OUT_OF_MESSAGE = "gathered small tensors out of the message that they share"
CONTIGUOUS = "made contiguous to be sent"
TO_SEND = "brought in the order in which it is sent"
RECEIVED = "brought in order after it came"


@dataclass(frozen=True)
class Copy:
    """One copy within a rank.

    Args:
        name: the value, as named in the graph's text.
        reason: one of the constants above.
        bytes: bytes written.
    """

    name: str
    reason: str
    bytes: int


def copies(graph: fx.Graph, mesh: Mesh) -> list[Copy]:
    """Return the copies of a local forward or backward graph, in its order."""
    result: list[Copy] = []
    feeds_collective = _reached(graph, backward=True)
    follows_wait = _reached(graph, backward=False)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if collective_kind(node) is not None:
            result += _of_collective(node, mesh)
        elif node.target in COPIES and not _is_view(node) and (node in feeds_collective or node in follows_wait):
            reason = RECEIVED if node in follows_wait else TO_SEND
            result.append(Copy(ir.info(node).name, reason, tensor_bytes(node.meta["val"])))
    return result


def table(copied: list[Copy]) -> str:
    """Return a text table: count and bytes of the copies for each reason, and in total."""
    rows: dict[str, tuple[int, int]] = {}
    for copy in copied:
        count, size = rows.get(copy.reason, (0, 0))
        rows[copy.reason] = count + 1, size + copy.bytes
    lines = [f"{reason}: x{count} {size} B/rank" for reason, (count, size) in sorted(rows.items())]
    return "\n".join([*lines, f"copies: x{len(copied)} {sum(copy.bytes for copy in copied)} B/rank"]) + "\n"


def _of_collective(node: fx.Node, mesh: Mesh) -> Iterator[Copy]:
    kind, name, outputs = collective_kind(node), ir.info(node).name, _tensors(node.meta["val"])
    _, ranks = group_of(node, mesh)
    for read in node.all_input_nodes:
        val = read.meta["val"]
        if isinstance(val, Tensor) and not val.is_contiguous():
            yield Copy(ir.info(read).name, CONTIGUOUS, tensor_bytes(val))
    if kind == "all_gather":
        for user, x in _named(node, outputs):
            yield Copy(user, OWN_SHARD, tensor_bytes(x) // ranks)
    elif node.target is ALL_REDUCE and is_ring("all_reduce", ranks):
        yield Copy(name, TOGETHER, sum(map(tensor_bytes, outputs)))
        return
    if node.target not in IN_MESSAGES or ranks == 1:
        return
    if size := Packing.of(rows_of(node, ranks)).size:
        yield Copy(name, INTO_MESSAGE, size * (ranks - 1 if node.target is REDUCE_SCATTER else 1))
        if node.target is GATHER:
            yield Copy(name, OUT_OF_MESSAGE, size * (ranks - 1))


def _named(node: fx.Node, outputs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    items: dict[Any, str] = {user.args[1]: ir.info(user).name for user in node.users if user.target is getitem}
    for at, x in enumerate(outputs):
        yield items.get(at, ir.info(node).name), x


def _reached(graph: fx.Graph, backward: bool) -> set[fx.Node]:
    """Return the nodes that only data movement separates from a collective's start (``backward``) or its wait."""
    nodes = reversed(graph.nodes) if backward else iter(graph.nodes)
    next_to: Callable[[fx.Node], Any] = (lambda n: n.users) if backward else (lambda n: n.all_input_nodes)
    out: set[fx.Node] = set()
    for node in nodes:
        if node.op != "call_function" or not (node.target in COPIES or aliased(node) is not None):
            continue
        if any(neighbour in out or _ends(neighbour, backward) for neighbour in next_to(node)):
            out.add(node)
    return out


def _is_view(node: fx.Node) -> bool:
    """Return whether the node's result shares memory with its operand (a reshape may or may not)."""
    storages = [x.untyped_storage()._cdata for x in (node.meta["val"], node.all_input_nodes[0].meta["val"])]
    return storages[0] == storages[1]


def _ends(node: fx.Node, backward: bool) -> bool:
    return collective_kind(node) is not None if backward else node.target is WAIT


def _tensors(val: Any) -> list[Tensor]:
    return [x for x in (val if isinstance(val, list | tuple) else [val]) if isinstance(x, Tensor)]
