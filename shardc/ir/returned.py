"""How a model's outputs alias on one device, as autograd sees it: which share memory, which are views, and which values
autograd saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem

import torch
from torch import Tensor, fx

from shardc.ir import graph as ir

# Key of the output node's ``meta`` in a captured graph: indices of outputs that are the same tensor as an earlier one.
AGAIN = "shardc_again"
_DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True)
class Memory:
    """Which memory an output has on one device, whether it is a view by strides, and whether torch refuses to change it
    in place.

    Args:
        number: equal for outputs that share memory.
        view: whether it is a view by strides, which a program computes as a copy.
        fixed: whether torch refuses in-place changes: a view made by a custom autograd function.
    """

    number: int
    view: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class Returned:
    """How one output of the model aliases other tensors on one device, and which backward passes read its values.

    Args:
        first: index of the first output in the same memory, which may be its own.
        same: index of an earlier output that is the same tensor object; None if there is none.
        of: name of the parameter, buffer or input that owns its memory; None if the model allocates it.
        itself: whether it is the parameter, buffer or input ``of``, and not a view of it.
        of_output: index of the nearest output that it is a view of, detached or not; None if there is none.
        view: whether it is a view to autograd.
        part: whether torch refuses in-place changes: it is one of several views from one op, or a view made by a custom
            autograd function.
        overlaps: whether it shares elements with another output that is another tensor, or with ``of``.
        read_by: indices of the outputs whose backward reads its values, and is refused by autograd after a change.
        leads_to: indices of other outputs computed from it, whose gradients flow through it.
    """

    first: int
    same: int | None = None
    of: str | None = None
    itself: bool = False
    of_output: int | None = None
    view: bool = False
    part: bool = False
    overlaps: bool = False
    read_by: tuple[int, ...] = ()
    leads_to: tuple[int, ...] = ()


def returned(graph: fx.Graph, memories: Sequence[Memory], owners: Mapping[int, str]) -> tuple[Returned, ...]:
    """Return a `Returned` for each output of a captured joint graph, in order. It says how the output aliases other
    tensors when the model runs on one device.

    The result includes which backwards read an output's values, which autograd saves.

    Args:
        memories: memory of each tensor output. The graph does not show it: capture may turn a view into a copy or back.
        owners: names of the parameters, buffers and inputs in these memories.
    """
    outputs = sorted((role.index, x) for role, x in ir.outputs(graph) if role.kind == "output")
    tensors = {index: x for index, x in outputs if isinstance(x, fx.Node) and _memory(x) is not None}
    memory_at = dict(zip(tensors, memories, strict=True))
    repeated: set[int] = ir.output_node(graph).meta.get(AGAIN, set())
    first_in: dict[int, int] = {}  # number of a memory -> the first output in it
    first_of: dict[fx.Node, int] = {}  # node -> the first output that it is
    same: dict[int, int] = {}
    for index, x in tensors.items():
        # Capture detached a repeated output, so that it has no gradient of its own.
        node = x.all_input_nodes[0] if index in repeated and x.target is _DETACH else x
        first_in.setdefault(memory_at[index].number, index)
        if first_of.setdefault(node, index) != index:
            same[index] = first_of[node]
    chains = {index: [x, *_viewed(x)] for index, x in tensors.items()}
    distinct = [index for index in tensors if index not in same]
    read = dict(_reads(graph))
    # The nodes through which an output's gradient flows.
    made_of = {index: ir.ancestors([x], lambda node: node.target is _DETACH) for index, x in outputs if index in read}

    def describe(index: int, x: fx.Node) -> Returned:
        memory, above = memory_at[index], chains[index][1:]
        number = memory.number
        bases = (first_of[y] for y in above if y in first_of)
        others = (at for at in distinct if at != same.get(index, index) and memory_at[at].number == number)
        return Returned(
            first=first_in[number],
            same=same.get(index),
            of=owners.get(number),
            itself=x.op == "placeholder" and number in owners,
            of_output=next((base for base in bases if memory_at[base].number == number), None),
            view=memory.view or bool(above) and x.target is not _DETACH,
            part=memory.fixed or _has_siblings(chains[index]),
            overlaps=number in owners or any(not _disjoint(chains[index], chains[at]) for at in others),
            read_by=tuple(at for at, numbers in read.items() if _memory(x) in numbers),
            leads_to=tuple(at for at, nodes in made_of.items() if index in made_of and at != index and x in nodes),
        )

    return tuple(describe(index, tensors[index]) if index in tensors else Returned(index) for index, _ in outputs)


def _memory(x: fx.node.Argument) -> int | None:
    """Return an id of the memory of the tensor ``x``; tensors that share memory have equal ids. None for a
    non-tensor.
    """
    val = x.meta.get("val") if isinstance(x, fx.Node) else None
    return val.untyped_storage()._cdata if isinstance(val, Tensor) else None


def _viewed(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors that ``node`` is a view of, as autograd sees it: first its base, then the base's base, and so
    on to the owner of the memory.
    """
    memory = _memory(node)
    while node.op == "call_function" and node.all_input_nodes and _stays_view(node):
        node = node.all_input_nodes[0]
        if node.op == "call_function" and isinstance(node.meta.get("val"), tuple | list):
            node = node.all_input_nodes[0]
        if _memory(node) != memory:
            return
        yield node


