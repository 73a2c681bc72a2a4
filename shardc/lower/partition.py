"""How a joint graph is cut into forward and backward: AOTAutograd's min-cut, and marks that it heeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import copysign
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.node import _side_effectful_functions, map_aggregate
from torch.utils.checkpoint import CheckpointPolicy

c10d = torch.ops._c10d_functional


def min_cut(joint: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph by AOTAutograd's min-cut: little is saved, cheap ops run again in backward.

    ``joint`` stays as it is: what an inference takes of it must not depend on whether it was cut before.
    """
    joint = fx.GraphModule(joint, joint.graph)  # the min-cut gives its module a graph without repeated ops
    inputs = [n.meta["val"] for n in joint.graph.nodes if n.op == "placeholder"]
    count = sum(n.name.startswith("primals") for n in joint.graph.find_nodes(op="placeholder"))
    primals, tangents = inputs[:count], inputs[count:]
    signed = _numbers(joint.graph, lambda x: _NegativeZero(x) if x == 0 and copysign(1, x) < 0 else x)
    try:
        with functorch_config.patch(functionalize_rng_ops=False), _nothing_draws(), _unread_waits_go(), _lookups_fuse():
            halves = min_cut_rematerialization_partition(joint, (primals, tangents), num_fwd_outputs=forward_outputs)
    finally:
        if signed:
            _numbers(joint.graph, float)
    for half in halves if signed else ():
        _numbers(half.graph, float)
    return halves


class _NegativeZero(float):
    """-0.0, which is equal to 0.0: the cut makes one op of those whose arguments are equal and of one type."""


def _numbers(graph: fx.Graph, change: Callable[[float], float]) -> bool:
    """Puts ``change`` of each float in its place, among the arguments of ops; whether any is another object now."""
    changed = False

    def put(x: Any) -> Any:
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
def _nothing_draws() -> Iterator[None]:
    """No random state is kept for what runs again: an attention kernel that drops nothing is tagged as if it drew."""
    original = partitioners.has_recomputable_rng_ops
    partitioners.has_recomputable_rng_ops = lambda fx_g: False
    try:
        yield
    finally:
        partitioners.has_recomputable_rng_ops = original


@contextmanager
def _unread_waits_go() -> Iterator[None]:
    """A collective that nobody reads is dead: each half has those that it reads, and the cut does not keep the rest."""
    waits = _side_effectful_functions & {c10d.wait_tensor, c10d.wait_tensor.default}
    _side_effectful_functions.difference_update(waits)
    try:
        yield
    finally:
        _side_effectful_functions.update(waits)


@contextmanager
def _lookups_fuse() -> Iterator[None]:
    """Inductor fuses an embedding's lookup as it does indexing: a block behind one saves what alike blocks do."""
    listed = partitioners.get_default_op_list

    def with_lookups() -> partitioners.OpTypes:
        ops = listed()
        return replace(ops, fusible_ops=ops.fusible_ops | {torch.ops.aten.embedding})

    partitioners.get_default_op_list = with_lookups
    try:
        yield
    finally:
        partitioners.get_default_op_list = listed


def must_recompute(node: fx.Node, region: int) -> None:
    """Marks ``node``, which does not draw, to run again in backward instead of being saved."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = region


def must_save(node: fx.Node, region: int) -> None:
    """Marks ``node`` to be saved for backward."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta["ac_graph_id"] = region
