"""Chunking: computes which chunks of its operands an op needs for a chunk of its result, and rewrites nodes chunk by
chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import arguments_of, collective_kind
from shardc.ir.graph import info, is_tensor, update, value
from shardc.ir.op_traits import CAST, RESHAPES, TRANSPOSES, is_pointwise
from shardc.ir.rewriter import GraphRewriter

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
_SUMS = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default}
_VIEWS = RESHAPES | {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
# Ops along the dim that is their second argument; other dims are loops.
_ALONG = {
    aten.gather.default, aten.scatter.value, aten.scatter.src, aten.index_select.default, aten.slice.Tensor,
    aten._softmax.default, aten._log_softmax.default,
}  # fmt: skip
# Ops of which each element of the result depends on one element of the operand.
_BY_ELEMENT = {aten.expand.default, CAST, aten.clone.default, WAIT}
_CHECKS = "shardc_checks"  # namespace of ops that return their operand


@dataclass(frozen=True)
class ChunkSpec:
    """Division of dim ``dim`` into ``count`` chunks. The dim is viewed as [outer, count, inner]; a chunk has all of
    ``outer`` and ``inner`` at one index of ``count``.

    Args:
        dim: index of the dim, from 0.
        outer, count, inner: sizes of the three parts, major to minor; their product is the dim's size.
    """

    dim: int
    outer: int
    count: int
    inner: int

    def shape(self, whole: Sequence[int]) -> list[int]:
        """Return the shape of one chunk of a tensor of shape ``whole``."""
        return [n // self.count if d == self.dim else n for d, n in enumerate(whole)]

    def split(self, shape: Sequence[int]) -> list[int]:
        """Return ``shape`` with the chunked dim viewed as two dims, [outer, rest]. ``shape`` is that of the tensor or
        of one chunk.
        """
        return [*shape[: self.dim], self.outer, shape[self.dim] // self.outer, *shape[self.dim + 1 :]]


Operands = dict[fx.Node, ChunkSpec | None]  # None: every chunk of the result reads the complete operand


def viewed(cut: ChunkSpec, shape: Sequence[int], new_shape: Sequence[int]) -> ChunkSpec | None:
    """Return how a tensor of ``shape``, chunked by ``cut``, is chunked after a view to ``new_shape``.

    None if a chunk would span several dims there.
    """
    inside = cut.inner * prod(shape[cut.dim + 1 :])
    behind = 1
    for dim in reversed(range(len(new_shape))):
        outer, rest = divmod(new_shape[dim] * behind, inside * cut.count)
        if behind * new_shape[dim] > inside:
            inner, odd = divmod(inside, behind)
            return ChunkSpec(dim, outer, cut.count, inner) if not rest and not odd and outer else None
        behind *= new_shape[dim]
    return None


def operands(node: fx.Node, cut: ChunkSpec) -> Operands | None:
    """Return operand of ``node`` -> its `ChunkSpec`, given the chunks ``cut`` of the result. None stands for an operand
    that every chunk of the result reads completely.

    If the result of ``node`` cannot be computed chunk by chunk, return None in place of the dict.
    """
    reads = node.all_input_nodes
    if node.op != "call_function" or not reads or not all(map(is_tensor, (node, *reads))):
        return None
    target, shape, first = node.target, value(node).shape, reads[0]
    if collective_kind(node) is not None:
        return _of_collective(node, cut)
    if target in PRODUCTS:
        return _of_product(node, cut)
    if target in _VIEWS:
        seen = viewed(cut, shape, value(first).shape)
        return None if seen is None else {first: seen}
    if target in TRANSPOSES | _SUMS:
        dim = _dim_of_operand(node, cut.dim)
        return None if dim is None else {first: replace(cut, dim=dim)}
    if target in _ALONG:
        same_rank = [x for x in reads if len(value(x).shape) == len(shape)]
        if node.args[1] % len(shape) == cut.dim or any(value(x).shape[cut.dim] != shape[cut.dim] for x in same_rank):
            return None
        return {x: cut if x in same_rank else None for x in reads}
    if target in _BY_ELEMENT or getattr(target, "namespace", "") == _CHECKS or is_pointwise(target):
        return {x: _broadcast(cut, value(x).shape, shape) for x in reads}
    return None


def _of_collective(node: fx.Node, cut: ChunkSpec) -> Operands | None:
    """Return operand -> its `ChunkSpec` for a collective whose result is chunked by ``cut``; see `operands`."""
    kind, x = collective_kind(node), node.all_input_nodes[0]
    ranks = arguments_of(node).get("group_size", 1) if cut.dim == 0 else 1
    if kind == "all_gather":
        outer, rest = divmod(cut.outer, ranks)  # what is gathered has no ranks
        return None if rest else {x: replace(cut, outer=outer)}
    if kind == "reduce_scatter":
        return {x: replace(cut, outer=cut.outer * ranks)}
    return {x: cut} if kind == "all_reduce" else None


def _dim_of_operand(node: fx.Node, dim: int) -> int | None:
    """Return the dim of the operand of a transpose or reduction that is ``dim`` of its result; None if it is
    reduced.
    """
    rank = len(value(node.all_input_nodes[0]).shape)
    if node.target is aten.permute.default:
        permuted: int = node.args[1][dim] % rank
        return permuted
    if node.target in TRANSPOSES:
        swapped = [dim % rank for dim in node.args[1:]] or [0, rank - 1]
        return sum(swapped) - dim if dim in swapped else dim
    reduced = {dim % rank for dim in node.args[1] or range(rank)}
    if rank == len(value(node).shape):  # reduced dims are kept, with size 1
        return None if dim in reduced else dim
    return [dim for dim in range(rank) if dim not in reduced][dim]


def results(node: fx.Node, x: fx.Node, cut: ChunkSpec) -> Iterator[ChunkSpec]:
    """Yield candidates (`ChunkSpec`) for the chunks of the result of ``node``, given the chunks ``cut`` of its operand
    ``x``.

    The caller checks by `operands` which of the candidates are valid.
    """
    if node.target in _VIEWS:
        seen = viewed(cut, value(x).shape, value(node).shape)
        yield from () if seen is None else (seen,)
    elif node.op == "call_function" and is_tensor(node):
        ranks = arguments_of(node).get("group_size", 1) if collective_kind(node) else 1
        for outer in dict.fromkeys((cut.outer, cut.outer * ranks, cut.outer // ranks)):
            for dim, size in enumerate(value(node).shape):
                if size == outer * cut.count * cut.inner:
                    yield ChunkSpec(dim, outer, cut.count, cut.inner)


def through(node: fx.Node, read: dict[fx.Node, ChunkSpec]) -> ChunkSpec | None:
    """Return how the result of ``node`` is chunked if its operands are chunked as in ``read`` (operand -> `ChunkSpec`).
    None if the result cannot be computed chunk by chunk.
    """
    x, cut = next(iter(read.items()))
    for result in results(node, x, cut):
        need = operands(node, result)
        if need is not None and all(need.get(x) == cut for x, cut in read.items()):
            return result
    return None


def _broadcast(cut: ChunkSpec, shape: Sequence[int], result_shape: Sequence[int]) -> ChunkSpec | None:
    """Return how an operand of ``shape`` is chunked that broadcasts to ``result_shape``, the shape of a result that is
    chunked by ``cut``.

    None if every chunk reads the operand completely.
    """
    dim = cut.dim + len(shape) - len(result_shape)
    return replace(cut, dim=dim) if dim >= 0 and shape[dim] == result_shape[cut.dim] else None


def _of_product(node: fx.Node, cut: ChunkSpec) -> Operands | None:
    """Return operand -> its `ChunkSpec` for a matrix product whose result is chunked by ``cut``; see `operands`."""
    *bias, x, weight = node.args
    if cut.dim != 0 or x is weight:
        return None
    out: Operands = {x: cut, weight: cut if node.target is aten.bmm.default else None}
    for operand in bias:
        if operand in out:
            return None
        out[operand] = _broadcast(cut, value(operand).shape, value(node).shape)
    return out


def total_operands(node: fx.Node, read: Mapping[fx.Node, ChunkSpec]) -> Operands | None:
    """Return operand -> its `ChunkSpec` if the result of ``node`` can be computed as a sum of one term per chunk.
    ``read`` gives the chunks of the operands: operand -> `ChunkSpec`.

    Such nodes are a sum over the chunked dim, and a product that contracts it. None for other nodes.
    """
    x, cut = next(iter(read.items()))
    if node.target is aten.mm.default:
        left, right = node.args
        cuts: Operands = {left: replace(cut, dim=1), right: replace(cut, dim=0)}
        return cuts if left is not right and all(cuts[x] == cut for x, cut in read.items()) else None
    dims = node.args[1:2] if node.target is aten.sum.dim_IntList else None
    if dims is None and node.target is not aten.sum.default:
        return None
    rank = len(value(x).shape)
    return dict(read) if not dims or cut.dim in {dim % rank for dim in dims[0] or range(rank)} else None


def make_pieces(graph: fx.Graph, cuts: dict[fx.Node, ChunkSpec]) -> None:
    """Rewrite each node in ``cuts`` as several nodes, one for each chunk of its result. A node outside of ``cuts``
    reads the concatenated chunks.

    Nodes between two collectives are computed together for one chunk after another, so that the first chunk is sent
    while the second is computed.

    Args:
        cuts: node -> chunks of its result, in the graph's order. `operands` accepts each; all have as many chunks.
    """
    ChunkRewriter(graph, cuts).run()


class ChunkRewriter:
    """Rewrites the nodes in ``cuts`` (node -> chunks of its result) chunk by chunk, for one call of `make_pieces`."""

    def __init__(self, graph: fx.Graph, cuts: dict[fx.Node, ChunkSpec]) -> None:
        self.graph, self.cuts, self.count = graph, cuts, next(iter(cuts.values())).count
        self.rewriter = GraphRewriter(graph)
        self.pieces: dict[fx.Node, list[fx.Node]] = {}
        self.joined: dict[fx.Node, fx.Node] = {}
        self.parts: dict[tuple[fx.Node, ChunkSpec, int], fx.Node] = {}
        self.pending: dict[fx.Node, ChunkSpec] = {}  # nodes of ``cuts`` whose chunks are not inserted yet
        self.deferred: dict[fx.Node, None] = {}  # nodes outside of ``cuts`` that depend on these
        self.phase = ""  # phase of the nodes being inserted

    def run(self) -> None:
        """Replace all nodes of ``cuts`` by their chunks."""
        for node in list(self.graph.nodes):
            read = node.all_input_nodes
            if node in self.cuts:
                need = operands(node, self.cuts[node])
                assert need is not None
                behind = [x for x in read if x in self.deferred]
                behind += [x for x in read if x in self.pending and (node.target is WAIT or need[x] != self.cuts[x])]
                if behind:
                    self._insert_pending(node)
                self.pending[node] = self.cuts[node]
            elif node.op == "output":
                self._insert_pending(node)
                self._take_joined(node, node)
            elif any(x in self.pending or x in self.deferred for x in read):
                self.deferred[node] = None
            elif any(x in self.cuts for x in read):
                self._take_joined(node, node)
        for node in reversed(list(self.cuts)):
            self.graph.erase_node(node)

    def _insert_pending(self, before: fx.Node) -> None:
        """Insert the chunks of the nodes in ``pending`` before the node ``before``: first chunk 0 of all nodes, then
        chunk 1, and so on. Move the nodes in ``deferred`` behind the chunks.
        """
        for number in range(self.count):
            for node in self.pending:
                self.pieces.setdefault(node, []).append(self._piece(node, number, before))
        self.pending.clear()
        for node in self.deferred:
            self._take_joined(node, before)
            before.prepend(node)
        self.deferred.clear()

    def _take_joined(self, node: fx.Node, before: fx.Node) -> None:
        """Make ``node``, which is computed as a whole, read concatenated chunks in place of operands in ``cuts``. The
        concatenations are inserted before the node ``before``.
        """
        self.phase = info(node).origin.phase if node.op == "call_function" else ""
        for x in node.all_input_nodes:
            if x in self.cuts:
                node.replace_input_with(x, self._join(x, before))

    def _piece(self, node: fx.Node, number: int, before: fx.Node, phase: str = "") -> fx.Node:
        """Insert chunk ``number`` of ``node`` before the node ``before``; return it."""
        cut, target, self.phase = self.cuts[node], node.target, phase or info(node).origin.phase
        need = operands(node, cut)
        assert need is not None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: self._operand(x, need[x], number, before))
        if target in _VIEWS or target is aten.expand.default:
            target = aten.reshape.default if target in _VIEWS else target
            args = (args[0], cut.shape(value(node).shape))
        elif collective_kind(node):
            x, *rest = args
            if not x.meta["val"].is_contiguous():
                x = self._emit(before, node, aten.clone.default, x, memory_format=torch.contiguous_format)
            args = (x, *rest)
        piece = self._emit(before, node, target, *args, **kwargs)
        if collective_kind(node):
            update(piece, piece=number)
        return piece

    def _operand(self, x: fx.Node, cut: ChunkSpec | None, number: int, before: fx.Node) -> fx.Node:
        """Return the part of operand ``x`` that chunk ``number`` of a result reads: chunk ``number`` of ``x`` (divided
        by ``cut``), or all of ``x`` if ``cut`` is None. Slices are inserted before the node ``before``.
        """
        if cut is not None and self.cuts.get(x) == cut:
            return self.pieces[x][number]
        whole = self._join(x, before) if x in self.cuts else x
        if cut is None:
            return whole
        if (x, cut, number) not in self.parts:
            dim, low = cut.dim, number * cut.inner
            shape = value(x).shape
            if cut.outer > 1:
                whole, dim = self._emit(before, x, aten.reshape.default, whole, cut.split(shape)), dim + 1
            part = self._emit(before, x, aten.slice.Tensor, whole, dim, low, low + cut.inner)
            if cut.outer > 1:
                part = self._emit(before, x, aten.reshape.default, part, cut.shape(shape))
            self.parts[x, cut, number] = part
        return self.parts[x, cut, number]

    def _join(self, x: fx.Node, before: fx.Node) -> fx.Node:
        """Return the concatenation of the chunks of ``x``, inserted before the node ``before``."""
        if x not in self.joined:
            cut, pieces = self.cuts[x], self.pieces[x]
            if cut.outer > 1:
                shape = cut.split(value(pieces[0]).shape)
                pieces = [self._emit(before, x, aten.reshape.default, piece, shape) for piece in pieces]
            joined = self._emit(before, x, aten.cat.default, pieces, cut.dim + (cut.outer > 1))
            if cut.outer > 1:
                joined = self._emit(before, x, aten.reshape.default, joined, list(value(x).shape))
            self.joined[x] = update(joined, name=info(x).name)  # it takes the place of x
        return self.joined[x]

    def _emit(
        self,
        before: fx.Node,
        like: fx.Node,
        target: Callable[..., object],
        *args: fx.node.Argument,
        **kwargs: fx.node.Argument,
    ) -> fx.Node:
        """Insert an op before the node ``before``, with the provenance of ``like``; return its node."""
        # What backward alone slices or concatenates, it does in backward.
        provenance = {"phase": "backward"} if self.phase == "backward" else {}
        return self.rewriter.before(before, like, "piece", **provenance).call(target, *args, **kwargs)
