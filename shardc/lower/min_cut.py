"""Splits a joint graph into forward and backward by AOTAutograd's min-cut, with nodes marked as saved or recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import copysign
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.node import _side_effectful_functions, map_aggregate
from torch.utils.checkpoint import CheckpointPolicy

from shardc._compat import LazyGraphModule
from shardc.logs import timed

c10d = torch.ops._c10d_functional


def min_cut(joint: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into (forward, backward) by AOTAutograd's min-cut partitioner: few values are saved, and
    cheap ops are recomputed in backward.

    ``joint`` itself stays unchanged.
    """
    joint = LazyGraphModule(joint, joint.graph)  # the min-cut gives its module a graph without repeated ops
    inputs = [n.meta["val"] for n in joint.graph.nodes if n.op == "placeholder"]
    count = sum(n.name.startswith("primals") for n in joint.graph.find_nodes(op="placeholder"))
    primals, tangents = inputs[:count], inputs[count:]
    signed = _replace_floats(joint.graph, lambda x: _NegativeZero(x) if x == 0 and copysign(1, x) < 0 else x)
    try:
        with (
            functorch_config.patch(functionalize_rng_ops=False),
            # Else it saves random states for attention kernels without dropout too, as they are tagged as random.
            patch.object(partitioners, "has_recomputable_rng_ops", lambda _: False),
            patch.object(partitioners, "get_default_op_list", _ops_with_lookups),
            patch.object(partitioners, "reordering_to_mimic_autograd_engine", _lazy_backward),
            _dead_unread_waits(),
            _use_lazy_graph_module(True),  # no code is generated for the graphs in between
            timed("min-cut"),
        ):
            halves = min_cut_rematerialization_partition(joint, (primals, tangents), num_fwd_outputs=forward_outputs)
    finally:
        if signed:
            _replace_floats(joint.graph, float)
    for half in halves if signed else ():
        _replace_floats(half.graph, float)
    return halves


class _NegativeZero(float):
    """Stands for -0.0, which the cut's common-subexpression elimination would take for 0.0."""


def _replace_floats(graph: fx.Graph, change: Callable[[float], float]) -> bool:
    """Replace each float ``x`` in the arguments of ops by ``change(x)``. Return whether that changed one."""
    changed = False

    def put(x: fx.node.Argument) -> fx.node.Argument:
        nonlocal changed
        new = change(x) if isinstance(x, float) else x
        changed |= new is not x
        return new

    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_aggregate((node.args, node.kwargs), put)
            if changed:
                node.args, node.kwargs = args, kwargs
    return changed


@contextmanager
def _dead_unread_waits() -> Iterator[None]:
    """Context manager in which dead-code elimination removes collectives whose result nothing reads. So forward and
    backward each keep only the collectives that they need.
    """
    waits = _side_effectful_functions & {c10d.wait_tensor, c10d.wait_tensor.default}
    _side_effectful_functions.difference_update(waits)
    try:
        yield
    finally:
        _side_effectful_functions.update(waits)


_listed_ops, _sorted_backward = partitioners.get_default_op_list, partitioners.reordering_to_mimic_autograd_engine


def _ops_with_lookups() -> partitioners.OpTypes:
    """Return torch's lists of ops for the min-cut. Embedding lookups count as ops that fuse: Inductor fuses them."""
    ops = _listed_ops()
    return replace(ops, fusible_ops=ops.fusible_ops | {torch.ops.aten.embedding})


def _lazy_backward(gm: fx.GraphModule) -> fx.GraphModule:
    """Sort the backward graph as torch's min-cut partitioner does, without generating Python code for it."""
    backward = _sorted_backward(gm)
    return LazyGraphModule(backward, backward.graph)


def must_recompute(node: fx.Node, region: int) -> None:
    """Mark ``node`` for torch's partitioner: its value is recomputed in backward, within checkpoint region number
    ``region``. The node draws no random numbers.
    """
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = region


def must_save(node: fx.Node, region: int) -> None:
    """Mark ``node`` for torch's partitioner: its value is saved for backward, at the border of checkpoint region
    number ``region``.
    """
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta["ac_graph_id"] = region
