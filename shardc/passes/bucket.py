"""Bucket: several collectives of one kind, group, dtype and reduce op, made one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.graph import NameScope, Value
from shardc.ir.order import places, reorder

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

_COALESCED = {
    c10d.all_gather_into_tensor.default: c10d.all_gather_into_tensor_coalesced.default,
    c10d.all_reduce.default: c10d.all_reduce_coalesced.default,
}
_SCATTER = c10d.reduce_scatter_tensor.default


@dataclass(frozen=True)
class Bucket:
    """Fuses collectives where dependences allow, by size and by where their values are needed.

    Takes: one half (forward, backward or inference) of a local graph. Gathers and all-reduces become one
    coalesced collective, which reads its inputs where they are; reduce-scatters share one wire buffer. A
    bucket stands after the last of its inputs and before the first use of its results, so no use waits for
    more than the bucket itself. Guarantees: values are the same, and so is the order of what is not fused.

    Args:
        size: bytes of a bucket's larger side, per rank; -1 for no limit, 0 for no buckets.
        exchange: spell a reduce-scatter as an all-to-all and a local sum (gloo's own is a whole all-reduce).
    """

    size: int
    exchange: bool = False
    name = "bucket"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        wished = places(gm.graph)
        names = NameScope.of(gm.graph)
        for bucket in self._buckets(gm.graph, wished):
            fuse = _Fusion(gm.graph, bucket.members, names, wished, bucket.at)
            if bucket.members[0].target is _SCATTER:
                if len(bucket.members) > 1 or self.exchange:
                    fuse.scatter(self.exchange)
            elif len(bucket.members) > 1:
                fuse.coalesce()
        reorder(gm.graph, wished)
        gm.recompile()
        return gm

    def _buckets(self, graph: fx.Graph, order: dict[fx.Node, float]) -> list[_Open]:
        """The collectives in graph order, those that may be one together."""
        every: list[_Open] = []
        last: dict[Any, _Open] = {}
        made_by: dict[fx.Node, _Open] = {}
        for node in graph.nodes:
            if node.op != "call_function" or not (node.target in _COALESCED or node.target is _SCATTER):
                continue
            key = (node.target, ir.value(node).dtype, node.args[1:])
            ready = -1.0
            for x in node.all_input_nodes:
                if x in made_by:
                    # What comes straight out of a bucket is there when that is, which is fixed from here on.
                    made_by[x].closed = True
                    ready = max(ready, made_by[x].at)
                elif x.op != "placeholder":
                    ready = max(ready, order[x])
            use = min((order[user] for wait in node.users for user in wait.users), default=float(len(order)))
            one = _Open([node], order[node], ready, use, _wire_size(node))
            if key in last and last[key].takes(one, self.size):
                last[key].add(one)
            else:
                last[key] = one
                every.append(one)
            made_by.update(dict.fromkeys(node.users, last[key]))
        return every


@dataclass
class _Open:
    """A bucket that may still grow: its first member, last input and first use, as places in the graph."""

    members: list[fx.Node]
    first: float
    ready: float
    use: float
    size: int
    closed: bool = False

    @property
    def at(self) -> float:
        """Where the bucket stands: at its first member, or behind its last input."""
        return max(self.first, self.ready + 0.5)

    def takes(self, other: _Open, limit: int) -> bool:
        """Whether ``other`` fits: there stays a place after all inputs and before all uses."""
        fits = limit < 0 or self.size + other.size <= limit
        place = max(self.first, self.ready + 0.5, other.ready + 0.5)
        return limit != 0 and not self.closed and fits and place < min(self.use, other.use)

    def add(self, other: _Open) -> None:
        self.members += other.members
        self.ready, self.use = max(self.ready, other.ready), min(self.use, other.use)
        self.size += other.size


def _wire_size(node: fx.Node) -> int:
    """Bytes of the collective's larger side."""
    return max(prod(v.shape) * v.itemsize for v in (ir.value(node), ir.value(node.args[0])))


@dataclass
class _Fusion:
    """The members of one bucket, and where what replaces them should stand."""

    graph: fx.Graph
    members: Sequence[fx.Node]
    names: NameScope
    wished: dict[fx.Node, float]
    at: float

    def coalesce(self) -> None:
        """One coalesced collective; each member's wait then is on its own result."""
        first = self.members[0]
        record = ir.info(first)
        values = tuple(ir.value(node) for node in self.members)
        args = ([node.args[0] for node in self.members], *first.args[1:])
        bucket = self._insert(_COALESCED[first.target], args)
        bucket.meta["val"] = [node.meta["val"] for node in self.members]
        ir.set_info(bucket, replace(record, name=self.names.fresh(f"{record.name}.bucket"), value=values))
        for at, node in enumerate(self.members):
            part = self._insert(getitem, (bucket, at))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
            for wait in part.users:
                self.wished[wait] = max(self.wished[wait], self.at)
            self._erase(node)

    def scatter(self, exchange: bool) -> None:
        """One wire buffer of all terms, rank by rank; one collective; each member's part of the result."""
        _, op, ranks, group = self.members[0].args
        sizes = [prod(ir.value(node).shape) for node in self.members]
        total = sum(sizes)
        terms = [
            self._emit(aten.reshape.default, (node.args[0], [ranks, size]), (ranks, size), "terms")
            for node, size in zip(self.members, sizes, strict=True)
        ]
        wire = terms[0] if len(terms) == 1 else self._emit(aten.cat.default, (terms, 1), (ranks, total), "wire")
        flat = self._emit(aten.reshape.default, (wire, [ranks * total]), (ranks * total,), "flat")
        if exchange:
            parts = [total] * ranks
            sent = self._emit(c10d.all_to_all_single.default, (flat, parts, parts, group), (ranks * total,), "sent")
            came = self._emit(c10d.wait_tensor.default, (sent,), (ranks * total,), "came")
            each = self._emit(aten.reshape.default, (came, [ranks, total]), (ranks, total), "each")
            done = self._emit(aten.sum.dim_IntList, (each, [0]), (total,), "sum")
            if op == "avg":
                done = self._emit(aten.div.Tensor, (done, ranks), (total,), "mean")
        else:
            started = self._emit(_SCATTER, (flat, op, ranks, group), (total,), "bucket")
            done = self._emit(c10d.wait_tensor.default, (started,), (total,), "done")
        offset = 0
        for node, size in zip(self.members, sizes, strict=True):
            self._hand_over(node, self._part(done, offset, size, total))
            offset += size

    def _part(self, done: fx.Node, offset: int, size: int, total: int) -> fx.Node:
        if size == total:
            return done
        return self._emit(aten.slice.Tensor, (done, 0, offset, offset + size), (size,), "part")

    def _hand_over(self, node: fx.Node, piece: fx.Node) -> None:
        """``piece`` in the shape of the scatter ``node``, in place of its wait."""
        shape = ir.value(node).shape
        result = self._emit(aten.reshape.default, (piece, list(shape)), shape, "result")
        record = ir.info(next(iter(node.users)))
        for wait in list(node.users):
            wait.replace_all_uses_with(result)
            self._erase(wait)
        self._erase(node)
        ir.set_info(result, record)

    def _emit(self, target: Any, args: tuple[Any, ...], shape: tuple[int, ...], suffix: str) -> fx.Node:
        first = self.members[0]
        node = self._insert(target, args)
        node.meta["val"] = first.meta["val"].new_empty(shape)
        record = ir.info(first)
        name = self.names.fresh(f"{record.name}.{suffix}")
        return ir.set_info(node, replace(record, name=name, value=Value(ir.value(first).dtype, shape)))

    def _insert(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        with self.graph.inserting_before(ir.output_node(self.graph)):
            node = self.graph.call_function(target, args)
        self.wished[node] = self.at
        return node

    def _erase(self, node: fx.Node) -> None:
        del self.wished[node]
        self.graph.erase_node(node)
