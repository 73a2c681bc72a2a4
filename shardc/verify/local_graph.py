"""Checks of local graphs: local shapes, host memory, process groups of the mesh, waits.

`Collective` is the record of a collective by which `shardc.verify.identity` accepts ops that replace it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import getitem

import torch
from torch import fx

from shardc.ir import grammar
from shardc.ir.comm import WAIT, move_kind
from shardc.ir.comm_volume import arguments_of, collective_kind, group_axes
from shardc.ir.graph import Value, ancestors, info, outputs
from shardc.verify.subject import Broken, Subject

aten = torch.ops.aten
Fingerprint = bytes | list[bytes]  # of a value; of a coalesced collective, one for each of its results
Fingerprints = Mapping[fx.Node, Fingerprint]
# Reduce op of a collective -> local ops that may combine the ranks' terms.
_COMBINING: dict[str, tuple[object, ...]] = {
    "sum": (aten.sum.dim_IntList, aten.add.Tensor),
    "avg": (aten.mean.dim, aten.sum.dim_IntList, aten.add.Tensor),
    "max": (aten.amax.default, aten.maximum.default),
    "min": (aten.amin.default, aten.minimum.default),
    "product": (aten.prod.dim_int, aten.mul.Tensor),
}


@dataclass(frozen=True)
class Collective:
    """The mathematical result of a collective of one tensor, as fingerprints. The verifier uses it to recognise other
    ops that compute the same value.

    Args:
        value, operand: fingerprints (`shardc.verify.identity`) of its result and of its operand.
        group: name of its process group.
        reduces: its reduce op; "" if it does not reduce.
    """

    value: Fingerprint
    operand: Fingerprint
    group: str
    reduces: str

    def is_implemented_by(self, result: fx.Node, prints: Fingerprints) -> bool:
        """Return whether other ops compute in ``result`` what this collective computes: from its operand only, through
        collectives of its group and reduce op.
        """
        sent, reduced = False, not self.reduces
        nodes = ancestors([result], lambda node: prints[node] == self.operand)
        for node in (node for node in nodes if prints[node] != self.operand):
            if node.op != "call_function":
                return False
            if collective_kind(node) is not None:
                arguments = arguments_of(node)
                if arguments["group_name"] != self.group or arguments.get("reduce_op", self.reduces) != self.reduces:
                    return False
                sent, reduced = True, reduced or "reduce_op" in arguments
            reduced |= node.target in _COMBINING.get(self.reduces, ())
        return sent and reduced


def collectives(graph: fx.Graph, prints: Fingerprints) -> dict[str, Collective]:
    """Return the result of each collective of one tensor in ``graph``: name of its wait node -> `Collective`."""
    out = {}
    for wait in graph.nodes:
        start = wait.args[0] if wait.target is WAIT else None
        if start is None or start.target is getitem or collective_kind(start) is None:
            continue
        (_, operand), *rest = arguments_of(start).items()
        attributes = dict(rest)
        if isinstance(operand, fx.Node):
            record = Collective(
                prints[wait], prints[operand], attributes["group_name"], attributes.get("reduce_op", "")
            )
            out[info(wait).name] = record
    return out


def local_shapes(subject: Subject) -> Broken:
    """Check that all shapes of a graph are local, those of one rank's shards. No tensor has a layout (of a global
    value) any more, and outputs fit their roles.

    - No tensor has a layout.
    - An output has the local shape of its role's layout.
    - Without one, a gradient or updated buffer has the shape of the stored tensor.
    """
    for node in subject.nodes[:-1]:
        for tensor in info(node).tensors:
            if tensor.layout is not None:
                yield node, f"a local tensor has a layout: {tensor}"
    for role, node in outputs(subject.gm.graph):
        value = info(node).value if isinstance(node, fx.Node) else None
        owner = subject.owner_value(role.kind, role.name)
        wanted = role.layout.local_shape if role.layout is not None else owner.shape if owner is not None else None
        if isinstance(value, Value) and wanted is not None and wanted != value.shape:
            yield subject.nodes[-1], f"{role.kind} {role.name} is {value}, and is wanted as {list(wanted)}"


def host_memory(subject: Subject) -> Broken:
    """Check that only moves between host and device access host memory.

    - ``to_device`` reads from the host, ``to_host`` writes to it; a wait changes nothing.
    - No other op has an operand or result on the host.
    - A value on the host that a forward saves is one that it moved there.
    - A gradient or buffer is returned on the host only if the stored tensor is there.
    """
    on_host = {node for node in subject.nodes[:-1] if any(value.host for value in info(node).tensors)}
    for node in subject.calls:
        kind = move_kind(node)
        if kind is None and node not in on_host and on_host.isdisjoint(node.all_input_nodes):
            continue
        reads = {value.host for x in node.all_input_nodes for value in info(x).tensors}
        makes = {value.host for value in info(node).tensors}
        if kind is not None:
            if (reads, makes) != ({kind == "to_device"}, {kind == "to_host"}):
                yield (
                    node,
                    f"it does not move {'from the host to the device' if kind == 'to_device' else 'to the host'}",
                )
        elif node.target is WAIT:
            if reads != makes:
                yield node, "a wait moves nothing between host and device"
        elif True in reads | makes:
            yield node, "it computes with what lies on the host"
    for role, node in outputs(subject.gm.graph):
        value = info(node).value if isinstance(node, fx.Node) else None
        owner = subject.owner_value(role.kind, role.name)
        if role.kind == "saved" and isinstance(node, fx.Node) and (node.op == "placeholder" or node.target is WAIT):
            continue  # a parameter, or what the plan keeps on the host: backward moves it
        if role.kind == "grad" and owner is None:
            continue  # a backward alone does not take every parameter
        if isinstance(value, Value) and value.host and (role.kind == "saved" or not (owner and owner.host)):
            yield subject.nodes[-1], f"{role.kind} {role.name} is {value}, on the host"


def groups(subject: Subject) -> Broken:
    """Check that every collective is over a process group of the mesh.

    - The group's name lists axes of the mesh.
    - Its ``group_size``, if it has that argument, is the number of ranks in the group.
    """
    for node in subject.calls:
        if collective_kind(node) is None:
            continue
        group = arguments_of(node)["group_name"]
        axes = group_axes(group, subject.mesh)
        if axes is None:
            yield node, f"{group!r} is no group of the mesh {subject.mesh}"
            continue
        ranks = prod(subject.mesh.size(axis) for axis in axes)
        group_size = arguments_of(node).get("group_size", ranks)
        if group_size != ranks:
            yield node, f"it says {group_size} ranks, the group {group!r} has {ranks}"


def waits(subject: Subject) -> Broken:
    """Check that every collective, and every move between host and device, is waited for.

    - Each of its results has a user.
    - Every user is a wait: nothing else reads memory that is still being written.
    """
    for node in subject.calls:
        if collective_kind(node) is None and move_kind(node) is None:
            continue
        started = [user for user in node.users if user.target is operator.getitem] or [node]
        for result in started:
            users = list(result.users)
            if not users:
                yield result, "nothing waits for it"
            for user in users:
                if user.target is not WAIT:
                    shown = "the outputs" if user.op == "output" else grammar.name_text(info(user).name)
                    yield result, f"{shown} uses it before it is waited on"
