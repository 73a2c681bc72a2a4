"""Canonicalize: removes identities, dead ops and checks of values; merges chains of views, and equal views and
transposes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.op_traits import CAST, RESHAPES, TRANSPOSES
from shardc.ir.rewriter import GraphRewriter, erase_dead_code

aten = torch.ops.aten

_MOVES = TRANSPOSES | RESHAPES | {aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
_CHECKS = (aten._assert_async.default, aten._assert_async.msg)


@dataclass(frozen=True)
class Canonicalize:
    """Removes dead ops, checks of values, ops that change nothing and pairs of transposes; merges chains of views, and
    equal views.

        %a: f32[4,6] = t(%x)                        %c: f32[24] = view(%x, [24])
        %b: f32[6,4] = t(%a)                  ->
        %c: f32[24] = reshape(%b, [24])

    Two equal moves (views, transposes) of one value become one, so that both results are resharded once.

    *Requires:* a captured graph. *Ensures:* values, order and names are as before. A node that becomes an alias of an
    output stays, since every output needs a node.
    """

    name = "canonicalize"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        moves: dict[tuple[object, object], fx.Node] = {}  # (op, arguments) -> the first move of these
        rewriter = GraphRewriter(gm.graph)
        for node in list(gm.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _CHECKS and not node.users:
                gm.graph.erase_node(node)
                continue
            same = EQUALS[node.target](node) if node.target in EQUALS else None  # an earlier value that it is equal to
            if same is None and node.target in _MOVES:
                first = moves.setdefault((node.target, _frozen(node.args)), node)
                same = None if first is node else first
            if same is not None:
                rewriter.replace(node, same)
            elif node.target in RESHAPES:
                # Reshapes and views are all views in this graph. One of another one reads that one's source.
                node.target = aten.view.default
                source = node.args[0]
                if source.op == "call_function" and source.target in RESHAPES and len(source.users) == 1:
                    # Nothing reads the source any more; a later view that is equal to it would keep it alive.
                    moves.pop((source.target, _frozen(source.args)), None)
                    node.args = (source.args[0], *node.args[1:])
        erase_dead_code(gm.graph)
        return gm


def _frozen(arguments: object) -> object:
    """Returns ``arguments`` with lists as tuples, so that they can be hashed."""
    return tuple(_frozen(a) for a in arguments) if isinstance(arguments, (list, tuple)) else arguments


# --- functions that return the earlier value to which an op's result is equal, or None


def _operand(node: fx.Node) -> fx.Node | None:
    """Returns the operand of ``node``, an op that returns it unchanged, such as ``detach`` or ``alias``."""
    return node.args[0]


def _before_transposes(node: fx.Node) -> fx.Node | None:
    """Returns the operand of two transposes in a row that undo each other (``node`` is the second one); None if they do
    not.
    """
    source: Any = node.args[0]
    if source.op != "call_function" or source.target not in TRANSPOSES:
        return None
    first = permutation(source)
    both = [first[dim] for dim in permutation(node)]  # the order of dims after both
    return source.args[0] if both == sorted(both) else None


def _selected(node: fx.Node) -> fx.Node | None:
    """Returns the value that the ``select`` ``node`` reads, if a ``select_scatter`` wrote it at just this index; else
    None.

    Makes ``node`` read the source of each ``select_scatter`` that wrote at another index.
    """
    # select(x, dim, index); select_scatter(x, written, dim, index).
    rank, dim, at = len(ir.value(node).shape) + 1, node.args[1], node.args[2]
    size = ir.value(node.args[0]).shape[dim]
    while (source := node.args[0]).target is aten.select_scatter.default and source.args[2] % rank == dim % rank:
        if source.args[3] % size == at % size:
            # A value of another dtype was cast when it was written.
            return source.args[1] if ir.value(source.args[1]) == ir.value(node) else None
        node.args = (source.args[0], *node.args[1:])
    return None


def _of_same_shape(node: fx.Node) -> fx.Node | None:
    """Returns the operand of a view or expand whose result has the operand's shape; else None."""
    source: Any = node.args[0]
    return source if ir.value(source).shape == ir.value(node).shape else None


def _of_same_type(node: fx.Node) -> fx.Node | None:
    """Returns the operand of a cast whose result has the operand's dtype and device; else None."""
    source: Any = node.args[0]
    unchanged = set(node.kwargs) <= {"dtype", "device", "layout", "pin_memory"}  # not the memory format
    same_device = "val" not in source.meta or source.meta["val"].device == node.meta["val"].device
    return source if unchanged and same_device and ir.value(source) == ir.value(node) else None


def _copied(node: fx.Node) -> fx.Node | None:
    """Returns the source of the ``copy`` ``node`` if the result has the type and strides of the source, so that the
    source can take the place of ``node``; else None.
    """
    source = node.args[1]
    if not isinstance(source, fx.Node) or ir.value(source) != ir.value(node):
        return None
    strides = [x.meta["val"].stride() for x in (source, node) if "val" in x.meta]
    return source if len(strides) < 2 or strides[0] == strides[1] else None


EQUALS: dict[object, Callable[[fx.Node], fx.Node | None]] = {
    **dict.fromkeys(
        (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default), _operand
    ),
    **dict.fromkeys(TRANSPOSES, _before_transposes),
    **dict.fromkeys((*RESHAPES, aten.expand.default), _of_same_shape),
    CAST: _of_same_type,
    aten.select.int: _selected,
    aten.copy.default: _copied,
}


def permutation(node: fx.Node) -> list[int]:
    """Returns the order of dims of a transpose: for each dim of its result, the dim of the operand."""
    rank = len(ir.value(node).shape)
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]
    a, b = (0, 1) if node.target is aten.t.default else (node.args[1], node.args[2])
    if rank > 1:
        order[a], order[b] = order[b], order[a]
    return order
