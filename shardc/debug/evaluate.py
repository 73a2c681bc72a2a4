"""Evaluates the graph of any stage on real numbers; returns every value by name as a global tensor.

A graph without layouts runs on one device. A graph with layouts runs on all (simulated) ranks: each op by its rule,
each redistribution by its definition (assemble the global tensor, then shard it). Local graphs run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, TypeGuard

import torch.nn.functional as F
from torch import Tensor, fx

from shardc.errors import InputError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes import local_regions
from shardc.passes.op_calls import call_of, operands_of
from shardc.rules import find_rule, spec_of
from shardc.rules.rule import Local
from shardc.runtime.sim.lockstep import Lockstep, PerRank

Key = tuple[str, str | int]  # (kind, name) of an input; (kind, index) of a tangent or an output
MOVES = (*ops.COLLECTIVES, *ops.LOCAL_MOVES, ops.reshard)


class Failed(Exception):
    """Raised if `node` of a graph cannot be executed.

    Attributes:
        node: the node.
    """

    def __init__(self, node: fx.Node, reason: str) -> None:
        self.node = node
        super().__init__(reason)


@dataclass
class Values:
    """The values that a run of a graph computed, as global tensors: of nodes by name, and of outputs by key.

    Args:
        by_name: node name -> its value as a global tensor, or an error text if replicas differ or shards do not fit.
        results: key of an output -> its value, likewise.
        saved: name of a backward's input -> the activation that the forward saves for it, per rank.
    """

    by_name: dict[str, Tensor | str] = field(default_factory=dict)
    results: dict[Key, Tensor | str] = field(default_factory=dict)
    saved: dict[str, PerRank] = field(default_factory=dict)


def key_of(role: Role) -> Key:
    """Return the key of an input or output that is the same in every stage: (kind, index) for a tangent or an output,
    (kind, name) for others.
    """
    return role.kind, role.index if role.kind in ("tangent", "output") else role.name


def refuse(graph: fx.Graph) -> None:
    """Raise InputError if a graph cannot be evaluated in one process as on one device, since it has a manual region
    or draws random numbers.
    """
    for node in graph.nodes:
        if node.target in local_regions.OPS:
            raise InputError(f"{ir.info(node).name} is a manual region, which only runs on ranks", fix="leave it out")
        if getattr(node.target, "namespace", "") == "shardc_random":
            source = ir.info(node).origin.source or None
            raise InputError("the model draws random numbers", source=source, fix="use model.eval(), or dropout of 0")


def on_layouts(gm: fx.GraphModule, mesh: Mesh, feed: Mapping[Key, Tensor]) -> Values:
    """Run a graph at global shapes on simulated ranks: each value is sharded by its layout between ops. On ``Mesh()``
    it runs as on one device. Return its `Values`.

    Args:
        feed: key of an input or tangent -> its value as a global tensor.
    """
    ranks = Lockstep(mesh)

    def layout_of(node: fx.Node) -> Layout | None:
        """Return the layout of ``node``; None on one device."""
        return ir.value(node).layout if mesh.axes else None

    def moved(x: PerRank, have: Layout | None, want: Layout | None) -> PerRank:
        """Return ``x`` resharded from layout ``have`` to layout ``want``."""
        return x if have == want or have is None or want is None else ranks.shard(ranks.assemble(x, have), want)

    def call(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Return the result of an op on every rank, given the values of its operands."""
        operands = node.all_input_nodes
        if node.target is ops.tag or node.target in MOVES:
            return moved(values[operands[0]], layout_of(operands[0]), layout_of(node))
        if node.target is getitem and not isinstance(values[operands[0]], PerRank):
            return values[operands[0]][node.args[1]]
        rule = find_rule(node.target) if mesh.axes and hasattr(node.target, "_schema") else None
        needs = () if node.target is getitem or not mesh.axes else ir.info(node).needs
        if needs is None:
            needs = tuple(map(ir.layout, operands_of(node)))
        # If an operand occurs twice, both occurrences need the same layout.
        resharded = {x: moved(values[x], layout_of(x), want) for x, want in zip(operands_of(node), needs, strict=False)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: resharded.get(x, values[x]))
        if node.target in (ops.pad, ops.unpad):
            dim, size = kwargs["dim"], kwargs["size"]
            return PerRank(_resized(x, (*x.shape[:dim], size, *x.shape[dim + 1 :])) for x in args[0])
        if rule is None:
            return ranks.call(node.target, *args, **kwargs)
        spec = spec_of(op_call := call_of(node))
        assert spec is not None
        results = tuple(value.layout for value in ir.info(node).tensors if value.layout)
        return rule.localize(Local(ranks, op_call, spec, needs, results, tuple(args), dict(kwargs)))

    def fed(node: fx.Node, whole: Tensor) -> PerRank:
        """Return the value of a placeholder on every rank, given its global tensor."""
        whole, layout = _resized(whole, ir.value(node).shape), layout_of(node)
        return PerRank([whole] * mesh.ranks) if layout is None else ranks.shard(whole, layout)

    return _run(gm, ranks, feed, fed, call, layout_of, lambda role, node: layout_of(node))


