"""What the outputs of a model are to autograd on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir import graph as ir

AGAIN = "shardc_again"  # on the output node of a captured graph: outputs that are the very tensor of an earlier one


@dataclass(frozen=True)
class Returned:
    """An output on one device: whose memory it is, and which backwards read its values.

    Args:
        first: index of the first output in the same memory, which may be its own.
        same: whether it is that very tensor.
        of: the name of the parameter, buffer or input in whose memory it is; None where the model allocates it.
        part: whether it is one of several views that one op makes; torch lets nobody change these in place.
        read_by: indices of the outputs whose backward reads its values: autograd refuses that one after a change.
        leads_to: indices of other outputs that are made of it, whose gradients it takes part in.
    """

    first: int
    same: bool = False
    of: str | None = None
    part: bool = False
    read_by: tuple[int, ...] = ()
    leads_to: tuple[int, ...] = ()


def returned(graph: fx.Graph) -> tuple[Returned, ...]:
    """What each output of a captured joint graph is, in the order of their indices.

    The values that backward ops read there are those that autograd saves, since the ops are its formulas.
    """
    outputs = sorted((role.index, x) for role, x in ir.outputs(graph) if role.kind == "output")
    again: set[int] = ir.output_node(graph).meta.get(AGAIN, set())
    owners = {memory: ir.info(node).name for node in ir.placeholders(graph) if (memory := _memory(node))}
    read = {role.index: memories for role, memories in _reads(graph)}
    made_of = _made_of([(index, x) for index, x in outputs if index in read])
    found: list[Returned] = []
    firsts: dict[int, int] = {}
    for index, x in outputs:
        memory = _memory(x)
        if memory is None:
            found.append(Returned(index))
            continue
        found.append(
            Returned(
                firsts.setdefault(memory, index),
                index in again,
                owners.get(memory),
                _is_part(x),
                tuple(at for at, memories in read.items() if memory in memories),
                tuple(at for at, nodes in made_of.items() if index in made_of and at != index and x in nodes),
            )
        )
    return tuple(found)


def _made_of(outputs: Sequence[tuple[int, Any]]) -> dict[int, set[fx.Node]]:
    """By index of an output, the nodes that gradients from it flow through."""
    found: dict[int, set[fx.Node]] = {}
    for index, x in outputs:
        work, seen = [x] if isinstance(x, fx.Node) else [], set()
        while work:
            node = work.pop()
            if node not in seen:
                seen.add(node)
                work += [] if node.target is torch.ops.aten.detach.default else node.all_input_nodes
        found[index] = seen
    return found


def _memory(x: Any) -> int | None:
    """What is equal of tensors that share memory; None of what is no tensor."""
    val = x.meta.get("val") if isinstance(x, fx.Node) else None
    return val.untyped_storage()._cdata if isinstance(val, Tensor) else None


def _is_part(node: fx.Node) -> bool:
    """Whether ``node`` is a view, or a view of one, that an op makes several of."""
    while node.op == "call_function" and node.all_input_nodes:
        before = node.all_input_nodes[0]
        if node.target is getitem:
            memories = {_memory(x) for x in (node, *before.all_input_nodes[:1])}
            return len(memories) == 1
        if _memory(before) != _memory(node):
            return False
        node = before
    return False


def _reads(graph: fx.Graph) -> Iterator[tuple[ir.Role, set[int]]]:
    """By tangent, the memory of the forward's values that the backward from it reads."""
    sources: dict[fx.Node, set[fx.Node]] = {node: {node} for node in ir.placeholders(graph, "tangent")}
    saved: dict[fx.Node, set[int]] = {}  # what backward's values read, by which they are made
    read: dict[fx.Node, set[int]] = {node: set() for node in sources}
    for node in graph.nodes:
        if node.op != "call_function" or ir.info(node).origin.phase != "backward":
            continue
        tangents: set[fx.Node] = set().union(*(sources.get(x, ()) for x in node.all_input_nodes))
        memories: set[int] = set()
        for x in node.all_input_nodes:
            if x not in sources:
                memories |= saved[x] if x in saved else _kept(x)
        if tangents:
            sources[node] = tangents
            for tangent in tangents:
                read[tangent] |= memories
        else:
            saved[node] = memories
    for node, memories in read.items():
        yield ir.role(node), memories


def _kept(node: fx.Node) -> set[int]:
    """The memory that autograd keeps so that backward has ``node``: in a checkpoint region, of what that takes."""
    work, seen, found = [node], set(), set()
    while work:
        x = work.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.op == "call_function" and ir.info(x).origin.region:
            work += x.all_input_nodes
        elif (memory := _memory(x)) is not None:
            found.add(memory)
    return found
