"""The reduction of gradients that were summed up without it, as a graph of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.graph import Info, NameScope, Origin, Role, Value
from shardc.ir.layout import Layout


@dataclass(frozen=True)
class Sum:
    """A local sum of gradients of one parameter.

    Args:
        name: the parameter.
        layout: how it lies on the mesh, at the stored (padded) shape: some of its sums are pending.
        dtype: what it was summed in.
    """

    name: str
    layout: Layout
    dtype: torch.dtype


def deferred_reduction(
    sums: Sequence[Sum], storages: Mapping[str, Layout], dtypes: Mapping[str, torch.dtype], fake_mode: Any,
    device: torch.device,
) -> fx.GraphModule:  # fmt: skip
    """The graph that takes ``sums`` and gives each parameter's gradient, reduced to its storage layout.

    Args:
        storages: storage layout of each parameter.
        dtypes: what each gradient is cast to behind its reduction.

    Returns:
        A graph as after ``reshard``: a placeholder (role "accumulated") for each sum, an output for each parameter.
    """
    graph, names = fx.Graph(), NameScope()
    inputs = [_placeholder(graph, names, each, at, fake_mode, device) for at, each in enumerate(sums)]
    grads: dict[str, fx.Node] = {}
    for each, node in zip(sums, inputs, strict=True):
        storage = storages[each.name]
        if each.layout != storage:
            record = Info(names.fresh(f"d.{each.name}.reduced"), Value(each.dtype, storage.shape, storage), _ORIGIN)
            node = ir.set_info(graph.call_function(ops.reshard, (node,)), record)
        if dtypes[each.name] != each.dtype:
            value = Value(dtypes[each.name], storage.shape, storage)
            record = Info(names.fresh(f"d.{each.name}.stored"), value, _ORIGIN, needs=(storage,))
            cast = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtypes[each.name]})
            node = ir.set_info(cast, record)
        if each.name in grads:  # summed in two layouts
            record = Info(names.fresh(f"d.{each.name}.sum"), ir.value(node), _ORIGIN, needs=(storage, storage))
            node = ir.set_info(graph.call_function(torch.ops.aten.add.Tensor, (grads[each.name], node)), record)
        grads[each.name] = node
    output = graph.output(tuple(grads.values()))
    output.meta[ir.ROLES] = tuple(Role("grad", name, layout=storages[name]) for name in grads)
    return fx.GraphModule({}, graph)


_ORIGIN = Origin(phase="backward", cause="gradients summed without reduction")


def _placeholder(
    graph: fx.Graph, names: NameScope, each: Sum, at: int, fake_mode: Any, device: torch.device
) -> fx.Node:
    node = graph.placeholder(f"sum_{at}")
    with fake_mode:
        node.meta["val"] = torch.empty(each.layout.shape, dtype=each.dtype, device=device)
    role = Role("accumulated", each.name, at)
    value = Value(each.dtype, each.layout.shape, each.layout)
    return ir.set_info(node, Info(names.fresh(f"d.{each.name}.accumulated"), value, _ORIGIN, role))
