"""Decompose: reductions in pieces that travel under the product that makes them, gathers under the one that reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx, nn

from shardc.cost.hardware import Hardware
from shardc.cost.kernels import flops_of
from shardc.cost.pricing import Pricing
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.graph import NameScope
from shardc.ir.mesh import Mesh
from shardc.ir.tally import arguments_of, collective_kind, group_of, wire_bytes

aten = torch.ops.aten
PIECES = (2, 4, 8)
_PAYS = 0.95  # of the time whole: what is predicted is no closer than this
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_POINTWISE = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default, aten._to_copy.default, aten.clone.default,
}  # fmt: skip
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


@dataclass(frozen=True)
class Candidate:
    """A collective beside a product, and what was decided.

    Args:
        name, module, source: of the collective.
        pieces: in how many it is cut; 1 if it is not.
        reason: why.
    """

    name: str
    module: str
    source: str
    pieces: int
    reason: str


@dataclass(frozen=True)
class Decompose:
    """Cuts collectives of activations, and the matrix products beside them, along the product's features.

    A product whose result is reduced is computed in pieces of its columns, each of which is reduced while the next is
    computed. A gather whose result is contracted is one of pieces of its columns, each of which is contracted while the
    next one comes; what these contribute is added up. The features are whole on every rank, so all ranks do the same.

    Takes: a local joint graph. Leaves alone: what leads to a parameter's gradient, and gathers of parameters: the
    schedule hides those under other work.

    Args:
        cost: says what a message takes; None: nobody has, and everything is left whole unless ``pieces`` is a number.
        compute: says what a product takes.
        pieces: "auto": as many as take least time, if that is less than whole; a number: so many, wherever it can be.
    """

    mesh: Mesh
    cost: Pricing | None
    compute: Pricing
    pieces: int | str = "auto"
    report: Callable[[Candidate], None] | None = field(default=None, compare=False, repr=False)
    name = "decompose"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if self.pieces == 1 or (self.cost is None and self.pieces == "auto"):
            return gm
        kinds = [node for node in gm.graph.nodes if collective_kind(node) in _KINDS and len(node.users) == 1]
        names = NameScope.of(gm.graph) if kinds else NameScope()
        for node in kinds:
            (wait,) = node.users
            if wait.target is not WAIT or not _between_products(node, wait):
                continue
            make = _Gather if collective_kind(node) == "all_gather" else _Reduction
            cut = make(node, wait, names)
            count, reason = self._decided(cut)
            if self.report is not None:
                record = ir.info(node)
                self.report(Candidate(record.name, record.origin.module, record.origin.source, count, reason))
            if count > 1:
                cut.cut(count)
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        return gm

    def _decided(self, cut: _Cut) -> tuple[int, str]:
        """In how many pieces, and why."""
        if not cut.products:
            return 1, cut.stopped
        fitting = [n for n in (PIECES if self.pieces == "auto" else (int(self.pieces),)) if cut.size % n == 0]
        if not fitting:
            return 1, f"its {cut.size} features do not divide"
        if self.pieces != "auto":
            return fitting[0], "as the option says"
        assert self.cost is not None
        times = {n: self._seconds(cut, n) for n in (1, *fitting)}
        best = min(times, key=lambda n: times[n])
        best = best if times[best] < _PAYS * times[1] else 1
        said = f"{best} pieces take {1e6 * times[best]:,.0f} us, and whole it takes {1e6 * times[1]:,.0f} us"
        if best == 1:
            other = min(fitting, key=lambda n: times[n])
            said = f"whole it takes {1e6 * times[1]:,.0f} us, and {other} pieces {1e6 * times[other]:,.0f} us"
        return best, said

    def _seconds(self, cut: _Cut, count: int) -> float:
        """The time of product and collective in so many pieces, of which one waits for the other alone."""
        assert self.cost is not None
        axes, ranks = group_of(cut.node, self.mesh)
        kind = collective_kind(cut.node)
        assert kind is not None
        dtype = ir.value(cut.products[0]).dtype
        moved = sum(prod(ir.value(x).shape) * ir.value(x).itemsize for p in cut.products for x in p.all_input_nodes)
        operations = sum(map(flops_of, cut.products))
        computed = self.compute.compute_seconds(operations / count, moved / count, dtype)
        sent = self.cost.collective_seconds(kind, self.mesh, axes, wire_bytes(cut.node, kind, ranks) / count)
        busy = 0.0  # of a rank's own core where it sends: it starts messages, and is slower beside those on their way
        if isinstance(self.cost, Hardware):
            start = self.cost.start_seconds(ranks - 1)
            busy = start + self.cost.share * (sent - start)
        copied = 0.0 if count == 1 else self.compute.copy_seconds(2 * cut.joined_bytes(count))
        return computed + (count - 1) * max(computed + busy, sent) + sent + copied


def _between_products(node: fx.Node, wait: fx.Node) -> bool:
    """Whether a collective is of activations on their way: it depends on no parameter alone, and more is computed."""
    if collective_kind(node) == "all_gather":
        above = node
        while above.op == "call_function" and len(above.all_input_nodes) == 1:
            (above,) = above.all_input_nodes
        if above.op == "placeholder" and ir.role(above).kind == "param":
            return False
    seen, work = set(), list(wait.users)
    while work:
        user = work.pop()
        if flops_of(user):
            return True
        if user not in seen and user.op != "output":
            seen.add(user)
            work += user.users
    return False


class _Cut:
    """A collective with its products, which can be cut."""

    def __init__(self, node: fx.Node, wait: fx.Node, names: NameScope) -> None:
        self.node, self.wait, self.names = node, wait, names
        self.products: list[fx.Node] = []
        self.stopped = "no matrix product is beside it"
        self.source: fx.Node = arguments_of(node)["input"]
        shape = ir.value(self.source).shape
        self.size = shape[-1] if shape else 1
        if len(shape) > 1:
            self._find()
        else:  # ranks gather and scatter along the first dim
            self.stopped = "its features are what the ranks split"

    def _find(self) -> None:
        raise NotImplementedError

    def cut(self, count: int) -> None:
        raise NotImplementedError

    def joined_bytes(self, count: int) -> float:
        """Bytes that are copied, or added up, where pieces come together."""
        raise NotImplementedError

    def emit(self, before: fx.Node, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with before.graph.inserting_before(before):
            made = before.graph.call_function(target, args, kwargs)
        val = target(*fx.map_arg(args, lambda n: n.meta["val"]), **fx.map_arg(kwargs, lambda n: n.meta["val"]))
        made.meta["val"] = val
        short = getattr(target, "overloadpacket", target).__name__
        record = replace(ir.info(like), name=self.names.fresh(f"{ir.info(like).name}.{short}"), role=None)
        return ir.set_info(made, replace(record, value=ir.value_of(val)))

    def collective(self, before: fx.Node, x: fx.Node, number: int) -> fx.Node:
        """The same collective of ``x``, one of the pieces; not waited for."""
        if not x.meta["val"].is_contiguous():
            x = self.emit(before, self.node, aten.clone.default, x, memory_format=torch.contiguous_format)
        started = self.emit(before, self.node, self.node.target, x, *self.node.args[1:], **self.node.kwargs)
        started.meta[ir.PIECE] = number
        return started


class _Reduction(_Cut):
    """A product, or a sum of products, that is reduced."""

    def _find(self) -> None:
        work = [self.source]
        while work:
            node = work.pop()
            kind = self._kind(node)
            if kind == "product":
                self.products.append(node)
            elif kind is not None:
                work += [x for x in node.all_input_nodes if self._runs(x)]

    def _runs(self, x: fx.Node) -> bool:
        """Whether ``x`` has the features as its last dim."""
        return ir.is_tensor(x) and ir.value(x).shape[-1:] == (self.size,)

    def _kind(self, node: fx.Node) -> str | None:
        """How a piece of ``node`` is made of pieces; None: it is cut itself."""
        inside = node is self.source or len(node.users) == 1
        if node.op != "call_function" or not inside or not self._runs(node):
            return None
        if node.target in (aten.mm.default, aten.addmm.default):
            return "product"
        if node.target in _VIEWS:
            return "view" if self._runs(node.args[0]) else None
        if node.target is aten.permute.default:
            return "same" if _keeps_last(node.args[1]) else None
        return "same" if node.target in _POINTWISE else None

    def joined_bytes(self, count: int) -> float:
        return prod(ir.value(self.wait).shape) * ir.value(self.wait).itemsize

    def cut(self, count: int) -> None:
        started = []
        for number in range(count):
            low, high = (self.size * at // count for at in (number, number + 1))
            started.append(self.collective(self.node, self._piece(self.source, low, high, {}), number))
        pieces = [self.emit(self.wait, self.wait, WAIT, x) for x in started]
        whole = self.emit(self.wait, self.wait, aten.cat.default, pieces, -1)
        self.wait.replace_all_uses_with(whole)

    def _piece(self, node: fx.Node, low: int, high: int, made: dict[fx.Node, fx.Node]) -> fx.Node:
        if node not in made:
            made[node] = self._new_piece(node, low, high, made)
        return made[node]

    def _new_piece(self, node: fx.Node, low: int, high: int, made: dict[fx.Node, fx.Node]) -> fx.Node:
        kind = self._kind(node)

        def part(x: Any, dim: int = -1) -> Any:
            return self.emit(self.node, x, aten.slice.Tensor, x, dim % x.meta["val"].dim(), low, high)

        if kind is None:
            return part(node)
        if kind == "product":
            *bias, x, weight = node.args
            bias = [part(b) if self._runs(b) else b for b in bias]
            return self.emit(self.node, node, node.target, *bias, x, part(weight, 1), **node.kwargs)
        if kind == "view":
            shape = [*ir.value(node).shape[:-1], high - low]
            return self.emit(self.node, node, node.target, self._piece(node.args[0], low, high, made), shape)
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda x: self._piece(x, low, high, made) if self._runs(x) else x
        )
        return self.emit(self.node, node, node.target, *args, **kwargs)


class _Gather(_Cut):
    """A gather whose result is contracted by products."""

    def _find(self) -> None:
        self.moved: list[fx.Node] = []  # what only moves rows, in order
        work = [self.wait]
        while work:
            node = work.pop(0)
            for user in node.users:
                if user.target in _VIEWS and ir.value(user).shape[-1:] == (self.size,):
                    work.append(user)
                    self.moved.append(user)
                elif (
                    user.target is aten.permute.default
                    and user.args[1][-1] % len(user.args[1]) == len(user.args[1]) - 1
                ):
                    work.append(user)
                    self.moved.append(user)
                elif user.target is aten.mm.default and user.args[0] is node and user.args[1] is not node:
                    self.products.append(user)
        forward = [p for p in self.products if ir.info(p).origin.phase == ir.info(self.node).origin.phase]
        self.products = forward  # in the other half the whole is read

    def joined_bytes(self, count: int) -> float:
        made = sum(prod(ir.value(p).shape) * ir.value(p).itemsize for p in self.products)
        return (count - 1) * made + prod(ir.value(self.wait).shape) * ir.value(self.wait).itemsize

    def cut(self, count: int) -> None:
        bounds = [(self.size * at // count, self.size * (at + 1) // count) for at in range(count)]
        last = len(ir.value(self.source).shape) - 1
        parts = [self.emit(self.node, self.source, aten.slice.Tensor, self.source, last, *b) for b in bounds]
        started = [self.collective(self.node, x, number) for number, x in enumerate(parts)]
        each: list[dict[fx.Node, fx.Node]] = []
        order = {node: at for at, node in enumerate(self.node.graph.nodes)}
        readers = [user for node in (self.wait, *self.moved) for user in node.users if user not in self.moved]
        first = min(readers, key=order.__getitem__)
        for (low, high), x in zip(bounds, started, strict=True):
            made = {self.wait: self.emit(first, self.wait, WAIT, x)}
            for node in self.moved:
                shape = [*ir.value(node).shape[:-1], high - low] if node.target in _VIEWS else node.args[1]
                made[node] = self.emit(first, node, node.target, made[node.args[0]], shape)
            each.append(made)
        for product in self.products:
            total = None
            for (low, high), made in zip(bounds, each, strict=True):
                weight = self.emit(product, product, aten.slice.Tensor, product.args[1], 0, low, high)
                x = made[product.args[0]]
                if total is None:
                    total = self.emit(product, product, aten.mm.default, x, weight)
                else:
                    total = self.emit(product, product, aten.addmm.default, total, x, weight)
            assert total is not None
            product.replace_all_uses_with(total)
            product.graph.erase_node(product)
        for node in (*reversed(self.moved), self.wait):
            if node.users and not all(user in self.moved for user in node.users):
                rest = [user for user in node.users if user not in self.moved]
                pieces = [made[node] for made in each]
                whole = self.emit(min(rest, key=order.__getitem__), node, aten.cat.default, pieces, -1)
                for user in rest:
                    user.replace_input_with(node, whole)


def _keeps_last(dims: Sequence[int]) -> bool:
    """Whether the last dim stays the last."""
    return dims[-1] % len(dims) == len(dims) - 1


def candidates(graph: fx.Graph, found: Decompose) -> list[Candidate]:
    """What ``found`` says of each collective of activations of a graph that it takes; the graph stays as it is."""
    said: list[Candidate] = []
    replace(found, report=said.append)(fx.GraphModule(nn.Module(), ir.copied(graph)))
    return said