def on_ranks(
    gm: fx.GraphModule,
    mesh: Mesh,
    feed: Mapping[Key, Tensor],
    input_layouts: Mapping[Key, Layout],
    layouts: Mapping[str, Layout],
    saved: Mapping[str, PerRank] | None = None,
) -> Values:
    """Run a local graph on every rank; return its `Values`, as global tensors.

    Args:
        feed: key of an input or tangent -> its value as a global tensor.
        input_layouts: key of an input -> its layout.
        layouts: node name -> layout of the global value, of which the local value is a shard.
        saved: for a backward graph, name of an input -> the activation that the forward saved.
    """
    ranks = Lockstep(mesh)

    def fed(node: fx.Node, whole: Tensor) -> PerRank:
        """Return the value of a placeholder on every rank, given its global tensor."""
        role = ir.role(node)
        if role.kind == "coordinate":
            return ranks.coordinate(tuple(role.name.split(",")))
        if saved is not None and role.kind != "tangent":
            return saved[node.name]
        layout = input_layouts[key_of(role)]
        return ranks.shard(_resized(whole, layout.shape), layout)

    def layout_of(node: fx.Node) -> Layout | None:
        """Return the layout of the global value of ``node``, whose shard a rank's local graph computes. None if the
        layout is not known.
        """
        layout = layouts.get(ir.info(node).name)
        return layout if layout is not None and ir.value(node).shape == layout.local_shape else None

    return _run(gm, ranks, feed, fed, ranks.execute, layout_of, lambda role, node: role.layout)


def _run(
    gm: fx.GraphModule,
    ranks: Lockstep,
    feed: Mapping[Key, Tensor],
    fed: Callable[[fx.Node, Tensor], PerRank],
    call: Callable[[fx.Node, Mapping[fx.Node, Any]], Any],
    layout_of: Callable[[fx.Node], Layout | None],
    layout_of_result: Callable[[Role, fx.Node], Layout | None],
) -> Values:
    """Run the graph ``gm`` on every simulated rank; return the values of its nodes and outputs as global tensors.

    Args:
        ranks: the simulated ranks.
        feed: key of an input or tangent -> its value as a global tensor.
        fed: maps (placeholder, global tensor) to its value on every rank.
        call: maps (op, node -> value on every rank) to its result on every rank.
        layout_of: returns the layout of a node's value; None if it is the same on every rank.
        layout_of_result: returns the layout of an output.
    """

    def start(node: fx.Node) -> PerRank:
        """Return the value of a placeholder on every rank."""
        whole = feed.get(key_of(ir.role(node)), node.meta["val"])
        return fed(node, whole) if isinstance(whole, Tensor) else PerRank([whole] * ranks.mesh.ranks)  # the example's

    def attempt(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Return the result of an op; raise `Failed` if it cannot be executed."""
        try:
            return call(node, values)
        except (RuntimeError, AssertionError, IndexError, ValueError, TypeError, KeyError) as error:
            raise Failed(node, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error

    def whole(x: PerRank, layout: Layout | None) -> Tensor | str:
        """Return the global tensor of ``x``, which has a value per rank; or an error text if replicas differ or
        shards do not fit ``layout``.
        """
        try:
            return x[0] if layout is None else ranks.assemble(x, layout)
        except AssertionError as error:
            return str(error)

    out = Values()
    results: Any = ()
    for node, results in ranks.values(gm, start, attempt):
        if _is_tensor(results) and ((layout := layout_of(node)) is not None or not ranks.mesh.axes):
            out.by_name[ir.info(node).name] = whole(results, layout)
    for (role, node), x in zip(ir.outputs(gm.graph), results, strict=True):
        if role.kind == "saved" and x is not None:
            out.saved[role.name] = x
        elif _is_tensor(x):
            out.results[key_of(role)] = whole(x, layout_of_result(role, node))
    return out


def _is_tensor(x: object) -> TypeGuard[PerRank]:
    """Return whether ``x`` is one tensor on every rank."""
    return isinstance(x, PerRank) and isinstance(x[0], Tensor)


def _resized(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` cut, or padded with zeros, at the end of each dim to ``shape``."""
    widths = [width for now, size in zip(x.shape, shape, strict=True) for width in (size - now, 0)]
    return F.pad(x, widths[::-1]) if any(widths) else x
