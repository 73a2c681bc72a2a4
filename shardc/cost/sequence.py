"""The ops of one training step in the order in which a rank runs them.

Read from the forward and backward graphs that run, or from the localized joint graph that they are cut from, which
needs no cut: its forward ops, then its backward ops, with the gathers of level-3 parameters and checkpoint regions run
again before their first use in backward, as ``partition`` has them. The cut also computes cheap ops again; in the joint
graph their results are saved instead, so that its saved activations are an upper bound, and nothing is bucketed or
moved yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc.cost.again import runs_again
from shardc.ir import comm, tally
from shardc.ir import graph as ir
from shardc.ir.arena import INSIDE, KEPT, OUTSIDE, MemoryPlan
from shardc.ir.executable import BACKWARD, FORWARD, Half
from shardc.ir.garbage import uncollected
from shardc.ir.graph import Role
from shardc.ir.host import move_kind

aten = torch.ops.aten

INPUT, MOVE, START, WAIT, COMPUTE = "input", "move", "start", "wait", "compute"
# On nodes whose example values do not tell: which of its inputs' memory a node's tensor is, -1 for none of them.
ALIASED = "shardc_aliased"
# Ops that may copy, yet only move or cast what they read: they stand between a parameter and its uses.
_COPIES = {
    aten.clone.default, aten._to_copy.default, aten.index_select.default, aten.constant_pad_nd.default,
    aten.cat.default, aten.reshape.default,
}  # fmt: skip


@dataclass(frozen=True)
class Op:
    """One run of a node.

    Args:
        node: what runs.
        kind: INPUT (placeholders and constants), MOVE (a view: no work), START (of a collective, or of a copy between
            host and device), WAIT or COMPUTE.
        phase: "forward" or "backward".
        reads: positions in the sequence of the ops whose values it reads.
        gathered: it makes a whole parameter of its shards.
    """

    node: fx.Node
    kind: str
    phase: str
    reads: tuple[int, ...]
    gathered: bool


@dataclass(frozen=True)
class Sequence:
    """A step.

    Args:
        ops: in order, inputs first.
        outputs: (role, position) of each output that is a tensor of the graph.
        arena: bytes that are allocated once for the results of collectives.
        placed: the positions of the collectives whose results lie there, with which of them do.
    """

    ops: tuple[Op, ...]
    outputs: tuple[tuple[Role, int], ...]
    arena: int = 0
    placed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def starts(self) -> tuple[int, ...]:
        """Positions of the collectives, and of the copies between host and device."""
        return tuple(at for at, op in enumerate(self.ops) if op.kind == START)


@uncollected()
def of_joint(graph: fx.Graph, levels: Mapping[str, int], collectives: str = "auto") -> Sequence:
    """The step that a localized joint graph makes.

    Args:
        graph: local shapes, forward and backward, ``meta["val"]`` on every node.
        levels: reshard level of each parameter that is gathered; 3 is gathered again in backward.
        collectives: what becomes of those in checkpoint regions; see `shardc.cost.again`.
    """
    builder = _Builder(gathered_parameters(graph, levels))
    later: list[fx.Node] = []
    named: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            builder.add(node, FORWARD)
        elif node.op == "call_function":
            first, again, _ = ir.info(node).name.partition(ir.REGATHERED)
            if again and first in named:  # forward reads what it gathered first
                builder.at[node] = builder.at[named[first]]
            elif ir.info(node).origin.phase == FORWARD:
                builder.add(node, FORWARD)
                named[first] = node
            else:
                later.append(node)
    builder.forget(runs_again(graph, collectives))
    for node in later:
        builder.add(node, BACKWARD)
    return Sequence(tuple(builder.ops), builder.results(graph))


@uncollected()
def of_halves(halves: Iterable[Half], levels: Mapping[str, int]) -> Sequence:
    """The step that halves make which were cut from one joint graph: a forward and its backward, or an inference.

    Args:
        halves: in order; placeholders of the second are named as what the first saves for it.
        levels: of each parameter that is gathered.
    """
    builder, plans = _Builder({}), {}
    outputs: tuple[tuple[Role, int], ...] = ()
    for half, phase in zip(halves, (FORWARD, BACKWARD), strict=False):
        given = [node for node in ir.placeholders(half.graph) if node.name in builder.names]
        builder.at = {node: builder.names[node.name] for node in given}
        builder.gathered = gathered_parameters(half.graph, levels)
        for node in half.graph.nodes:
            if node.op != "output" and node not in builder.at:
                builder.add(node, phase)
        outputs += builder.results(half.graph)
        plans[phase] = half.plan
    arena = max(plan.size(INSIDE) for plan in plans.values()) + max(plan.size(KEPT) for plan in plans.values())
    placed = {at: _placed(op, plans[op.phase]) for at, op in enumerate(builder.ops) if op.kind == START}
    return Sequence(tuple(builder.ops), outputs, arena, placed)


def _placed(start: Op, plan: MemoryPlan) -> tuple[int, ...]:
    """Which results of a collective lie in the arena."""
    slots: Any = tally.arguments_of(start.node).get("slots") or ()
    return tuple(k for k, slot in enumerate(slots) if plan.slots and plan.slots[slot].region != OUTSIDE)


class _Builder:
    """Ops as they are added; ``at`` says where each node's value stands, ``names`` the same by name."""

    def __init__(self, gathered: dict[fx.Node, int]) -> None:
        self.gathered = gathered
        self.ops: list[Op] = []
        self.at: dict[fx.Node, int] = {}
        self.names: dict[str, int] = {}

    def forget(self, again: Set[fx.Node]) -> None:
        """Backward begins: what level 3 gathered is gone, and so is what runs ``again``."""
        gone = {node for node, level in self.gathered.items() if level == 3}
        kept = {node for node, level in self.gathered.items() if level < 3}
        for node in gone | (again - kept):
            self.at.pop(node, None)

    def add(self, node: fx.Node, phase: str) -> None:
        """``node``, after what it reads and is not there."""
        work = [node]
        while work:
            here = work[-1]
            inputs = here.all_input_nodes
            if missing := [read for read in inputs if read not in self.at]:
                work += reversed(missing)
                continue
            work.pop()
            if here in self.at:
                continue
            self.at[here] = self.names[here.name] = len(self.ops)
            reads = tuple([self.at[read] for read in inputs])
            self.ops.append(Op(here, kind_of(here), phase, reads, here in self.gathered))

    def results(self, graph: fx.Graph) -> tuple[tuple[Role, int], ...]:
        """The outputs of ``graph`` that leave the step."""
        found = [(role, x) for role, x in ir.outputs(graph) if role.kind != "saved" and isinstance(x, fx.Node)]
        return tuple((role, self.at[x]) for role, x in found)


