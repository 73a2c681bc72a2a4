"""Evaluates the graph of any stage on real numbers; returns every value by name as a global tensor.

A graph without layouts runs on one device. A graph with layouts runs on all (simulated) ranks: each op by its rule,
each redistribution by its definition (assemble the global tensor, then shard it). Local graphs run as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from shardc.errors import InputError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes import region
from shardc.passes.op_calls import call_of, operands_of
from shardc.rules import find_rule, spec_of
from shardc.rules.rule import Local
from shardc.runtime.sim.lockstep import Lockstep, PerRank

Key = tuple[str, Any]  # (kind, name) of an input; (kind, index) of a tangent or an output
MOVES = (*ops.COLLECTIVES, *ops.LOCAL_MOVES, ops.reshard)
Env = dict[fx.Node, Any]
LayoutOf = Callable[[fx.Node], Layout | None]


class Failed(Exception):
    """Raised if a node cannot be executed."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        self.node = node
        super().__init__(reason)


@dataclass
class Values:
    """The values that a graph computed.

    Args:
        by_name: each value as a global tensor, or an error text if replicas differ or shards do not fit.
        results: the same for each output.
        saved: activations that a forward graph saves, per rank, by the name of the backward's input.
    """

    by_name: dict[str, Tensor | str] = field(default_factory=dict)
    results: dict[Key, Tensor | str] = field(default_factory=dict)
    saved: dict[str, PerRank] = field(default_factory=dict)


def key_of(role: Role) -> Key:
    """Return the key that identifies an input or output in every stage."""
    return role.kind, role.index if role.kind in ("tangent", "output") else role.name


def refuse(graph: fx.Graph) -> None:
    """Raise InputError if the graph has ops whose results cannot be compared with one device."""
    for node in graph.nodes:
        target = str(node.target)
        if node.target in region.OPS:
            raise InputError(f"{ir.info(node).name} is a manual region, which only runs on ranks", fix="leave it out")
        if target.startswith("shardc_random."):
            source = ir.info(node).origin.source or None
            raise InputError("the model draws random numbers", source=source, fix="use model.eval(), or dropout of 0")


def on_one_device(gm: fx.GraphModule, feed: Mapping[Key, Tensor]) -> Values:
    """Run a graph at global shapes on one device, ignoring layouts."""
    return _on_layouts(gm, Lockstep(Mesh()), feed, lambda node: None)


def on_layouts(gm: fx.GraphModule, mesh: Mesh, feed: Mapping[Key, Tensor]) -> Values:
    """Run a graph at global shapes on every rank, with the layouts of its values."""
    return _on_layouts(gm, Lockstep(mesh), feed, lambda node: ir.value(node).layout)


def _on_layouts(gm: fx.GraphModule, ranks: Lockstep, feed: Mapping[Key, Tensor], layout_of: LayoutOf) -> Values:
    """Run a graph at global shapes on all ranks; reshard operands to the layouts that each op needs."""

    def moved(x: PerRank, have: Layout | None, want: Layout | None) -> PerRank:
        return x if have == want or have is None or want is None else ranks.shard(ranks.assemble(x, have), want)

    def call(node: fx.Node, env: Env) -> Any:
        operands = node.all_input_nodes
        if node.target is ops.tag or node.target in MOVES:
            return moved(env[operands[0]], layout_of(operands[0]), layout_of(node))
        if node.target is getitem and not isinstance(env[operands[0]], PerRank):
            return env[operands[0]][node.args[1]]
        rule = find_rule(node.target) if ranks.mesh.axes and hasattr(node.target, "_schema") else None
        needs = () if node.target is getitem or not ranks.mesh.axes else ir.info(node).needs
        if needs is None:
            needs = tuple(map(ir.layout, operands_of(node)))
        # If an operand occurs twice, both occurrences need the same layout.
        resharded = {x: moved(env[x], layout_of(x), want) for x, want in zip(operands_of(node), needs, strict=False)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: resharded.get(x, env[x]))
        if node.target in (ops.pad, ops.unpad):
            resized = _resized if node.target is ops.pad else _cut
            return PerRank(resized(x, kwargs["dim"], kwargs["size"]) for x in args[0])
        if rule is None:
            return ranks.call(node.target, *args, **kwargs)
        spec = spec_of(op_call := call_of(node))
        assert spec is not None
        results = tuple(value.layout for value in ir.info(node).tensors if value.layout)
        return rule.localize(Local(ranks, op_call, spec, needs, results, tuple(args), dict(kwargs)))

    def fed(node: fx.Node, whole: Any) -> PerRank:
        shape = ir.value(node).shape if isinstance(whole, Tensor) else ()
        return _shards(ranks, _padded(whole, shape), layout_of(node) if isinstance(whole, Tensor) else None)

    return _run(gm, ranks, feed, fed, call, layout_of, lambda role, node: layout_of(node))


