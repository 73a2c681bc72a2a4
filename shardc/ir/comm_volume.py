"""Communication volume: the collectives of a graph, counted by kind and mesh axis, and the bytes that a rank sends.

Wire bytes are the bytes that each rank sends over its link, for n ranks and a buffer of S bytes a rank, as in
"Performance reported by NCCL tests" (nccl-tests, doc/PERFORMANCE.md):

    all_gather      (n-1)/n of the gathered S
    reduce_scatter  (n-1)/n of the term S
    all_reduce      2(n-1)/n of the S that is reduced
    all_to_all      (n-1)/n of the shard S
    permute_ranks   the shard S

Rows that are routed by their values (``send_rows``) count as an all-to-all of all rows; that is exact if each rank
receives the same number of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from torch import fx

from shardc.errors import VerifyError
from shardc.ir import grammar, ops
from shardc.ir.graph import info, value
from shardc.ir.mesh import Mesh
from shardc.ir.op_traits import communicates

GROUP_PREFIX = "shardc:"
_GROUP = re.compile(r"shardc(?:\.\d+)?:(.*)")

# torch op -> the kind that it counts as; other ops of the two namespaces send nothing.
KINDS: dict[str, str] = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "permute_ranks": "permute_ranks",
    "send_rows": "all_to_all",
}


@dataclass(frozen=True)
class Row:
    """Count and bytes of a graph's collectives of one kind over one group.

    Args:
        kind: the name of the op in `shardc.ir.ops`.
        axis: the mesh axes of the group, joined by commas.
        count: number of collectives in the graph.
        bytes: wire bytes that each rank sends for all of them together.
    """

    kind: str
    axis: str
    count: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.kind}({self.axis}) x{self.count} {self.bytes} B/rank"


def tally(gm: fx.GraphModule, mesh: Mesh) -> list[Row]:
    """Return a `Row` (count and bytes) for each kind and group of collectives in ``gm``. They are marker ops in a
    global graph, and torch's ops in a local graph.

    Sorted by kind, then by mesh axis. A ``reshard`` that is not lowered to collectives yet is not counted.

    Raises:
        VerifyError: the graph has a collective over a group that is not of ``mesh``.
    """
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for kind, axis, size in _collectives(gm, mesh):
        count, total = counts.get((kind, axis), (0, 0))
        counts[kind, axis] = count + 1, total + size
    rows = [Row(kind, axis, count, total) for (kind, axis), (count, total) in counts.items()]
    return sorted(rows, key=lambda row: (row.kind, [mesh.order(a) for a in row.axis.split(",")]))


def wire_elements(kind: str, ranks: int, local_elements: int) -> int:
    """Return the number of elements that each of ``ranks`` ranks sends in a collective of ``kind``. ``local_elements``
    is the size of the operand on each rank.
    """
    if kind == "all_gather":
        return (ranks - 1) * local_elements
    if kind == "permute_ranks" or kind == "broadcast":
        return local_elements if ranks > 1 else 0
    passes = 2 if kind == "all_reduce" else 1
    return -(-passes * (ranks - 1) * local_elements // ranks)


def group_axes(group: str, mesh: Mesh) -> tuple[str, ...] | None:
    """Return the axes of a group name such as ``shardc:dp,tp``, or None if it is not a group of ``mesh``."""
    axes = named_axes(group) if isinstance(group, str) else None
    return axes if axes is not None and all(axis in mesh for axis in axes) else None


def named_axes(group: str) -> tuple[str, ...] | None:
    """Return the axes in the name of a process group, such as ``shardc:dp,tp``; None if shardc did not name it.

    In a graph that has run on a process's second mesh, the name is ``shardc.1:dp,tp``.
    """
    match = _GROUP.fullmatch(group)
    return tuple(match[1].split(",")) if match else None


def group_of(node: fx.Node, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """Return (axes, number of ranks) of the process group of a torch collective."""
    axes = group_axes(arguments_of(node)["group_name"], mesh)
    assert axes is not None, f"{node} is over no group of {mesh}"
    return axes, prod(mesh.size(axis) for axis in axes)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call of a torch op: name in the op's schema -> argument. Arguments that the call leaves
    at their defaults are missing.
    """
    target = node.target
    return {**dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)), **node.kwargs}


def collective_kind(node: fx.Node) -> str | None:
    """Return the kind of collective that ``node`` starts, such as "all_gather", for a marker op or a torch op; None for
    others.
    """
    return _kind_of(node.target) if node.op == "call_function" else None


@cache
def _kind_of(target: object) -> str | None:
    """Return the kind of collective that the op ``target`` starts, such as "all_gather"; None for other ops."""
    if target in ops.COLLECTIVES:
        return str(target.__name__)
    if not grammar.is_torch_op(target) or not communicates(target):
        return None
    return kind_named(target._schema.name.partition("::")[2])


def kind_named(op: str) -> str | None:
    """Return the kind of collective that torch's op of the name ``op`` starts; None if it starts none.

    >>> kind_named("all_gather_into_tensor_coalesced")
    'all_gather'
    """
    return KINDS.get(op.removesuffix("_coalesced").removesuffix("_out"))


def _collectives(gm: fx.GraphModule, mesh: Mesh) -> Iterator[tuple[str, str, int]]:
    """Yield (kind, axis, wire bytes per rank) of each collective."""
    for node in gm.graph.nodes:
        kind = collective_kind(node)
        if kind is None:
            continue
        marker = node.target in ops.COLLECTIVES
        group = str(node.kwargs["axis"]) if marker else arguments_of(node)["group_name"]
        axes = tuple(group.split(",")) if marker else group_axes(group, mesh)
        if axes is None:
            raise VerifyError(f"%{info(node).name} communicates over {group!r}, no group of the mesh {mesh}")
        ranks = prod(mesh.size(axis) for axis in axes)
        yield kind, ",".join(axes), 0 if mesh.time in axes else wire_bytes(node, kind, ranks)


def wire_bytes(node: fx.Node, kind: str, ranks: int) -> int:
    """Return the bytes that each of ``ranks`` ranks sends for ``node``, a collective of ``kind``."""
    rows = None if node.target in ops.COLLECTIVES else arguments_of(node).get("rows")
    total = 0
    for x in sent_tensors(node):
        local_elements, shape = _local_elements(x), value(x).shape
        if rows is not None and rows < shape[0]:  # there is room for more than there are
            local_elements = rows * prod(shape[1:])
        total += wire_elements(kind, ranks, local_elements) * value(x).itemsize
    return total


def sent_tensors(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a collective sends: one, or several for a coalesced collective."""
    sent = node.args[0]
    return list(sent) if isinstance(sent, list | tuple) else [sent]


def _local_elements(node: fx.Node) -> int:
    """Return the number of elements that each rank has of the tensor ``node``: its layout's local size or, in a local
    graph, its size.
    """
    tensor = value(node)
    return prod(tensor.shape) if tensor.layout is None else tensor.layout.local_numel
