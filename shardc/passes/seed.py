"""Seed: what the plan says, as layouts on parameters, inputs, outputs and named activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.graph import Info, NameScope, Value
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh


@dataclass(frozen=True)
class SeededParam:
    """Where a parameter lives and how its consumers want it.

    Args:
        storage: layout between steps, at the padded shape.
        compute: layout at its uses, at the true shape.
        storage_cause, compute_cause: the plan entries.
    """

    storage: Layout
    compute: Layout
    storage_cause: str
    compute_cause: str


@dataclass(frozen=True)
class Seed:
    """Gives every placeholder but the tangents its layout.

    Each parameter's first use has in front of it an explicit ``reshard`` from storage to compute layout (and
    ``unpad`` where storage is padded); each parameter's gradient is brought back the same way by ``pad``.

    Args:
        params: by qualified name.
        inputs: (layout, plan entry) of each tensor input in order.
        pinned: activation tags that the plan speaks of; the other tags are dropped.
    """

    mesh: Mesh
    params: Mapping[str, SeededParam]
    inputs: Sequence[tuple[Layout, str]]
    pinned: frozenset[str] = frozenset()
    name = "seed"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph, names = gm.graph, NameScope.of(gm.graph)
        for node in list(graph.nodes):
            if node.op == "get_attr":
                ir.set_info(node, ir.info(node).at(Layout.whole(self.mesh, ir.value(node).shape)))
            if node.target is ops.tag and node.kwargs["name"] not in self.pinned:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        order = {node: at for at, node in enumerate(graph.nodes)}
        inputs = iter(self.inputs)
        for node in ir.placeholders(graph):
            record = ir.info(node)
            role = ir.role(node)
            if role.kind == "param":
                self._param(graph, node, min(node.users, key=order.__getitem__, default=None), names)
            elif role.kind == "buffer":
                ir.set_info(node, record.at(Layout.whole(self.mesh, ir.value(node).shape)))
            elif role.kind == "input" and isinstance(record.value, Value):
                layout, cause = next(inputs)
                ir.set_info(node, replace(record.at(layout), origin=replace(record.origin, cause=cause)))
        self._grads(graph, names)
        return gm

    def _param(self, graph: fx.Graph, node: fx.Node, before: fx.Node | None, names: NameScope) -> None:
        record = ir.info(node)
        seeded = self.params[record.name]
        origin = replace(record.origin, cause=seeded.storage_cause)
        dtype, shape = ir.value(node).dtype, ir.value(node).shape
        users = list(node.users)
        ir.set_info(node, replace(record, value=Value(dtype, seeded.storage.shape, seeded.storage), origin=origin))
        if seeded.storage.shape != shape:
            node.meta["val"] = node.meta["val"].new_empty(seeded.storage.shape)
        if before is None:
            return
        padded = _repad(seeded.compute, seeded.storage.shape)
        last = node
        if padded != seeded.storage:
            last = _insert(graph, before, ops.reshard, node, {}, Info(
                names.fresh(f"{record.name}.full"), Value(dtype, padded.shape, padded), origin))  # fmt: skip
        for dim, (have, want) in enumerate(zip(seeded.storage.shape, shape, strict=True)):
            if have != want:
                padded = _resize(padded, dim, want)
                last = _insert(graph, before, ops.unpad, last, {"dim": dim, "size": want}, Info(
                    names.fresh(f"{record.name}.unpadded"), Value(dtype, padded.shape, padded), origin))  # fmt: skip
        if last is not node:
            for user in users:
                user.replace_input_with(node, last)

    def _grads(self, graph: fx.Graph, names: NameScope) -> None:
        """Pads the gradients of padded parameters."""
        output = ir.output_node(graph)
        results = list(output.args[0])
        for at, (role, node) in enumerate(ir.outputs(graph)):
            if role.kind != "grad" or node is None or role.name not in self.params:
                continue
            shape, want = list(ir.value(node).shape), self.params[role.name].storage.shape
            for dim, (have, size) in enumerate(zip(tuple(shape), want, strict=True)):
                if have != size:
                    record = ir.info(node)
                    shape[dim] = size
                    node = results[at] = _insert(graph, output, ops.pad, node, {"dim": dim, "size": size}, replace(
                        record, name=names.fresh(f"{record.name}.padded"),
                        value=Value(ir.value(results[at]).dtype, tuple(shape))))  # fmt: skip
        output.args = (tuple(results),)


def _insert(graph: fx.Graph, before: fx.Node, target: Any, x: fx.Node, kwargs: dict[str, Any], record: Info) -> fx.Node:
    with graph.inserting_before(before):
        return ir.set_info(graph.call_function(target, (x,), kwargs), record)


def _repad(compute: Layout, shape: Sequence[int]) -> Layout:
    """``compute`` at the padded ``shape``: a padded dim is whole in the compute layout."""
    for dim, (have, want) in enumerate(zip(compute.shape, shape, strict=True)):
        if have != want:
            compute = _resize(compute, dim, want)
    return compute


def _resize(layout: Layout, dim: int, size: int) -> Layout:
    assert not layout.dim_axes(dim), f"dim {dim} of {layout} is padded in storage and split in compute"
    return layout.replace(dims=[*layout.dims[:dim], (Digit(size),), *layout.dims[dim + 1 :]])
