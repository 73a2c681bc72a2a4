"""Algorithms: lowers each collective of a local graph by the algorithm that the cost model predicts to be fastest.

    reduce_scatter   natively, or an all-to-all whose chunks each rank reduces by itself
    all_gather       natively, or an all-to-all of as many copies as there are ranks
    all_reduce       natively, or a reduce-scatter and an all-gather, each by its fastest algorithm

All move the same bytes, so the backend decides: gloo runs a reduce-scatter as an all-reduce of the full tensor, which
the all-to-all beats. If the cost model was not measured (`python -m shardc calibrate`), all stay native.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, prod

import torch
from torch import fx
from torch.fx.node import Argument

from shardc._compat import OpOverload
from shardc.cost.model import CostModel
from shardc.ir.comm_volume import arguments_of, group_of, wire_elements
from shardc.ir.graph import Value, value
from shardc.ir.mesh import Mesh
from shardc.ir.rewriter import GraphRewriter

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
# reduce op -> function of the dtype that returns (aten op that reduces dim 0, its dims, its keyword arguments)
_REDUCE: dict[str, Callable[[torch.dtype], tuple[OpOverload, Argument, dict[str, Argument]]]] = {
    "sum": lambda dtype: (aten.sum.dim_IntList, [0], {"dtype": dtype}),
    "avg": lambda dtype: (aten.mean.dim, [0], {}),
    "max": lambda dtype: (aten.amax.default, [0], {}),
    "min": lambda dtype: (aten.amin.default, [0], {}),
    "product": lambda dtype: (aten.prod.dim_int, 0, {"dtype": dtype}),
}


class Algorithm(ABC):
    """An algorithm for a ``kind`` of collective: "reduce_scatter", "all_gather" or "all_reduce"."""

    kind: str

    @abstractmethod
    def seconds(self, group: Group, x: Value) -> float:
        """Returns the predicted seconds of this algorithm among the ranks of ``group``, for a local tensor of type
        ``x`` (dtype and shape). Returns inf if the algorithm cannot be used for it.
        """

    @abstractmethod
    def spell(self, x: fx.Node, at: Spelling) -> fx.Node:
        """Inserts the nodes of the algorithm at the insertion points ``at`` (before the start, and before the wait, of
        the collective that it replaces); returns its result for the local tensor ``x``.

        The size of dim 0 of ``x`` is a multiple of the number of ranks for a reduce-scatter.
        """


@dataclass(frozen=True)
class Group:
    """The process group of a collective, and the algorithms to choose from.

    Args:
        name: the group's name.
        ranks: its number of ranks.
        cost: a measured cost model.
        algorithms: the candidates; on a tie the first wins.
    """

    name: str
    ranks: int
    cost: CostModel
    algorithms: tuple[Algorithm, ...]

    def best(self, kind: str, x: Value) -> Algorithm:
        """Returns the fastest algorithm of ``kind`` for a local tensor of type ``x``, on a tie the first one."""
        return min(
            (algorithm for algorithm in self.algorithms if algorithm.kind == kind),
            key=lambda algorithm: algorithm.seconds(self, x),
        )

    def native(self, kind: str, x: Value) -> float:
        """Returns the predicted seconds of the backend's own collective of ``kind`` for a local input ``x``."""
        return self.cost.seconds(kind, self.ranks, self._wire(kind, x))

    def exchanged(self, kind: str, x: Value) -> float:
        """Returns the predicted seconds of a collective of ``kind`` that is run as an all-to-all, for a local input of
        type ``x``.
        """
        return self.cost.exchanged_seconds(self.ranks, self._wire(kind, x))

    def _wire(self, kind: str, x: Value) -> int:
        """Returns the bytes that each rank sends in a collective of ``kind``, whose local input is of type ``x``."""
        return wire_elements(kind, self.ranks, prod(x.shape)) * x.itemsize


