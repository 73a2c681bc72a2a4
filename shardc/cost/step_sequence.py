"""The ops of one training step in the order in which a rank runs them.

`of_halves` reads the forward and backward graphs that run. `of_joint` reads the localized joint graph, before it is
partitioned: forward ops, then backward ops, with gathers of level-3 parameters and checkpointed regions repeated before
their first use in backward. It differs from what runs: partitioning also recomputes cheap ops, so that here the saved
activations are an upper bound, and collectives are neither bucketed nor reordered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc.cost.recompute import runs_again
from shardc.ir import comm, comm_volume
from shardc.ir import graph as ir
from shardc.ir.arena import INSIDE, KEPT, OUTSIDE, MemoryPlan
from shardc.ir.comm import move_kind
from shardc.ir.executable import BACKWARD, FORWARD, Half
from shardc.ir.gc_control import uncollected
from shardc.ir.graph import Role
from shardc.ir.op_traits import CAST, COPIES, is_view

aten = torch.ops.aten

INPUT, MOVE, START, WAIT, COMPUTE = "input", "move", "start", "wait", "compute"
# Meta key of nodes whose example values do not show aliasing: index of the input whose memory is shared; -1 for none.
ALIASED = "shardc_aliased"


@dataclass(frozen=True)
class Op:
    """One execution of a node.

    Args:
        node: the node.
        kind: INPUT (placeholders and constants), MOVE (a view: no work), START (of a collective or a host copy), WAIT
            or COMPUTE.
        phase: "forward" or "backward".
        reads: positions of the ops whose values it reads.
        gathered: its result is an unsharded parameter.
    """

    node: fx.Node
    kind: str
    phase: str
    reads: tuple[int, ...]
    gathered: bool


@dataclass(frozen=True)
class Sequence:
    """The ops of a step.

    Args:
        ops: in order, inputs first.
        outputs: (role, position) of each output that is a tensor of the graph.
        arena: bytes allocated once for results of collectives.
        placed: position of a collective -> the indices of its results that are in the arena.
    """

    ops: tuple[Op, ...]
    outputs: tuple[tuple[Role, int], ...]
    arena: int = 0
    placed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def starts(self) -> tuple[int, ...]:
        """The positions of collectives and host copies."""
        return tuple(at for at, op in enumerate(self.ops) if op.kind == START)


@uncollected()
def of_joint(graph: fx.Graph, levels: Mapping[str, int], collectives: str = "auto") -> Sequence:
    """Return the step of a localized joint graph.

    Args:
        graph: has local shapes, forward and backward, and ``meta["val"]`` on every node.
        levels: FSDP level of each gathered parameter; those of level 3 are gathered again in backward.
        collectives: which collectives of checkpointed regions are repeated (`shardc.cost.recompute`).
    """
    builder = _Builder(gathered_parameters(graph, levels))
    later: list[fx.Node] = []
    named: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            builder.add(node, FORWARD)
        elif node.op == "call_function":
            record = ir.info(node)
            if record.regathers in named:  # forward reads its first gather
                builder.at[node] = builder.at[named[record.regathers]]
            elif record.origin.phase == FORWARD:
                builder.add(node, FORWARD)
                named[record.name] = node
            else:
                later.append(node)
    builder.forget(runs_again(graph, collectives))
    for node in later:
        builder.add(node, BACKWARD)
    return Sequence(tuple(builder.ops), builder.results(graph))


@uncollected()
def of_halves(halves: Iterable[Half], levels: Mapping[str, int]) -> Sequence:
    """Return the step of a forward and its backward graph, or of an inference graph.

    Args:
        halves: in order; placeholders of the backward have the names of the values that the forward saves.
        levels: FSDP level of each gathered parameter.
    """
    builder, plans = _Builder({}), {}
    outputs: tuple[tuple[Role, int], ...] = ()
    for half, phase in zip(halves, (FORWARD, BACKWARD), strict=False):
        saved = [node for node in ir.placeholders(half.graph) if node.name in builder.names]
        builder.at = {node: builder.names[node.name] for node in saved}
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
    """Return the indices of a collective's results that are in the arena."""
    slots: Any = comm_volume.arguments_of(start.node).get("slots") or ()
    return tuple(k for k, slot in enumerate(slots) if plan.slots and plan.slots[slot].region != OUTSIDE)


