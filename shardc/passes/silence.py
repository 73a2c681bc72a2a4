"""Silence: collectives replaced by local copies, to time what a step costs without its communication."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.graph import NameScope
from shardc.ir.tally import collective_kind

aten = torch.ops.aten


@dataclass(frozen=True)
class Silence:
    """Takes a scheduled half; each collective becomes a copy of its input, repeated or cut to the result's shape.

    The values are wrong: what comes out is for timing alone.

    Args:
        kinds: of collectives, None for all.
    """

    kinds: frozenset[str] | None = None
    name = "silence"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        names = NameScope.of(gm.graph)
        for node in list(gm.graph.nodes):
            if node.target is WAIT and not _started(node.args[0]):
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
            elif (kind := collective_kind(node)) is not None and (self.kinds is None or kind in self.kinds):
                _replace(gm.graph, node, names)
        gm.recompile()
        return gm


def _started(node: fx.Node) -> bool:
    """Whether ``node`` is the result of a collective that is still there."""
    return collective_kind(node.args[0] if node.target is getitem else node) is not None


def _replace(graph: fx.Graph, node: fx.Node, names: NameScope) -> None:
    given, made = node.args[0], node.meta["val"]
    with graph.inserting_before(node):
        if isinstance(made, Tensor):
            node.replace_all_uses_with(_copy(graph, node, given, made, names))
        else:
            copies = [_copy(graph, node, x, val, names) for x, val in zip(given, made, strict=True)]
            for user in list(node.users):
                assert user.target is getitem
                user.replace_all_uses_with(copies[user.args[1]])
                graph.erase_node(user)
    graph.erase_node(node)


def _copy(graph: fx.Graph, node: fx.Node, x: fx.Node, like: Tensor, names: NameScope) -> fx.Node:
    """``x`` as a tensor of its own, of the shape of ``like``."""
    have, want = x.meta["val"].numel(), like.numel()
    flat = _emit(graph, node, names, aten.reshape.default, x, [have])
    if want > have:
        flat = _emit(graph, node, names, aten.cat.default, [flat] * (want // have))
    elif want < have:
        flat = _emit(graph, node, names, aten.slice.Tensor, flat, 0, 0, want)
    shaped = _emit(graph, node, names, aten.reshape.default, flat, list(like.shape))
    return _emit(graph, node, names, aten.clone.default, shaped)


def _emit(graph: fx.Graph, node: fx.Node, names: NameScope, target: Any, *args: Any) -> fx.Node:
    made = graph.call_function(target, args)
    values = [x.meta["val"] for x in (args[0] if isinstance(args[0], list) else [args[0]])]
    with values[0].fake_mode:
        val = target(values if isinstance(args[0], list) else values[0], *args[1:])
    made.meta["val"] = val
    record = ir.info(node)
    value = ir.Value(val.dtype, tuple(val.shape))
    return ir.set_info(made, replace(record, name=names.fresh(f"{record.name}.silent"), value=value))
