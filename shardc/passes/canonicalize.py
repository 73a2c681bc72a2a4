"""Canonicalize: drop what does nothing or was done already, so that later passes see one form of each thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.op_traits import RESHAPES, TRANSPOSES
from shardc.ir.rewriter import GraphRewriter

aten = torch.ops.aten

_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)
_MOVES = TRANSPOSES | RESHAPES | {aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}

_CHECKS = (aten._assert_async.default, aten._assert_async.msg)


@dataclass(frozen=True)
class Canonicalize:
    """Drops identities, pairs of transposes, chains of views, repeated moves, checks of values and dead nodes.

    Of two equal moves of one value the first serves both, so that both are resharded once.

    Takes: a captured graph. Leaves alone: values, order, names. A node that becomes an alias of an output
    stays, since every output needs a node.
    """

    name = "canonicalize"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        made: dict[Any, fx.Node] = {}
        rewriter = GraphRewriter(gm.graph)
        for node in list(gm.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _CHECKS and not node.users:
                gm.graph.erase_node(node)
                continue
            same = _same_as(node)
            if same is None and node.target in _MOVES:
                same = made.setdefault((node.target, _frozen(node.args)), node)
                same = None if same is node else same
            if same is not None:
                rewriter.replace(node, same)
                continue
            if node.target in RESHAPES:
                node.target = aten.view.default
                source = node.args[0]
                if source.op == "call_function" and source.target in RESHAPES and len(source.users) == 1:
                    made.pop((source.target, _frozen(source.args)), None)
                    node.args = (source.args[0], *node.args[1:])
        gm.graph.eliminate_dead_code()
        return gm


def _frozen(arguments: Any) -> Any:
    return tuple(_frozen(a) for a in arguments) if isinstance(arguments, (list, tuple)) else arguments


def _same_as(node: fx.Node) -> fx.Node | None:
    """The node that ``node`` is equal to, or None."""
    target = node.target
    if target in _IDENTITIES:
        return node.args[0]
    if target in TRANSPOSES:
        source = node.args[0]
        if source.op == "call_function" and source.target in TRANSPOSES:
            before = _permutation(source)
            both = [before[d] for d in _permutation(node)]
            if both == sorted(both):
                return source.args[0]
        return None
    if target in RESHAPES or target is aten.expand.default:
        source = node.args[0]
        return source if ir.value(source).shape == ir.value(node).shape else None
    if target is aten._to_copy.default:
        source = node.args[0]
        keeps = set(node.kwargs) <= {"dtype", "device", "layout", "pin_memory"}
        same_device = "val" not in source.meta or source.meta["val"].device == node.meta["val"].device
        return source if keeps and same_device and ir.value(source) == ir.value(node) else None
    if target is aten.copy.default:  # into memory that nobody reads
        source = node.args[1]
        if not isinstance(source, fx.Node) or ir.value(source) != ir.value(node):
            return None
        return source if _lies_alike(source, node) else None
    return None


def _lies_alike(x: fx.Node, other: fx.Node) -> bool:
    """Whether two values of one shape, if they were traced, have the same strides: a kernel may rely on them."""
    return "val" not in x.meta or "val" not in other.meta or x.meta["val"].stride() == other.meta["val"].stride()


def _permutation(node: fx.Node) -> list[int]:
    rank = len(ir.value(node).shape)
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]
    a, b = (0, 1) if node.target is aten.t.default else (node.args[1], node.args[2])
    if rank > 1:
        order[a], order[b] = order[b], order[a]
    return order