def on_ranks(
    gm: fx.GraphModule,
    mesh: Mesh,
    feed: Mapping[Key, Tensor],
    input_layouts: Mapping[Key, Layout],
    layouts: Mapping[str, Layout],
    saved: Mapping[str, PerRank] | None = None,
) -> Values:
    """Run a local graph on every rank.

    Args:
        input_layouts: layout of each input.
        layouts: layout of the global value of each name, of which the local value is a shard.
        saved: for a backward graph, the activations that the forward saved.
    """
    ranks = Lockstep(mesh)

    def call(node: fx.Node, env: Env) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        return ranks.call(node.target, *args, **kwargs)

    def fed(node: fx.Node, whole: Any) -> PerRank:
        role = ir.role(node)
        if role.kind == "coordinate":
            return ranks.coordinate(tuple(role.name.split(",")))
        if saved is not None and role.kind != "tangent":
            return saved[node.name]
        layout = input_layouts[key_of(role)] if isinstance(whole, Tensor) else None
        return _shards(ranks, whole if layout is None else _padded(whole, layout.shape), layout)

    def layout_of(node: fx.Node) -> Layout | None:
        layout = layouts.get(ir.info(node).name)
        return layout if layout is not None and ir.value(node).shape == layout.local_shape else None

    return _run(gm, ranks, feed, fed, call, layout_of, lambda role, node: role.layout)


@torch.no_grad()
def _run(
    gm: fx.GraphModule,
    ranks: Lockstep,
    feed: Mapping[Key, Tensor],
    fed: Callable[[fx.Node, Any], PerRank],
    call: Callable[[fx.Node, Env], Any],
    layout_of: LayoutOf,
    layout_of_result: Callable[[Role, fx.Node], Layout | None],
) -> Values:
    """Run ``gm``: ``fed`` returns the value of a placeholder per rank, and ``call`` executes an op."""
    env: Env = {}
    out = Values()
    for node in gm.graph.nodes:
        if node.op == "placeholder":  # inputs that are not tensors have the value of the example
            env[node] = fed(node, feed.get(key_of(ir.role(node)), node.meta["val"]))
        elif node.op == "get_attr":
            env[node] = _shards(ranks, operator.attrgetter(str(node.target))(gm), None)
        elif node.op == "call_function":
            try:
                env[node] = call(node, env)
            except (RuntimeError, AssertionError, IndexError, ValueError, TypeError, KeyError) as error:
                raise Failed(node, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
        if node.op != "output" and _is_tensor(env[node]):
            layout = layout_of(node)
            if layout is not None or not ranks.mesh.axes:
                out.by_name[ir.info(node).name] = _whole(ranks, env[node], layout)
    for role, x in ir.outputs(gm.graph):
        if isinstance(x, fx.Node) and role.kind == "saved":
            out.saved[role.name] = env[x]
        elif isinstance(x, fx.Node) and _is_tensor(env[x]):
            out.results[key_of(role)] = _whole(ranks, env[x], layout_of_result(role, x))
    return out


def _is_tensor(x: Any) -> bool:
    return isinstance(x, PerRank) and isinstance(x[0], Tensor)


def _shards(ranks: Lockstep, whole: Any, layout: Layout | None) -> PerRank:
    return PerRank([whole] * ranks.mesh.ranks) if layout is None else ranks.shard(whole, layout)


def _whole(ranks: Lockstep, x: PerRank, layout: Layout | None) -> Tensor | str:
    if layout is None:
        return x[0]
    try:
        return ranks.assemble(x, layout)
    except AssertionError as error:
        return str(error)


def _padded(x: Any, shape: Sequence[int]) -> Any:
    for dim, size in enumerate(shape):
        x = _resized(x, dim, size)
    return x


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    """Pad ``dim`` with zeros to ``size``."""
    return F.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, size - x.shape[dim]]) if x.shape[dim] != size else x


def _cut(x: Tensor, dim: int, size: int) -> Tensor:
    return x.narrow(dim, 0, size)
