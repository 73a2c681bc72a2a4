"""Evaluates the graph after any stage on real numbers, every value of it by name as one global tensor.

Until layouts are chosen a graph runs on one device. With layouts it runs on all ranks of the mesh, each op by its
rule and each change of layout as what it means, not as what later passes make of it. Local graphs run as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from shardc.passes.calls import call_of, operands_of
from shardc.rules import find_rule, spec_of
from shardc.rules.rule import Local
from shardc.runtime.sim.lockstep import Lockstep, PerRank

Key = tuple[str, Any]  # (kind, name) of an input; (kind, index) of a tangent or an output
MOVES = (*ops.COLLECTIVES, *ops.LOCAL_MOVES, ops.reshard)


class Failed(Exception):
    """A node that cannot be run."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        self.node = node
        super().__init__(reason)


@dataclass
class Values:
    """What a graph computed.

    Args:
        by_name: each value, global; where replicas differ or shards do not fit, the reason.
        results: each output.
        saved: what a forward graph saves, on each rank, by the name under which the backward takes it.
    """

    by_name: dict[str, Tensor | str] = field(default_factory=dict)
    results: dict[Key, Tensor | str] = field(default_factory=dict)
    saved: dict[str, PerRank] = field(default_factory=dict)


def key_of(role: Role) -> Key:
    """What identifies an input or an output in every stage."""
    return role.kind, role.index if role.kind in ("tangent", "output") else role.name


def refuse(graph: fx.Graph) -> None:
    """Raises InputError where a graph holds what cannot be compared with one device."""
    for node in graph.nodes:
        said = str(node.target)
        if node.target in region.OPS:
            raise InputError(f"{ir.info(node).name} is a manual region, which only runs on ranks", fix="leave it out")
        if said.startswith("shardc_random."):
            source = ir.info(node).origin.source or None
            raise InputError("the model draws random numbers", source=source, fix="use model.eval(), or dropout of 0")


def on_one_device(gm: fx.GraphModule, feed: Mapping[Key, Tensor]) -> Values:
    """A graph at global shapes, layouts aside."""

    def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target is ops.tag or node.target in MOVES:
            return args[0]
        if node.target is ops.pad:
            return _resized(args[0], kwargs["dim"], kwargs["size"])
        if node.target is ops.unpad:
            return args[0].narrow(kwargs["dim"], 0, kwargs["size"])
        return node.target(*args, **kwargs)

    def fed(node: fx.Node) -> Any:
        whole = _fed(node, feed)
        return _padded(whole, ir.value(node).shape) if isinstance(whole, Tensor) else whole

    out = Values()
    for node, made in _run(gm, fed, lambda x: x, call):
        if node.op != "output":
            if isinstance(made, Tensor):
                out.by_name[ir.info(node).name] = made
            continue
        out.results = {key_of(role): x for role, x in _results(gm.graph, made) if isinstance(x, Tensor)}
    return out


def on_layouts(gm: fx.GraphModule, mesh: Mesh, feed: Mapping[Key, Tensor]) -> Values:
    """A graph at global shapes with layouts, on every rank."""
    ranks = Lockstep(mesh)
    env: dict[fx.Node, Any] = {}

    def moved(x: PerRank, have: Layout, want: Layout) -> PerRank:
        return x if have == want else ranks.shard(ranks.assemble(x, have), want)

    def taken(node: fx.Node) -> dict[fx.Node, Any]:
        """The operands as ``node`` needs them; one that it takes twice it takes in the same layout."""
        here = dict(env)
        operands = operands_of(node)
        needs = ir.info(node).needs or tuple(ir.layout(x) for x in operands)
        for x, want in zip(operands, needs, strict=True):
            here[x] = moved(env[x], ir.layout(x), want)
        return here

    def call(node: fx.Node, _: Any, __: Any) -> Any:
        if node.target in MOVES:
            (x,) = node.all_input_nodes
            return moved(env[x], ir.layout(x), ir.layout(node))
        if node.target is getitem:
            source, index = env[node.args[0]], node.args[1]
            return PerRank(one[index] for one in source) if isinstance(source, PerRank) else source[index]
        here = taken(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: here[x])
        if node.target in (ops.pad, ops.unpad):
            dim, size = kwargs["dim"], kwargs["size"]
            cut = node.target is ops.unpad
            return PerRank(x.narrow(dim, 0, size) if cut else _resized(x, dim, size) for x in args[0])
        rule = find_rule(node.target)
        if rule is None:
            return ranks.call(node.target, *args, **kwargs)
        spec = spec_of(one := call_of(node))
        assert spec is not None
        results = tuple(value.layout for value in ir.info(node).tensors if value.layout)
        needs = ir.info(node).needs or tuple(ir.layout(x) for x in operands_of(node))
        return rule.localize(Local(ranks, one, spec, needs, results, tuple(args), dict(kwargs)))

    def fed(node: fx.Node) -> Any:
        whole = _fed(node, feed)
        return (
            ranks.shard(_padded(whole, ir.layout(node).shape), ir.layout(node)) if isinstance(whole, Tensor) else whole
        )

    out = Values()
    for node, made in _run(gm, fed, lambda x: PerRank([x] * mesh.ranks), call, env):
        if node.op != "output":
            if isinstance(made, PerRank) and isinstance(made[0], Tensor):
                out.by_name[ir.info(node).name] = _whole(ranks, made, ir.layout(node))
            continue
        for (role, x), source in zip(_results(gm.graph, made), node.args[0], strict=True):
            if isinstance(x, PerRank) and role.layout is not None:
                want = moved(x, ir.layout(source), role.layout)
                out.results[key_of(role)] = _whole(ranks, want, role.layout)
    return out