@dataclass(frozen=True)
class Spelling:
    """The places where an algorithm inserts its nodes in place of a collective: one before the collective, one before
    its wait.

    Nodes that start a collective go to the first, nodes that use its result to the second, so that compute between the
    two still overlaps with it.

    Args:
        node: the collective to replace.
        wait: its wait.
        group: its process group.
        op: its reduce op; "" for a gather.
        rewriter: inserts the nodes.
    """

    node: fx.Node
    wait: fx.Node
    group: Group
    op: str
    rewriter: GraphRewriter

    def start(self, target: OpOverload, *args: Argument, **kwargs: Argument) -> fx.Node:
        """Inserts a call of ``target`` before the collective and returns it."""
        return self.rewriter.before(self.node).call(target, *args, **kwargs)

    def rest(self, target: OpOverload, *args: Argument, **kwargs: Argument) -> fx.Node:
        """Inserts a call of ``target`` before the collective's wait, the place for nodes that use the result; returns
        the call.
        """
        return self.rewriter.before(self.wait).call(target, *args, **kwargs)

    def reduced(self, pieces: fx.Node) -> fx.Node:
        """Inserts, before the wait, the reduction of ``pieces`` [ranks, ...] over dim 0 by the collective's reduce op;
        returns the result.
        """
        # The dtype, since a sum of integers would else be in int64.
        target, dims, kwargs = _REDUCE[self.op](value(pieces).dtype)
        return self.rest(target, pieces, dims, **kwargs)

    def behind(self) -> Spelling:
        """Returns the places for a second collective, which starts after the first one has arrived: all its nodes go
        before the wait of the collective that is replaced, so that only the first one overlaps with compute.
        """
        return replace(self, node=self.wait)


# --- the algorithms


@dataclass(frozen=True)
class Native(Algorithm):
    """The algorithm that leaves a collective to the backend (gloo or NCCL)."""

    kind: str

    def seconds(self, group: Group, x: Value) -> float:
        """Returns the predicted seconds of the backend's collective."""
        return group.native(self.kind, x)

    def spell(self, x: fx.Node, at: Spelling) -> fx.Node:
        """Inserts the backend's collective and its wait; returns the wait."""
        ranks, name = at.group.ranks, at.group.name
        if self.kind == "reduce_scatter":
            collective = at.start(c10d.reduce_scatter_tensor.default, x, at.op, ranks, name)
        elif self.kind == "all_gather":
            collective = at.start(c10d.all_gather_into_tensor.default, x, ranks, name)
        else:
            collective = at.start(c10d.all_reduce.default, x, at.op, name)
        return at.rest(c10d.wait_tensor.default, collective)


class _Exchanged(Algorithm):
    """Base of the algorithms that send the data of a collective by an all-to-all, and are priced like it."""

    def seconds(self, group: Group, x: Value) -> float:
        """Returns the predicted seconds of the all-to-all."""
        return group.exchanged(self.kind, x)


class ExchangedScatter(_Exchanged):
    """Reduce-scatter as an all-to-all of chunks that each rank then reduces by itself."""

    kind = "reduce_scatter"

    def spell(self, x: fx.Node, at: Spelling) -> fx.Node:
        """Inserts an all-to-all of chunks of ``x`` and the local reduction of the received chunks. Returns the reduced
        chunk of this rank.
        """
        ranks, shape = at.group.ranks, value(x).shape
        rows = shape[0] // ranks
        sizes = [rows] * ranks  # chunk i goes to rank i; from each rank comes its term of this rank's chunk
        started = at.start(c10d.all_to_all_single.default, x, sizes, sizes, at.group.name)
        terms = at.rest(c10d.wait_tensor.default, started)
        return at.reduced(at.rest(aten.reshape.default, terms, [ranks, rows, *shape[1:]]))


class ExchangedGather(_Exchanged):
    """All-gather as an all-to-all that sends one copy of the shard to each rank."""

    kind = "all_gather"

    def spell(self, x: fx.Node, at: Spelling) -> fx.Node:
        """Inserts one copy of the shard ``x`` per rank and an all-to-all of the copies. Returns its wait, which gives
        the gathered tensor.
        """
        ranks, shape = at.group.ranks, value(x).shape
        rows, row_shape = (shape[0], shape[1:]) if shape else (1, ())  # a tensor without dims is gathered as one row
        copies = at.start(aten.expand.default, x, [ranks, *shape])
        copies = at.start(aten.clone.default, copies, memory_format=torch.contiguous_format)
        copies = at.start(aten.reshape.default, copies, [ranks * rows, *row_shape])
        sizes = [rows] * ranks  # each rank sends, and receives, one shard per rank
        exchanged = at.start(c10d.all_to_all_single.default, copies, sizes, sizes, at.group.name)
        return at.rest(c10d.wait_tensor.default, exchanged)


