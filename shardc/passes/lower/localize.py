"""Localize: lowers the global graph to the program of one rank, at local shapes.

Every op is lowered to local tensors by its rule, every step of a reshard by `lower_collective`. The rank enters only
through ``coordinate`` placeholders, so all ranks have the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc._compat import FakeTensorMode, LazyGraphModule
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.comm import group_name
from shardc.ir.graph import Info, Origin, Role
from shardc.ir.mesh import Mesh
from shardc.ir.module_paths import is_in
from shardc.ir.rewriter import erase_dead_code
from shardc.passes import local_regions
from shardc.passes.lower.collectives import lower_collective, step_of
from shardc.passes.op_calls import call_of, operands_of
from shardc.passes.padded_values import Calls
from shardc.rules import find_rule, spec_of
from shardc.rules.rule import Local

aten = torch.ops.aten
_MOVES = (*ops.COLLECTIVES, *ops.LOCAL_MOVES)


# Dtypes that not every backend sends.
_SENT_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Localize:
    """Lowers the global graph to aten and ``_c10d_functional`` ops at local shapes, in a new graph.

        %w: f32[8@dp,4]                           %w: f32[4,4]
        %w.full: f32[8,4] = all_gather(%w)    ->  %w.full: f32[8,4] = wait(all_gather_into_tensor(%w, 2, "dp"))

    *Requires:* layouts agree at every use and every change of layout is a step. *Ensures:* the same graph on every
    rank; placeholders in the same order, coordinates after the other primals; ``Value.layout`` is None and
    ``Value.shape`` local; ``node.meta["val"]`` are fake local tensors.

    Args:
        mesh: the mesh of the layouts.
        fake_mode: mode of the captured graph's fake values.
        device: device of the coordinates.
    """

    mesh: Mesh
    fake_mode: FakeTensorMode
    device: torch.device
    name = "localize"
    requires = ("collectives",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        emitter = Emitter(self.mesh, self.fake_mode, self.device)
        env: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            emitter.at(node)
            env[node] = self._emit_node(node, env, emitter)
        return LazyGraphModule(gm, emitter.finish())

    def _emit_node(self, node: fx.Node, env: dict[fx.Node, Any], emitter: Emitter) -> Any:
        """Emits the local form of one node of the global graph; returns the local node, or a list for several results.
        ``env``: global node -> what was returned for it.
        """
        if node.op == "placeholder":
            return emitter.placeholder(node)
        if node.op == "get_attr":
            return emitter.attribute(node)
        if node.op == "output":
            return emitter.output(node, env)
        if node.target in _MOVES:
            return emitter.named(_emit_move(node, env[node.args[0]], emitter))
        if node.target is getitem:
            source, index = env[node.args[0]], node.args[1]
            if isinstance(source, (tuple, list)):  # the rule has emitted a node for each result
                return source[index]
            return emitter.named(emitter.call(getitem, source, index))
        if node.target in local_regions.OPS:
            return local_regions.emit(node, [env[x] for x in operands_of(node)], emitter)
        if node.target in (ops.pad, ops.unpad):
            return emitter.named(_resize(node, env[node.args[0]], emitter))
        return emitter.named(_emit_op(node, env, emitter))


def _emit_move(node: fx.Node, x: Any, emitter: Emitter) -> Any:
    """Emits a change of the layout of ``x`` and returns the result; float8 numbers are sent as bytes, since not every
    backend sends float8.
    """
    dtype = ir.value(node).dtype
    if dtype not in _SENT_AS_BYTES or node.target in ops.LOCAL_MOVES:
        return lower_collective(step_of(node), x, emitter)
    sent = emitter.call(aten.view.dtype, x, torch.uint8)
    return emitter.call(aten.view.dtype, lower_collective(step_of(node), sent, emitter), dtype)


def _emit_op(node: fx.Node, env: dict[fx.Node, Any], emitter: Emitter) -> Any:
    """Emits the local form of one op by its rule; returns its result or results. An op without a rule has only
    replicated operands, so that global and local shapes are the same, and is copied.

    Args:
        env: global node -> its local node, or a list for several results.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
    rule = find_rule(node.target)
    if rule is None:
        return emitter.call(node.target, *args, **kwargs)
    call = call_of(node)
    spec = spec_of(call)
    assert spec is not None
    results = tuple(value.layout for value in ir.info(node).tensors if value.layout is not None)
    operands = tuple(ir.layout(x) for x in operands_of(node))
    return rule.localize(Local(emitter, call, spec, operands, results, args, kwargs, partial(_true_size, node)))


def _true_size(node: fx.Node, dim: int, size: int) -> int:
    """Returns the size without padding of dim ``dim`` of the operands of ``node``; ``size`` is its size with padding.
    The dims of all operands are numbered consecutively, those of the first operand first.
    """
    sizes = ir.info(node).true_sizes  # None: nothing is padded
    return size if sizes is None else sizes[dim]


