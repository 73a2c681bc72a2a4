"""Spells the collectives of a local graph by the algorithm that the cost model finds fastest.

    reduce_scatter   natively, or an all-to-all whose pieces each rank reduces by itself
    all_gather       natively, or an all-to-all of as many copies as there are ranks
    all_reduce       natively, or a reduce-scatter and an all-gather, each by its fastest algorithm

All move the same bytes. Which is fastest is a matter of the backend: gloo runs a reduce-scatter as a
whole all-reduce, so that there the all-to-all wins. A cost model that was not measured on the backend
(`python -m shardc calibrate`) has no opinion, and all stay native.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from shardc.cost.model import CostModel
from shardc.ir.graph import NameScope, Value, info, set_info, value
from shardc.ir.mesh import Mesh
from shardc.ir.tally import arguments_of, group_of, wire_elements

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

REDUCE: dict[str, Callable[[Any, torch.dtype], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "sum": lambda x, dtype: (aten.sum.dim_IntList, (x, [0]), {"dtype": dtype}),
    "avg": lambda x, dtype: (aten.mean.dim, (x, [0]), {}),
    "max": lambda x, dtype: (aten.amax.default, (x, [0]), {}),
    "min": lambda x, dtype: (aten.amin.default, (x, [0]), {}),
    "product": lambda x, dtype: (aten.prod.dim_int, (x, 0), {"dtype": dtype}),
}


@dataclass(frozen=True)
class Algorithms:
    """Replaces native collectives where another algorithm is faster.

    Takes a local graph with fake values, in any order; leaves coalesced collectives alone. What starts a
    collective stays where it was, what its result needs comes after the wait.

    Args:
        mesh: says how many ranks a group has.
        cost: a measured cost model.
    """

    mesh: Mesh
    cost: CostModel
    name = "algorithms"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        native = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in _TARGETS]
        names = NameScope.of(gm.graph) if native else NameScope()
        changed = False
        for node in native:
            kind, spelled = _TARGETS[node.target]
            start = _Start(node, self.mesh, self.cost, names)
            if start.gains(kind):
                spelled(start)
                changed = True
        if changed:
            gm.graph.lint()
            gm.recompile()
        return gm


class _Start:
    """A node that starts a native collective, and what may stand in its place."""

    def __init__(self, node: fx.Node, mesh: Mesh, cost: CostModel, names: NameScope) -> None:
        self.node, self.cost, self.names = node, cost, names
        self.arguments = arguments_of(node)
        self.x: fx.Node = self.arguments["input"]
        self.group: str = self.arguments["group_name"]
        self.ranks = group_of(node, mesh)[1]
        (self.wait,) = node.users

    def gains(self, kind: str, shrink: int = 1) -> bool:
        """Whether the other algorithm for ``kind``, of a ``shrink``-th of the tensor, is faster than the native one."""
        held = prod(value(self.x).shape) // shrink
        if self.ranks == 1 or (kind == "all_reduce" and held % self.ranks):
            return False
        wire = wire_elements(kind, self.ranks, held) * value(self.x).itemsize
        return self.cost.other_seconds(kind, self.ranks, wire) < self.cost.seconds(kind, self.ranks, wire)

    def emit(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node in front of ``before``, recorded as what it stands beside."""
        graph = before.graph
        with graph.inserting_before(before):
            made = graph.call_function(target, args, kwargs)
        made.meta = dict(before.meta)
        made.meta["val"] = target(*_vals(args), **_vals(kwargs))
        val = made.meta["val"]
        name = self.names.fresh(f"{info(before).name}.{target.overloadpacket.__name__}")
        return set_info(made, replace(info(before), name=name, value=Value(val.dtype, tuple(val.shape))))

    def finish(self, result: fx.Node) -> None:
        """``result`` takes the place, and the name, of what was waited for."""
        set_info(result, info(self.wait))
        self.wait.replace_all_uses_with(result)
        self.node.graph.erase_node(self.wait)
        self.node.graph.erase_node(self.node)

    # --- algorithms: each is a start in front of `node` and the rest in front of `wait`

    def scatter(self, x: fx.Node, op: str) -> fx.Node:
        """The reduced piece of ``x``, whose leading dim the ranks divide."""
        shape = value(x).shape
        each = [shape[0] // self.ranks] * self.ranks
        pieces = self.emit(self.node, c10d.all_to_all_single.default, x, each, each, self.group)
        pieces = self.emit(self.wait, c10d.wait_tensor.default, pieces)
        pieces = self.emit(self.wait, aten.reshape.default, pieces, [self.ranks, each[0], *shape[1:]])
        target, args, kwargs = REDUCE[op](pieces, value(x).dtype)
        return self.emit(self.wait, target, *args, **kwargs)

    def gather(self, x: fx.Node, at: fx.Node) -> fx.Node:
        """``x`` of every rank, started in front of ``at`` and not yet waited for."""
        shape = value(x).shape
        lead, rest = (shape[0], shape[1:]) if shape else (1, ())
        x = self.emit(at, aten.expand.default, x, [self.ranks, *shape])
        x = self.emit(at, aten.clone.default, x, memory_format=torch.contiguous_format)
        x = self.emit(at, aten.reshape.default, x, [self.ranks * lead, *rest])
        return self.emit(at, c10d.all_to_all_single.default, x, [lead] * self.ranks, [lead] * self.ranks, self.group)


def _reduce_scatter(start: _Start) -> None:
    start.finish(start.scatter(start.x, start.arguments["reduce_op"]))


def _all_gather(start: _Start) -> None:
    start.finish(start.emit(start.wait, c10d.wait_tensor.default, start.gather(start.x, start.node)))


def _all_reduce(start: _Start) -> None:
    shape, op = value(start.x).shape, start.arguments["reduce_op"]
    flat = start.emit(start.node, aten.reshape.default, start.x, [prod(shape)])
    if start.gains("reduce_scatter"):
        piece = start.scatter(flat, op)
    else:
        piece = start.emit(start.node, c10d.reduce_scatter_tensor.default, flat, op, start.ranks, start.group)
        piece = start.emit(start.wait, c10d.wait_tensor.default, piece)
    if start.gains("all_gather", start.ranks):
        whole = start.gather(piece, start.wait)
    else:
        whole = start.emit(start.wait, c10d.all_gather_into_tensor.default, piece, start.ranks, start.group)
    whole = start.emit(start.wait, c10d.wait_tensor.default, whole)
    start.finish(start.emit(start.wait, aten.reshape.default, whole, list(shape)))


def _vals(arguments: Any) -> Any:
    return fx.map_arg(arguments, lambda node: node.meta["val"])


_TARGETS: dict[Any, tuple[str, Callable[[_Start], None]]] = {
    c10d.reduce_scatter_tensor.default: ("reduce_scatter", _reduce_scatter),
    c10d.all_gather_into_tensor.default: ("all_gather", _all_gather),
    c10d.all_reduce.default: ("all_reduce", _all_reduce),
}