class _Builder:
    """Collects the ops of a step.

    Attributes:
        gathered: node with an unsharded parameter -> FSDP level.
        at, names: node, and node's name -> position of its op.
    """

    def __init__(self, gathered: dict[fx.Node, int]) -> None:
        self.gathered = gathered
        self.ops: list[Op] = []
        self.at: dict[fx.Node, int] = {}
        self.names: dict[str, int] = {}

    def forget(self, recomputed: Set[fx.Node]) -> None:
        """Drop the positions of values that backward gathers or recomputes."""
        resharded = {node for node, level in self.gathered.items() if level == 3}
        unsharded = {node for node, level in self.gathered.items() if level < 3}
        for node in resharded | (recomputed - unsharded):
            self.at.pop(node, None)

    def add(self, node: fx.Node, phase: str) -> None:
        """Append ``node`` to the ops of the step, after its inputs that have not been appended yet."""
        work = [node]
        while work:
            current = work[-1]
            inputs = current.all_input_nodes
            if missing := [read for read in inputs if read not in self.at]:
                work += reversed(missing)
                continue
            work.pop()
            if current in self.at:
                continue
            self.at[current] = self.names[current.name] = len(self.ops)
            reads = tuple([self.at[read] for read in inputs])
            self.ops.append(Op(current, kind_of(current), phase, reads, current in self.gathered))

    def results(self, graph: fx.Graph) -> tuple[tuple[Role, int], ...]:
        """Return the outputs of ``graph`` that leave the step."""
        outputs = [(role, x) for role, x in ir.outputs(graph) if role.kind != "saved" and isinstance(x, fx.Node)]
        return tuple((role, self.at[x]) for role, x in outputs)


def kind_of(node: fx.Node) -> str:
    """Return the kind of a node (see `Op`)."""
    if node.op != "call_function":
        return INPUT
    if comm_volume.collective_kind(node) is not None or move_kind(node) is not None:
        return START
    if node.target is comm.WAIT:
        return WAIT
    return MOVE if node.target is getitem or aliased(node) is not None else COMPUTE


def aliased(node: fx.Node) -> fx.Node | None:
    """Return the operand whose memory ``node``'s result shares, or None."""
    if (index := node.meta.get(ALIASED)) is not None:
        return node.all_input_nodes[index] if index >= 0 else None
    result, target = node.meta.get("val"), node.target
    if not isinstance(result, Tensor) or not node.all_input_nodes:
        return None
    first = node.all_input_nodes[0]
    if target is aten.reshape.default:
        return first if _reshapes_in_place(first.meta["val"], result) else None
    if is_view(target):
        return first
    storage = result.untyped_storage()._cdata
    for read in node.all_input_nodes:
        operand = read.meta.get("val")
        if isinstance(operand, Tensor) and operand.untyped_storage()._cdata == storage:
            return read
    return None


def _reshapes_in_place(x: Any, result: Tensor) -> bool:
    """Return whether a reshape of ``x`` to the shape of ``result`` is a view."""
    if x.is_contiguous():
        return True
    sizes = (*x.shape, *x.stride(), *result.shape)
    if not all(isinstance(size, int) for size in sizes):  # dynamic shapes: to assume sharing is the safe choice
        return True
    return _viewable(tuple(x.shape), x.stride(), tuple(result.shape))


@lru_cache(maxsize=4096)
def _viewable(shape: tuple[int, ...], stride: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        torch.empty_strided(shape, stride, device="meta").view(to)
    except RuntimeError:
        return False
    return True


def gathered_parameters(graph: fx.Graph, levels: Mapping[str, int]) -> dict[fx.Node, int]:
    """Return node -> FSDP level, for the nodes whose value is an unsharded (gathered) parameter."""
    alone: dict[fx.Node, int] = {}
    whole: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            record, role = ir.info(node), ir.info(node).role
            level = levels.get(record.name, 0) if role is not None and role.kind == "param" else 0
            level = 3 if record.kept else level
            if level:
                alone[node] = level
            continue
        if node.op != "call_function":
            continue
        reads = [read for read in node.all_input_nodes if not is_coordinate(read)]
        if not reads or any(read not in alone for read in reads):
            continue
        kind = kind_of(node)
        if kind == COMPUTE and node.target not in COPIES and node.target is not CAST:
            continue
        alone[node] = min(alone[read] for read in reads)
        if kind == START or any(read in whole for read in reads):
            whole[node] = min(alone[node], 2) if ir.info(node).kept else alone[node]
    return whole


def is_coordinate(node: fx.Node) -> bool:
    """Return whether ``node`` is the rank's own index along some axes."""
    role = ir.info(node).role if node.op == "placeholder" else None
    return role is not None and role.kind == "coordinate"
