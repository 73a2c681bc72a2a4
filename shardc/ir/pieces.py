"""Tensors in pieces: how a cut of what an op makes is one of what it takes, for ops that do the same to each piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from shardc.ir.comm import WAIT
from shardc.ir.graph import is_tensor, value
from shardc.ir.tally import arguments_of, collective_kind

aten = torch.ops.aten
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
_SUMS = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default}


@dataclass(frozen=True)
class Cut:
    """A dim as [outer, count, inner]: each piece has one of the ``count``.

    Args:
        dim: which, from the front.
        outer, count, inner: what the dim's size is the product of.
    """

    dim: int
    outer: int
    count: int
    inner: int

    def shape(self, whole: Sequence[int]) -> list[int]:
        """Of a piece of a tensor of shape ``whole``."""
        return [n // self.count if d == self.dim else n for d, n in enumerate(whole)]

    def split(self, shape: Sequence[int]) -> list[int]:
        """The shape ``shape``, of the whole or of a piece, with what is outside of the cut as a dim of its own."""
        return [*shape[: self.dim], self.outer, shape[self.dim] // self.outer, *shape[self.dim + 1 :]]


Operands = dict[fx.Node, Cut | None]


def viewed(cut: Cut, shape: Sequence[int], made: Sequence[int]) -> Cut | None:
    """``cut`` of a tensor of ``shape``, as it is once that is seen as ``made``; None where it spans dims there."""
    inside = cut.inner * prod(shape[cut.dim + 1 :])
    behind = 1
    for dim in reversed(range(len(made))):
        outer, rest = divmod(made[dim] * behind, inside * cut.count)
        if behind * made[dim] > inside:
            inner, odd = divmod(inside, behind)
            return Cut(dim, outer, cut.count, inner) if not rest and not odd and outer else None
        behind *= made[dim]
    return None


def operands(node: fx.Node, cut: Cut) -> Operands | None:
    """How each operand of ``node`` is cut, None where all pieces take it whole, if pieces of its result are made so.

    Returns None where they are not made of pieces alone.
    """
    if node.op != "call_function" or not is_tensor(node) or not all(map(is_tensor, node.all_input_nodes)):
        return None
    target, shape = node.target, value(node).shape
    first = node.all_input_nodes[0] if node.all_input_nodes else None
    if first is None:
        return None
    given = value(first).shape
    kind = collective_kind(node)
    if kind is not None:
        ranks = arguments_of(node).get("group_size", 1) if cut.dim == 0 else 1
        if kind == "all_gather":
            outer, rest = divmod(cut.outer, ranks)  # what is gathered has no ranks
            return None if rest else {first: replace(cut, outer=outer)}
        scattered = replace(cut, outer=cut.outer * ranks)
        return {"reduce_scatter": {first: scattered}, "all_reduce": {first: cut}}.get(kind)
    if target is WAIT:
        return {first: cut}
    if target in VIEWS:
        seen = viewed(cut, shape, given)
        return None if seen is None else {first: seen}
    if target in PRODUCTS:
        return _of_product(node, cut)
    if target is aten.permute.default:
        return {first: replace(cut, dim=node.args[1][cut.dim] % len(given))}
    if target in (aten.t.default, aten.transpose.int):
        swapped = [dim % len(given) for dim in node.args[1:]] or [0, len(given) - 1]
        return {first: replace(cut, dim=sum(swapped) - cut.dim if cut.dim in swapped else cut.dim)}
    if target in _SUMS:
        gone = {dim % len(given) for dim in node.args[1]}
        kept = len(given) == len(shape)
        dim = cut.dim if kept else [dim for dim in range(len(given)) if dim not in gone][cut.dim]
        return None if dim in gone else {first: replace(cut, dim=dim)}
    if target is aten.expand.default or target is aten._to_copy.default or _pointwise(target):
        return {x: _broadcast(cut, value(x).shape, shape) for x in node.all_input_nodes}
    return None


def results(node: fx.Node, x: fx.Node, cut: Cut) -> Iterator[Cut]:
    """The cuts of what ``node`` makes that may come of one of its operand ``x``; `operands` says which do."""
    if node.target in VIEWS:
        seen = viewed(cut, value(x).shape, value(node).shape)
        yield from () if seen is None else (seen,)
    elif node.op == "call_function" and is_tensor(node):
        ranks = arguments_of(node).get("group_size", 1) if collective_kind(node) else 1
        for outer in dict.fromkeys((cut.outer, cut.outer * ranks, cut.outer // ranks)):
            for dim, size in enumerate(value(node).shape):
                if size == outer * cut.count * cut.inner:
                    yield Cut(dim, outer, cut.count, cut.inner)


def through(node: fx.Node, read: dict[fx.Node, Cut]) -> Cut | None:
    """How the result of ``node`` is cut if some operands are cut as ``read`` says; None: it is not made of pieces."""
    x, cut = next(iter(read.items()))
    for made in results(node, x, cut):
        need = operands(node, made)
        if need is not None and all(need.get(x) == cut for x, cut in read.items()):
            return made
    return None


def _pointwise(target: object) -> bool:
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _broadcast(cut: Cut, shape: Sequence[int], made: Sequence[int]) -> Cut | None:
    dim = cut.dim + len(shape) - len(made)
    return replace(cut, dim=dim) if dim >= 0 and shape[dim] == made[cut.dim] else None


def _of_product(node: fx.Node, cut: Cut) -> Operands | None:
    *bias, x, weight = node.args
    if cut.dim != 0 or x is weight:
        return None
    found: Operands = {x: cut, weight: cut if node.target is aten.bmm.default else None}
    for one in bias:
        if one in found:
            return None
        found[one] = _broadcast(cut, value(one).shape, value(node).shape)
    return found