def on_ranks(
    gm: fx.GraphModule,
    mesh: Mesh,
    feed: Mapping[Key, Tensor],
    lies: Mapping[Key, Layout],
    layouts: Mapping[str, Layout],
    saved: Mapping[str, PerRank] | None = None,
) -> Values:
    """A local graph on every rank.

    Args:
        lies: the layout in which each input comes.
        layouts: the layout of the global value that a local one of that name is a shard of.
        saved: for a backward, what the forward saved.
    """
    ranks = Lockstep(mesh)

    def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
        return ranks.call(node.target, *args, **kwargs)

    def fed(node: fx.Node) -> Any:
        role = ir.role(node)
        if role.kind == "coordinate":
            return ranks.coordinate(tuple(role.name.split(",")))
        if saved is not None and role.kind != "tangent":
            return saved[node.name]
        whole = _fed(node, feed)
        if not isinstance(whole, Tensor):
            return PerRank([whole] * mesh.ranks)
        return ranks.shard(_padded(whole, lies[key_of(role)].shape), lies[key_of(role)])

    out = Values()
    for node, made in _run(gm, fed, lambda x: PerRank([x] * mesh.ranks), call):
        if node.op != "output":
            name = ir.info(node).name
            if isinstance(made[0], Tensor) and name in layouts and tuple(made[0].shape) == layouts[name].local_shape:
                out.by_name[name] = _whole(ranks, made, layouts[name])
            continue
        for role, x in _results(gm.graph, made):
            if role.kind == "saved" and x is not None:
                out.saved[role.name] = x
            elif isinstance(x, PerRank) and isinstance(x[0], Tensor) and role.layout is not None:
                out.results[key_of(role)] = _whole(ranks, x, role.layout)
    return out


@torch.no_grad()
def _run(
    gm: fx.GraphModule,
    fed: Callable[[fx.Node], Any],
    constant: Callable[[Any], Any],
    call: Callable[[fx.Node, Any, Any], Any],
    env: dict[fx.Node, Any] | None = None,
) -> Iterator[tuple[fx.Node, Any]]:
    """(node, what it makes) in order; of the output node, what it takes."""
    env = {} if env is None else env
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = fed(node)
        elif node.op == "get_attr":
            env[node] = constant(operator.attrgetter(str(node.target))(gm))
        elif node.op == "output":
            yield node, [env[x] if isinstance(x, fx.Node) else None for x in node.args[0]]
            return
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: env[x])
            try:
                env[node] = call(node, args, dict(kwargs))
            except (RuntimeError, AssertionError, IndexError, ValueError, TypeError, KeyError) as error:
                raise Failed(node, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
        yield node, env[node]


def _fed(node: fx.Node, feed: Mapping[Key, Tensor]) -> Any:
    """The global value of a placeholder; of one that is no tensor, the example's."""
    return feed.get(key_of(ir.role(node)), node.meta["val"])


def _results(graph: fx.Graph, made: Sequence[Any]) -> list[tuple[Role, Any]]:
    return list(zip((role for role, _ in ir.outputs(graph)), made, strict=True))


def _whole(ranks: Lockstep, x: PerRank, layout: Layout) -> Tensor | str:
    try:
        return ranks.assemble(x, layout)
    except AssertionError as error:
        return str(error)


def _padded(x: Tensor, shape: Sequence[int]) -> Tensor:
    for dim, size in enumerate(shape):
        x = _resized(x, dim, size)
    return x


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    """``dim`` grown to ``size`` with zeros."""
    return F.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, size - x.shape[dim]]) if x.shape[dim] != size else x