def _resize(node: fx.Node, x: Any, emitter: Emitter) -> Any:
    """Emits a ``pad`` or ``unpad`` of a dim that no axis splits, and returns the local result."""
    dim, size = node.kwargs["dim"], node.kwargs["size"]  # ``size``: of the result
    shape = emitter.shape(x)
    if node.target is ops.unpad:
        return emitter.call(aten.slice.Tensor, x, dim, 0, size)
    widths = [0, 0] * (len(shape) - dim - 1) + [0, size - shape[dim]]  # (before, behind) each dim, the last one first
    return emitter.call(aten.constant_pad_nd.default, x, widths, 0)


class Emitter(Calls):
    """Builder of the local graph, through which rules and steps emit their nodes.

    Args:
        mesh: the mesh of the layouts.
        fake_mode, device: mode and device of fake values.
    """

    def __init__(self, mesh: Mesh, fake_mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(None, fake_mode, device)
        self.mesh = mesh
        self._numbers: dict[str, fx.Node] = {}  # name -> placeholder of a number that the runtime passes
        self._last_primal: fx.Node | None = None  # the last placeholder that is no tangent

    def at(self, node: fx.Node) -> None:
        """Sets the global node that is now being lowered: the local nodes that are emitted next get its record (name
        and provenance).
        """
        self.record = ir.info(node) if node.op != "output" else Info("", None)  # an output node has no record
        self.traced = node

    # --- interface of `shardc.rules` builders

    def coordinate(self, axes: tuple[str, ...]) -> fx.Node:
        """Returns the placeholder of this rank's index along ``axes``, int64 [1]."""
        name = ",".join(axes)
        return self._runtime_number(f"coordinate.{name}", "coordinate", name)

    def key(self) -> fx.Node:
        """Returns the placeholder of the key of random draws, int64 [1]."""
        return self._runtime_number("key", "key", "key")

    def _runtime_number(self, name: str, kind: str, role_name: str) -> fx.Node:
        """Returns the placeholder ``name`` of a number (int64 [1]) that the runtime passes to the graph. It is created
        at the first call. ``kind`` ("coordinate" or "key") and ``role_name`` are its role.
        """
        if name not in self._numbers:
            # Behind the other primals, and before the tangents, which come last among the placeholders.
            with self.graph.inserting_after(self._last_primal) if self._last_primal else self.graph.inserting_before():
                node = self.graph.placeholder(f"primals_{kind}_{len(self._numbers)}")
            with self.rewriter.fake_mode:
                node.meta["val"] = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._last_primal = node
            self._record(node, name, Info("", None, Origin(), Role(kind, role_name, len(self._numbers))))
            self._numbers[name] = node
        return self._numbers[name]

    def group(self, axes: tuple[str, ...]) -> tuple[int, str]:
        """Returns (number of ranks along ``axes``, name of the process group along these axes)."""
        return prod(self.mesh.size(axis) for axis in axes), group_name(axes)

    # --- inputs and outputs of the graph

    def placeholder(self, node: fx.Node) -> fx.Node:
        """Emits the placeholder ``node`` at its local shape; returns the local node."""
        local = self.graph.placeholder(node.name)
        record, val = ir.info(node), node.meta["val"]
        if isinstance(val, Tensor):
            shape = ir.layout(node).local_shape
            with self.rewriter.fake_mode:
                val = torch.empty(shape, dtype=val.dtype, device=val.device)
        local.meta["val"] = val
        if record.role is None or record.role.kind != "tangent":
            self._last_primal = local
        self._record(local, record.name, record)
        return local

    def attribute(self, node: fx.Node) -> fx.Node:
        """Emits ``node``, a constant of the global graph; returns the local node."""
        local = self.graph.get_attr(node.target)
        local.meta["val"] = node.meta["val"]
        self._record(local, ir.info(node).name, ir.info(node))
        return local

    def named(self, result: Any) -> Any:
        """Gives ``result``, the local node that stands for the current global node, the name of that global node;
        returns it.
        """
        if isinstance(result, fx.Node) and result.op == "call_function":
            record = ir.info(result)
            # It was emitted as ``name.op``. Any other name is that of an operand, which is returned as it is.
            if record.name != self.record.name and is_in(record.name, self.record.name):
                ir.update(result, name=self.names.fresh(self.record.name), is_kept_part=self.record.is_kept_part)
        return result

    def output(self, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        """Emits the output node, with its roles, and returns it.

        Args:
            node: the output of the global graph.
            env: global node -> its local node.
        """
        results = fx.map_arg(node.args[0], lambda n: env[n])
        output = self.graph.output(tuple(results))
        output.meta[ir.ROLES] = node.meta[ir.ROLES]
        return output

    def finish(self) -> fx.Graph:
        """Returns the local graph without dead code."""
        erase_dead_code(self.graph)
        self.graph.lint()
        return self.graph

    def _record(self, node: fx.Node, name: str, like: Info) -> None:
        """Gives ``node`` a record (`Info`) like ``like``, with a fresh name and its local type."""
        ir.set_info(node, replace(like, name=self.names.fresh(name), value=ir.value_of(node.meta["val"])))