class TwoSteps(Algorithm):
    """All-reduce as a reduce-scatter of the flattened tensor and an all-gather of the shards."""

    kind = "all_reduce"

    def seconds(self, group: Group, x: Value) -> float:
        """Returns the predicted seconds of the reduce-scatter and the all-gather together; inf if the number of ranks
        does not divide the elements of ``x``.
        """
        elements = prod(x.shape)
        if elements % group.ranks:
            return inf
        flat = replace(x, shape=(elements,))
        piece = replace(x, shape=(elements // group.ranks,))  # what a rank has between the two
        scatter, gather = group.best("reduce_scatter", flat), group.best("all_gather", piece)
        return scatter.seconds(group, flat) + gather.seconds(group, piece)

    def spell(self, x: fx.Node, at: Spelling) -> fx.Node:
        """Inserts a reduce-scatter and an all-gather, each by its fastest algorithm; returns the reduced tensor."""
        shape = value(x).shape
        flat = at.start(aten.reshape.default, x, [prod(shape)])
        piece = at.group.best("reduce_scatter", value(flat)).spell(flat, at)
        # The gather starts where the reduce-scatter is waited for.
        whole = at.group.best("all_gather", value(piece)).spell(piece, at.behind())
        return at.rest(aten.reshape.default, whole, list(shape))


_KINDS = {
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.all_reduce.default: "all_reduce",
}

# On a tie the first is chosen.
ALGORITHMS: tuple[Algorithm, ...] = (*map(Native, _KINDS.values()), ExchangedScatter(), ExchangedGather(), TwoSteps())


@dataclass(frozen=True)
class Algorithms:
    """Replaces each native collective by the algorithm that is predicted to be fastest.

        %a = all_reduce(%x)             %a = reduce_scatter(%x.flat)
        %w = wait(%a)               ->  %b = all_gather(wait(%a))
                                        %w = wait(%b)

    Coalesced collectives stay. Nodes that start a collective stand where it stood, others before its wait.

    *Requires:* a local graph with fake values, in any order. *Ensures:* every value is as before, up to the order in
    which a reduction adds its terms.

    Args:
        mesh: the mesh, which gives the size of each process group.
        cost: a measured cost model; one that was not measured keeps all native.
        algorithms: the algorithms to choose from.
    """

    mesh: Mesh
    cost: CostModel
    algorithms: tuple[Algorithm, ...] = ALGORITHMS
    name = "algorithms"
    requires = ("partition",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        # Listed first, since an algorithm inserts collectives of these kinds, too.
        native = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in _KINDS]
        rewriter = GraphRewriter(gm.graph)
        changed = [node for node in native if self._replace(node, rewriter)]
        if changed:
            gm.graph.lint()
            gm.recompile()
        return gm

    def _replace(self, node: fx.Node, rewriter: GraphRewriter) -> bool:
        """Replaces ``node`` by its fastest algorithm; returns False if that is the native one, which stays."""
        arguments, kind = arguments_of(node), _KINDS[node.target]
        x: fx.Node = arguments["input"]
        _, ranks = group_of(node, self.mesh)
        group = Group(arguments["group_name"], ranks, self.cost, self.algorithms)
        best = group.best(kind, value(x))
        if isinstance(best, Native):
            return False
        (wait,) = node.users  # only its wait reads a collective
        result = best.spell(x, Spelling(node, wait, group, op=arguments.get("reduce_op", ""), rewriter=rewriter))
        rewriter.replace(wait, result, rename=True)  # the wait goes with it
        rewriter.graph.erase_node(node)
        return True
