"""Finds dense ops that several ranks compute redundantly, by mesh axis, and words the warning of `shardc.compile`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from torch import fx

from shardc.cost.fused_kernels import flops_of
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh, split_part

SHARE = 0.05  # share of a rank's operations from which `shardc.compile` warns: a high cost by `lint`
LEAST = 10**9  # wasted operations per rank and step below which there is no warning: well under a second anywhere
NAMED = 3  # most modules named in a warning


@dataclass(frozen=True)
class Dense:
    """A dense op on one rank.

    Args:
        name, module: of the op.
        flops: operations of one rank.
        bytes: bytes that one rank reads and writes.
        times: axis -> number of ranks along it that compute the same.
        gathered: (axis, name, bytes that a rank receives) of activations gathered for it over these axes.
    """

    name: str
    module: str
    flops: int
    bytes: int
    times: dict[str, int]
    gathered: tuple[tuple[str, str, int], ...] = ()


def layers_of(name: str) -> str:
    """Replace the numbers of repeated layers in ``name`` by ``*``: ``layers.*.mlp.up``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def model_flops(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Yield the dense ops of a global graph with their operations on all ranks together, without redundancy."""
    for node in graph.nodes:
        if node.op == "call_function" and (flops := flops_of(node)):
            yield node, flops


def dense(graph: fx.Graph, mesh: Mesh) -> Iterator[tuple[fx.Node, Dense]]:
    """Yield the dense ops of a global graph; an op is repeated over axes that split neither operands nor results."""
    for node, total in model_flops(graph):
        values = [value for x in (*node.all_input_nodes, node) for value in ir.info(x).tensors if value.layout]
        parts = {axis for value in values if value.layout for axis in value.layout.bound}
        workers = {axis: prod(mesh.size(p) for p in parts if split_part(p)[0] == axis) for axis in mesh.axes}
        workers = {axis: min(ranks, mesh.size(axis)) for axis, ranks in workers.items()}
        times = {axis: mesh.size(axis) // ranks for axis, ranks in workers.items() if mesh.size(axis) > ranks}
        gathered = [gather for x in node.all_input_nodes for gather in _gathers(x) if gather[0] in times]
        record, flops = ir.info(node), total // prod(workers.values())
        nbytes = sum(map(_local, values))
        yield node, Dense(record.name, record.origin.module, flops, nbytes, times, tuple(gathered))


def _local(value: ir.Value) -> int:
    """Return the bytes of ``value`` on one rank."""
    layout = value.layout
    return value.nbytes if layout is None else value.nbytes // prod(map(layout.mesh.size, layout.bound))


def _gathers(node: fx.Node) -> Iterator[tuple[str, str, int]]:
    """Yield the all-gathers that produced ``node``, or the value that it is a view of; not those of parameters."""
    gathers = []
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and not isinstance(ir.info(node).value, tuple):
        (source,) = node.all_input_nodes
        if node.target is ops.all_gather:
            received = _local(ir.value(node)) - _local(ir.value(source))
            over = str(node.kwargs["axis"])
            axes = {split_part(axis)[0] for axis in over.split(",")}
            gathers += [(axis, ir.info(node).name, received) for axis in axes]
        node = source
    role = ir.info(node).role
    if role is None or role.kind == "input":
        yield from gathers


@dataclass
class _Axis:
    """The redundant work over one axis, per rank and step."""

    flops: float = 0.0
    bytes: float = 0.0
    within: float = 0.0  # operations of the ops that are repeated
    modules: dict[str, float] = field(default_factory=dict)
    gathered: dict[str, int] = field(default_factory=dict)  # bytes by name


def wasted(
    ops: Iterable[Dense], mesh: Mesh, params: Mapping[str, Layout], counts: Callable[[str], int] = lambda name: 1
) -> PlanError | None:
    """Return the warning about redundant work, or None if there is too little of it.

    Args:
        params: compute layouts of the model's parameters.
        counts: name of an op -> the number of ops that it represents (repeated layers).
    """
    axes: dict[str, _Axis] = {}
    total = 0
    for op in ops:
        count = counts(op.name)
        total += count * op.flops
        for axis, times in op.times.items():
            work, extra = axes.setdefault(axis, _Axis()), count * (1 - 1 / times)
            work.flops += extra * op.flops
            work.bytes += extra * op.bytes
            work.within += count * op.flops
            module = layers_of(op.module)
            work.modules[module] = work.modules.get(module, 0.0) + extra * op.flops
            work.gathered |= {name: count * received for over, name, received in op.gathered if over == axis}
    large = {axis: work for axis, work in axes.items() if work.flops >= max(SHARE * total, LEAST)}
    if not large:
        return None
    ordered = sorted(large, key=lambda axis: -large[axis].flops)
    what = "; ".join(_describe(axis, large[axis], mesh, total) for axis in ordered)
    mends = [_mend(axis, large[axis], total, params) for axis in ordered]
    return PlanError(what, fix="; ".join(mends) + "; program.lint() lists the ops")


def _describe(axis: str, of: _Axis, mesh: Mesh, total: int) -> str:
    who = "no op is split over it" if of.within >= total else f"no axis splits {_names(of.modules)} there"
    gathered = f", for which {sum(of.gathered.values()):.2g} bytes are gathered over it" if of.gathered else ""
    return (
        f"the {mesh.size(axis)} ranks along axis {axis!r} of the mesh {mesh} compute the same: {of.flops:.2g} of the "
        f"{total:.2g} operations of a rank and step are wasted ({of.flops / total:.0%}), and {of.bytes:.2g} bytes that "
        f"they read and write{gathered}; {who}"
    )


def _mend(axis: str, of: _Axis, total: int, params: Mapping[str, Layout]) -> str:
    """Return the plan entry that would split the redundant work."""
    if of.within >= total:
        return f'add shardc.fsdp("{axis}"), which splits the batch over it, or leave the axis out of the mesh'
    whole = {
        layers_of(name) for name, layout in params.items() if axis not in {split_part(part)[0] for part in layout.axes}
    }
    modules = _largest(of.modules)
    weights = ", ".join(f'"{module}"' for module in modules if f"{module}.weight" in whole)
    if f"{modules[0]}.weight" in whole:
        return f'add shardc.tp("{axis}", colwise=[{weights}]), or the same rowwise'
    name = modules[0] or "the model"
    return f"split what goes into {name} over {axis}, by tp of the linears before it or Plan(activations=...)"


def _largest(modules: dict[str, float]) -> list[str]:
    return sorted(modules, key=lambda module: -modules[module])[:NAMED]


def _names(modules: dict[str, float]) -> str:
    left = len(modules) - NAMED
    return ", ".join(name or "the model" for name in _largest(modules)) + (f" and {left} more" if left > 0 else "")