def _stays_view(node: fx.Node) -> bool:
    """Return whether ``node`` comes from an op of the model that is a view to autograd. An op that is no view may be
    decomposed into ops of which the last, ``node``, is a view.
    """
    op = node.meta.get("original_aten")
    return not isinstance(op, torch._ops.OpOverload) or op.is_view


def _has_siblings(nodes: Sequence[fx.Node]) -> bool:
    """Return whether one of ``nodes``, a view and the chain of tensors that it is a view of, is one of several results
    of one op, such as ``split``. The owner of the memory, the last node, does not count.

    Args:
        nodes: the view and the tensors that it is a view of, the owner of the memory last.
    """
    return any(x.target is getitem for x in nodes[:-1])


def _disjoint(nodes: Sequence[fx.Node], others: Sequence[fx.Node]) -> bool:
    """Return whether two views come from different results of one op, such as two pieces of a ``split``, and so cannot
    overlap.

    Args:
        nodes, others: each view, followed by the tensors that it is a view of.
    """
    parts = [{x.args[0]: x.args[1] for x in chain[:-1] if x.target is getitem} for chain in (nodes, others)]
    return any(parts[1].get(op, at) != at for op, at in parts[0].items())


def _reads(graph: fx.Graph) -> Iterator[tuple[int, set[int]]]:
    """Yield (index of an output, memory ids) for the backward that starts at the output's gradient: the memories of the
    forward values that this backward reads.
    """
    sources: dict[fx.Node, set[fx.Node]] = {node: {node} for node in ir.placeholders(graph, "tangent")}
    saved: dict[fx.Node, set[int]] = {}  # backward value without a tangent -> memory that it is computed from
    read: dict[fx.Node, set[int]] = {node: set() for node in sources}
    for node in graph.nodes:
        if node.op != "call_function" or ir.info(node).origin.phase != "backward":
            continue
        tangents: set[fx.Node] = set().union(*(sources.get(x, ()) for x in node.all_input_nodes))
        memories: set[int] = set()
        for x in node.all_input_nodes:
            if x not in sources:
                memories |= saved[x] if x in saved else _saved_memory(x)
        if tangents:
            sources[node] = tangents
            for tangent in tangents:
                read[tangent] |= memories
        else:
            saved[node] = memories
    for node, memories in read.items():
        yield ir.role(node).index, memories


def _saved_memory(node: fx.Node) -> set[int]:
    """Return the ids of the memories that autograd saves so that backward can read ``node``: its own memory or, in a
    checkpoint region, those of the region's inputs.
    """

    def is_saved(x: fx.Node) -> bool:
        origin = ir.info(x).origin
        return x.op != "call_function" or not origin.region or origin.policy == "must_save"

    return {memory for x in ir.ancestors([node], is_saved) if is_saved(x) and (memory := _memory(x)) is not None}
