"""Reduce accumulated: builds the graph that reduces gradients accumulated without reduction (``no_sync``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from shardc._compat import FakeTensorMode
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.graph import Info, Origin, Role, Value
from shardc.ir.layout import Layout
from shardc.ir.rewriter import GraphRewriter


@dataclass(frozen=True)
class Sum:
    """An accumulator: the sum, on each rank, of gradients of one parameter that are not yet reduced between ranks.

    Args:
        name: the parameter.
        layout: the accumulator's layout, with pending sums over the axes to reduce.
        dtype: its dtype.
    """

    name: str
    layout: Layout
    dtype: torch.dtype


def deferred_reduction(
    sums: Sequence[Sum], storages: Mapping[str, Layout], dtypes: Mapping[str, torch.dtype], fake_mode: FakeTensorMode,
    device: torch.device,
) -> fx.GraphModule:  # fmt: skip
    """Returns a graph that reduces accumulated gradients between ranks. Its inputs are the accumulators ``sums``, its
    outputs the reduced gradient of each parameter.

    It is a graph as after ``reshard``: a placeholder (role "accumulated") for each sum, an output for each parameter.

    Args:
        sums: the accumulators; a parameter may have several, of different layouts.
        storages: parameter -> its storage layout, in which its gradient is returned.
        dtypes: parameter -> the dtype that its gradient is cast to after the reduction.
        fake_mode, device: mode and device of fake values.
    """
    graph = fx.Graph()
    rewriter = GraphRewriter(graph)
    inputs = [_placeholder(rewriter, local_sum, at, fake_mode, device) for at, local_sum in enumerate(sums)]
    grads: dict[str, fx.Node] = {}  # parameter -> its gradient so far
    for local_sum, node in zip(sums, inputs, strict=True):
        name, storage, dtype = local_sum.name, storages[local_sum.name], dtypes[local_sum.name]
        record = Info(f"d.{name}", None, _ORIGIN)
        # Types of the gradient: reduced, still in the accumulator's dtype, and then cast.
        reduced = Value(local_sum.dtype, storage.shape, storage)
        stored = replace(reduced, dtype=dtype)
        if local_sum.layout != storage:
            # From pending sums to the storage layout: a later pass writes this as a reduce-scatter or an all-reduce.
            node = rewriter.end(record, "reduced").typed(reduced, ops.reshard, node)
        if dtype != local_sum.dtype:
            node = rewriter.end(record, "stored").typed(stored, torch.ops.aten._to_copy.default, node, dtype=dtype)
        if name in grads:  # accumulated in two layouts
            node = rewriter.end(record, "sum").typed(stored, torch.ops.aten.add.Tensor, grads[name], node)
        grads[name] = node
    output = graph.output(tuple(grads.values()))
    output.meta[ir.ROLES] = tuple(Role("grad", name, layout=storages[name]) for name in grads)
    return fx.GraphModule({}, graph)


_ORIGIN = Origin(phase="backward", cause="gradients summed without reduction")


def _placeholder(
    rewriter: GraphRewriter, local_sum: Sum, at: int, fake_mode: FakeTensorMode, device: torch.device
) -> fx.Node:
    """Adds the placeholder of accumulator number ``at``, with its fake value (of global shape), layout and role;
    returns it.
    """
    node = rewriter.graph.placeholder(f"sum_{at}")
    with fake_mode:
        node.meta["val"] = torch.empty(local_sum.layout.shape, dtype=local_sum.dtype, device=device)
    role = Role("accumulated", local_sum.name, at)
    value = Value(local_sum.dtype, local_sum.layout.shape, local_sum.layout)
    return ir.set_info(node, Info(rewriter.names.fresh(f"d.{local_sum.name}.accumulated"), value, _ORIGIN, role))