def kind_of(node: fx.Node) -> str:
    """What a node does to a rank's time."""
    if node.op != "call_function":
        return INPUT
    if tally.collective_kind(node) is not None or move_kind(node) is not None:
        return START
    if node.target is comm.WAIT:
        return WAIT
    return MOVE if node.target is getitem or aliased(node) is not None else COMPUTE


def aliased(node: fx.Node) -> fx.Node | None:
    """The operand whose memory ``node``'s tensor is, or None where it has its own."""
    if (said := node.meta.get(ALIASED)) is not None:
        return node.all_input_nodes[said] if said >= 0 else None
    made, target = node.meta.get("val"), node.target
    if not isinstance(made, Tensor) or not node.all_input_nodes:
        return None
    first = node.all_input_nodes[0]
    if target is aten.reshape.default:
        return first if _reshapes_in_place(first.meta["val"], made) else None
    if _is_view(target):
        return first
    mine = made.untyped_storage()._cdata
    for read in node.all_input_nodes:
        theirs = read.meta.get("val")
        if isinstance(theirs, Tensor) and theirs.untyped_storage()._cdata == mine:
            return read
    return None


def _reshapes_in_place(x: Any, made: Tensor) -> bool:
    """Whether a reshape of ``x`` to the shape of ``made`` is a view: no copy where the strides leave it a choice."""
    if x.is_contiguous():
        return True
    sizes = (*x.shape, *x.stride(), *made.shape)
    if not all(isinstance(size, int) for size in sizes):  # known at run time: the longer life is safe
        return True
    return _viewable(tuple(x.shape), x.stride(), tuple(made.shape))


@lru_cache(maxsize=4096)
def _viewable(shape: tuple[int, ...], stride: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        torch.empty_strided(shape, stride, device="meta").view(to)
    except RuntimeError:
        return False
    return True


@lru_cache(maxsize=4096)
def _is_view(target: Any) -> bool:
    """Whether ``target`` makes one tensor that lies in its operand's memory, whatever the operand."""
    schema = getattr(target, "_schema", None)
    if schema is None or len(schema.returns) != 1:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and not alias.is_write and str(schema.returns[0].type) == "Tensor"


def gathered_parameters(graph: fx.Graph, levels: Mapping[str, int]) -> dict[fx.Node, int]:
    """The nodes that hold gathered parameters, and the level at which: made of parameters alone, by a collective."""
    alone: dict[fx.Node, int] = {}
    whole: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            role, name = ir.info(node).role, ir.info(node).name
            level = levels.get(name, 0) if role is not None and role.kind == "param" else 0
            level = 3 if name.endswith(ir.KEPT) else level
            if level:
                alone[node] = level
            continue
        if node.op != "call_function":
            continue
        reads = [read for read in node.all_input_nodes if not is_coordinate(read)]
        if not reads or any(read not in alone for read in reads):
            continue
        kind = kind_of(node)
        if kind == COMPUTE and node.target not in _COPIES:
            continue
        alone[node] = min(alone[read] for read in reads)
        if kind == START or any(read in whole for read in reads):
            whole[node] = min(alone[node], 2) if ir.info(node).name.endswith(ir.KEPT) else alone[node]
    return whole


def is_coordinate(node: fx.Node) -> bool:
    """Whether ``node`` is the rank's own index along some axes."""
    role = ir.info(node).role if node.op == "placeholder" else None
    return role is not None and role.kind == "coordinate"
