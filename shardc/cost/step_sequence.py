"""The ops of one training step, in the order in which a rank runs them.

`of_halves` reads the forward and backward graphs that run. `of_joint` reads the localized joint graph, before it is
partitioned: forward ops, then backward ops, with gathers of level-3 parameters and checkpointed regions repeated before
their first use in backward. It differs from what runs: partitioning also recomputes cheap ops, so that here the saved
activations are an upper bound, and collectives are neither bucketed nor reordered.

`runs_again` selects the forward ops that backward recomputes, and `keep_within` the parameters that stay unsharded from
forward to backward, within a memory budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isinf
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc.cost.model import Pricing
from shardc.custom_ops.attention_ops import CALL
from shardc.custom_ops.flex_ops import FLEX
from shardc.custom_ops.float8_ops import QUANTISE, data_operands
from shardc.ir import comm, comm_volume, executable
from shardc.ir import graph as ir
from shardc.ir.arena import INSIDE, KEPT, OUTSIDE, MemoryPlan
from shardc.ir.comm import move_kind
from shardc.ir.comm_volume import arguments_of, collective_kind, group_of, wire_elements
from shardc.ir.executable import BACKWARD, FORWARD, KNOWN, SUM, TERM, TRANSFER, Half
from shardc.ir.gc_control import uncollected
from shardc.ir.graph import Role
from shardc.ir.mesh import Mesh
from shardc.ir.op_traits import CAST, COPIES, communicates, draws, is_view

CHOICES = ("auto", "keep", "recompute")
# Kinds of which a rank sends less than their result, (n-1)/n of it. Reductions send at least as much as their result.
_LARGE = ("all_gather", "all_to_all")
_PACKS = (torch.ops.aten.clone.default, torch.ops.aten.cat.default)  # ops that copy values into a message


def runs_again(graph: fx.Graph, collectives: str) -> set[fx.Node]:
    """Return the forward nodes that backward recomputes. ``collectives`` ("recompute", "keep" or "auto") says which
    collectives of recomputed regions are among them.

    These are the nodes of checkpointed regions, those that the plan names (``must_recompute``), and the nodes that
    receive keys and values of other ranks: to save them would cost the memory that splitting the sequence saves.
    Excluded are values of regions that are used after their region (as in eager checkpointing) or saved by its policy,
    kernels with random numbers of their own (which a second run would draw anew), and host copies.

    Args:
        graph: a localized joint graph.
        collectives: "recompute" repeats all collectives of these regions, "keep" none, and "auto" those whose result is
            larger than the data that a rank sends.
    """
    recomputed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or move_kind(node) is not None:
            continue
        policy = ir.info(node).origin.policy if ir.info(node).origin.phase == "forward" else ""
        if policy == "must_recompute" and not communicates(node.target) and not _draws(node):
            recomputed.add(node)
        if not (region := _region(node)) or policy == "must_save":
            continue
        if node.target is comm.WAIT:
            repeated = node.args[0] in recomputed
        elif (kind := collective_kind(node)) is not None:
            chosen = collectives == "recompute" or (collectives == "auto" and kind in _LARGE)
            repeated = chosen and not any(_leaves(wait, region) for wait in node.users)
        else:
            repeated = not _leaves(node, region) and not _draws(node)
        if repeated:
            recomputed.add(node)
    return recomputed | (_bringing_keys(graph) if collectives != "keep" else set())


def _bringing_keys(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that fetch other ranks' keys and values for attention: the collective, the op that packs its
    operand, and the ops between collective and attention.
    """
    nodes: set[fx.Node] = set()
    for call in (node for op in (CALL, FLEX) for node in graph.find_nodes(op="call_function", target=op)):
        for node in call.args[1:3]:
            chain = []
            while isinstance(node, fx.Node) and len(node.all_input_nodes) == 1:
                chain.append(node)
                if collective_kind(node) in ("all_gather", "permute_ranks"):
                    packed = node.args[0]
                    nodes.update(chain + ([packed] if packed.target in _PACKS else []))
                    break
                node = node.args[0]
    return nodes


def _region(node: fx.Node) -> int:
    """Return the number of the checkpoint region that a forward ``node`` is in; 0 if it is in none."""
    origin = ir.info(node).origin
    return origin.region if origin.phase == "forward" else 0


def _leaves(node: fx.Node, region: int) -> bool:
    """Return whether ``node`` is used outside of the checkpoint ``region``: by the output or by another forward
    node.
    """
    return any(
        user.op == "output" or (ir.info(user).origin.phase == "forward" and _region(user) != region)
        for user in node.users
    )


def _draws(node: fx.Node) -> bool:
    """Return whether an op draws random numbers from the device's generator. Attention does so only with dropout."""
    if not draws(node.target):
        return False
    arguments = arguments_of(node)
    return arguments.get("dropout_p", 0) != 0 or all(a.name != "dropout_p" for a in node.target._schema.arguments)


aten = torch.ops.aten

INPUT, MOVE, START, WAIT, COMPUTE = "input", "move", "start", "wait", "compute"
# Meta key of nodes whose example values do not show aliasing: index of the input whose memory is shared; -1 for none.
ALIASED = "shardc_aliased"


@dataclass(frozen=True)
class Op:
    """One execution of a node in a step. A node that is recomputed or gathered again has several.

    Args:
        node: the node.
        kind: INPUT (placeholders and constants), MOVE (a view: no work), START (of a collective or a host copy), WAIT
            or COMPUTE.
        phase: "forward" or "backward".
        reads: positions of the ops whose values it reads.
        gathered: whether its result is an unsharded parameter.
    """

    node: fx.Node
    kind: str
    phase: str
    reads: tuple[int, ...]
    gathered: bool


@dataclass(frozen=True)
class Sequence:
    """The ops of one step in the order in which a rank runs them, with the step's outputs and the arena (memory for
    results of collectives).

    Args:
        ops: the ops in order, inputs first.
        outputs: (role, position) of each output that is a tensor of the graph.
        arena: bytes allocated once for results of collectives.
        placed: position of a collective -> indices of its results that are in the arena.
        passed_on: (role, position) of each value of a microbatch that it adds to a sum, or that later graphs take.
        begins: position of the first op of each of the graphs that run.
    """

    ops: tuple[Op, ...]
    outputs: tuple[tuple[Role, int], ...]
    arena: int = 0
    placed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    passed_on: tuple[tuple[Role, int], ...] = ()
    begins: tuple[int, ...] = ()

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the positions of the ops that start collectives or host copies."""
        return tuple(at for at, op in enumerate(self.ops) if op.kind == START)


@uncollected()
def of_joint(graph: fx.Graph, levels: Mapping[str, int], collectives: str = "auto") -> Sequence:
    """Return the `Sequence` of ops of a training step, from its localized joint graph.

    Args:
        graph: the graph, at local shapes, with ``meta["val"]`` on every node.
        levels: FSDP level of each gathered parameter; those of level 3 are gathered again in backward.
        collectives: the collectives of checkpointed regions to repeat, as for `runs_again`.
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


# Kind of a result that a later graph takes -> kind of the argument.
PASSED_ON = {TERM: SUM, KNOWN: KNOWN, executable.KEPT: executable.KEPT}
_INNER = ("saved", *PASSED_ON)


def of_halves(halves: Iterable[Half], levels: Mapping[str, int]) -> Sequence:
    """Return the ops of a step as a `Sequence`, from its forward and backward graphs or from an inference graph.

    A term of a sum over microbatches is counted as the sum from the first microbatch on.

    Args:
        halves: the graphs in order, those of each microbatch repeated; placeholders of the backward have the names of
            the values that the forward saves.
        levels: FSDP level of each gathered parameter.
    """
    return of_runs(((half, 0) for half in halves), levels)


@uncollected()
def of_runs(runs: Iterable[tuple[Half, int]], levels: Mapping[str, int]) -> Sequence:
    """Return the ops of a step as a `Sequence`, from ``runs`` of its graphs. Graphs of different microbatches may
    interleave.

    Args:
        runs: (graph, number of its microbatch) in the order in which they run. A graph reads what an earlier graph of
            the same microbatch saved, or transferred from another pipeline stage.
        levels: FSDP level of each gathered parameter.
    """
    builder = _Builder({})
    outputs: tuple[tuple[Role, int], ...] = ()
    plans: list[MemoryPlan] = []
    placed: dict[int, tuple[int, ...]] = {}
    passed_on: list[tuple[Role, int]] = []
    begins: list[int] = []  # position of the first op of each graph
    between: dict[tuple[object, ...], int] = {}  # of what one graph gives another, by kind and name: its position
    for half, microbatch in runs:
        first = len(builder.ops)
        begins.append(first)
        builder.at = {}
        received: dict[tuple[object, ...], fx.Node] = {}  # values of other stages, by their keys
        # An argument is what an earlier graph gives, else the op or input of this name, else a new input.
        for node in ir.placeholders(half.graph):
            saved, key = ("saved", node.name, half.stage, microbatch), _key(half, ir.role(node), microbatch)
            at = between.get(saved, between.get(key))
            if key[0] == TRANSFER:
                received[key] = node
            elif at is None:
                at = builder.names.get(node.name)
            if at is not None:
                builder.at[node] = at
        builder.gathered = gathered_parameters(half.graph, levels)
        for node in half.graph.nodes:
            if node.op != "output" and node not in builder.at:
                builder.add(node, BACKWARD if half.kind == BACKWARD else FORWARD)
        between |= {key: builder.at[node] for key, node in received.items()}
        for role, x in ir.outputs(half.graph):
            if not isinstance(x, fx.Node):
                continue
            key = _key(half, role, microbatch)
            if role.kind in PASSED_ON:
                passed_on.append((role, builder.at[x]))
                between.setdefault(key, builder.at[x])
            elif role.kind in ("saved", TRANSFER):
                between[key] = builder.at[x]
        outputs += builder.results(half.graph)
        plans.append(half.plan)
        placed |= {first + at: _placed(op, half.plan) for at, op in enumerate(builder.ops[first:]) if op.kind == START}
    # Graphs use the same memory one after another; what is kept for a later graph is beside it.
    arena = max(plan.size(INSIDE) for plan in plans) + max(plan.size(KEPT) for plan in plans)
    return Sequence(tuple(builder.ops), outputs, arena, placed, tuple(passed_on), tuple(begins))


def _key(half: Half, role: Role, microbatch: int) -> tuple[object, ...]:
    """Return the key under which a graph of a step passes a value on to later graphs: (kind, name), for a value between
    stages also the microbatch, for a saved activation also pipeline stage and microbatch.
    """
    kind = PASSED_ON.get(role.kind, role.kind)
    if kind == "saved":
        return kind, role.name, half.stage, microbatch
    return (kind, role.name, microbatch) if kind == TRANSFER else (kind, role.name)


def _placed(start: Op, plan: MemoryPlan) -> tuple[int, ...]:
    """Return which results (indices) of the collective ``start`` have their place in the arena that ``plan``
    describes.
    """
    slots: Any = comm_volume.arguments_of(start.node).get("slots") or ()
    return tuple(k for k, slot in enumerate(slots) if plan.slots and plan.slots[slot].region != OUTSIDE)


class _Builder:
    """Collects the ops of a step in order. Each op comes after the ops that it reads.

    Attributes:
        gathered: node whose value is an unsharded parameter -> FSDP level.
        at: node -> position of its op.
        names: node name -> position of its op.
    """

    def __init__(self, gathered: dict[fx.Node, int]) -> None:
        self.gathered = gathered
        self.ops: list[Op] = []
        self.at: dict[fx.Node, int] = {}
        self.names: dict[str, int] = {}

    def forget(self, recomputed: Set[fx.Node]) -> None:
        """Drop the positions of values that backward gathers again or recomputes. `add` then appends their ops a second
        time.
        """
        resharded = {node for node, level in self.gathered.items() if level == 3}
        unsharded = {node for node, level in self.gathered.items() if level < 3}
        for node in resharded | (recomputed - unsharded):
            self.at.pop(node, None)

    def add(self, node: fx.Node, phase: str) -> None:
        """Append ``node`` to the ops of the step, as an op of ``phase``. Inputs of ``node`` that are not in the step
        yet are appended first.
        """
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
        """Return the outputs of ``graph`` that are results of the step, as (role, position of the op that computes it).

        Left out are values saved for backward, and those passed on to later graphs (`PASSED_ON`).
        """
        outputs = [(role, x) for role, x in ir.outputs(graph) if role.kind not in _INNER and isinstance(x, fx.Node)]
        return tuple((role, self.at[x]) for role, x in outputs)


def kind_of(node: fx.Node) -> str:
    """Return the kind of op that ``node`` is in a step: INPUT, MOVE, START (of a collective), WAIT or COMPUTE, as
    explained in `Op`.
    """
    if node.op != "call_function":
        return INPUT
    if comm_volume.collective_kind(node) is not None or move_kind(node) is not None:
        return START
    if node.target is comm.WAIT:
        return WAIT
    return MOVE if node.target is getitem or aliased(node) is not None else COMPUTE


def aliased(node: fx.Node) -> fx.Node | None:
    """Return the operand whose memory the result of ``node`` shares; None if it shares none."""
    if (index := node.meta.get(ALIASED)) is not None:
        return node.all_input_nodes[index] if index >= 0 else None
    result, target = node.meta.get("val"), node.target
    if not isinstance(result, Tensor) or not node.all_input_nodes:
        return None
    first = node.all_input_nodes[0]
    if target is aten.reshape.default:
        source = first.meta.get("val")  # before localize, what a pass has put in has none
        return first if isinstance(source, Tensor) and _reshapes_in_place(source, result) else None
    if is_view(target):
        return first
    storage = result.untyped_storage()._cdata
    for read in node.all_input_nodes:
        operand = read.meta.get("val")
        if isinstance(operand, Tensor) and operand.untyped_storage()._cdata == storage:
            return read
    return None


def _reshapes_in_place(x: Tensor, result: Tensor) -> bool:
    """Return whether a reshape of ``x`` to the shape of ``result`` is a view, without a copy."""
    if x.is_contiguous():
        return True
    sizes = (*x.shape, *x.stride(), *result.shape)
    if not all(isinstance(size, int) for size in sizes):  # dynamic shapes: to assume sharing is the safe choice
        return True
    return _viewable(tuple(x.shape), x.stride(), tuple(result.shape))


@lru_cache(maxsize=4096)
def _viewable(shape: tuple[int, ...], stride: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Return whether a tensor of ``shape`` and ``stride`` can be viewed at the shape ``to`` without a copy."""
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
            level = 3 if record.is_kept_part else level
            if level:
                alone[node] = level
            continue
        if node.op != "call_function":
            continue
        reads = [read for read in data_operands(node) if not is_coordinate(read)]
        if not reads or any(read not in alone for read in reads):
            continue
        kind = kind_of(node)
        if kind == COMPUTE and node.target not in COPIES and node.target not in (CAST, QUANTISE):
            continue
        alone[node] = min(alone[read] for read in reads)
        if kind == START or any(read in whole for read in reads):
            whole[node] = min(alone[node], 2) if ir.info(node).is_kept_part else alone[node]
    return whole


def is_coordinate(node: fx.Node) -> bool:
    """Return whether ``node`` is a coordinate: the input of a local graph that holds the rank's index along some mesh
    axes.
    """
    role = ir.info(node).role if node.op == "placeholder" else None
    return role is not None and role.kind == "coordinate"


@dataclass
class Gathered:
    """A parameter that backward gathers a second time: the seconds that this takes, and the bytes that keeping it
    unsharded would take.

    Args:
        name: name of the parameter.
        seconds: time that its collectives add to those of their buckets.
        size: bytes of the unsharded parameter.
        first_use: position of the first backward op that uses it; infinite if no gradient needs it.
    """

    name: str
    seconds: float = 0.0
    size: int = 0
    first_use: float = inf

    @property
    def order(self) -> tuple[bool, float, float, str]:
        """Return the sort key by which parameters are chosen to stay unsharded: most seconds saved per byte first, on a
        tie the one that backward uses first. Parameters that backward does not use come last.

        The parameter that backward uses first is unsharded for the shortest time, since forward used it last. Its
        second gather would have the least compute to overlap with.
        """
        saved = float(f"{self.seconds / self.size:.6g}")  # rounded, so that it is equal for equal parameters
        return isinf(self.first_use), -saved, self.first_use, self.name


def keep_within(
    graph: fx.Graph, mesh: Mesh, levels: Mapping[str, int], budget: int, cost: Pricing, bucket: int
) -> dict[str, int]:
    """Return ``levels`` with some parameters kept unsharded for backward: level 2 in place of 3. In the order of the
    time that they save per byte, those are chosen whose bytes together fit in ``budget``.

    Args:
        graph: the localized joint graph.
        mesh: the mesh.
        levels: FSDP level of each parameter; those of level 3 are gathered again in backward.
        budget: bytes per rank for unsharded parameters; -1 for no limit.
        cost: the cost model.
        bucket: bytes of a bucket, whose collectives share one latency; -1: all are in one bucket, 0: no buckets.
    """
    if not budget:
        return dict(levels)
    out, left = dict(levels), budget
    for param in sorted(_gathered_again(graph, mesh, levels, cost, bucket), key=lambda param: param.order):
        if budget < 0 or param.size <= left:
            out[param.name] = 2
            left -= param.size
    return out


def _gathered_again(
    graph: fx.Graph, mesh: Mesh, levels: Mapping[str, int], cost: Pricing, bucket: int
) -> list[Gathered]:
    """Return a list with a `Gathered` for each parameter of FSDP level 3: the seconds of its second gather, in
    backward, and the bytes that it takes unsharded.

    Empty parameters and those of which forward saves a slice (`KeepPart`) are left out.
    """
    whole = gathered_parameters(graph, {name: 3 for name, level in levels.items() if level == 3})
    made_of: dict[fx.Node, set[str]] = {}
    by_name: dict[str, Gathered] = {}
    parts: set[str] = set()
    for at, node in enumerate(graph.nodes):
        if node in whole:
            for name in _parameters(node, made_of):
                param, value = by_name.setdefault(name, Gathered(name)), node.meta["val"]
                param.seconds += _seconds(node, mesh, cost, bucket)
                if isinstance(value, Tensor):
                    param.size = max(param.size, value.numel() * value.dtype.itemsize)
                if ir.info(node).is_kept_part:
                    parts.add(name)
        elif node.op == "call_function" and ir.info(node).origin.phase == "backward":
            for name in {name for read in node.all_input_nodes if read in whole for name in made_of[read]}:
                by_name[name].first_use = min(by_name[name].first_use, at)
    return [param for param in by_name.values() if param.size and param.name not in parts]


def _parameters(node: fx.Node, cache: dict[fx.Node, set[str]]) -> set[str]:
    """Return the names of the parameters from which ``node`` is computed. Results are kept in ``cache``."""
    if node not in cache:
        if node.op == "placeholder":
            record = ir.info(node)
            cache[node] = {record.name} if record.role is not None and record.role.kind == "param" else set()
        else:
            cache[node] = set().union(*(_parameters(read, cache) for read in node.all_input_nodes))
    return cache[node]


def _seconds(node: fx.Node, mesh: Mesh, cost: Pricing, bucket: int) -> float:
    """Return the seconds that a collective adds to its bucket; 0 if ``node`` is not a collective."""
    kind = collective_kind(node)
    if kind is None:
        return 0.0
    axes, ranks = group_of(node, mesh)
    operands = [x.meta["val"] for x in node.all_input_nodes]
    wire = sum(wire_elements(kind, ranks, x.numel()) * x.dtype.itemsize for x in operands)
    if not bucket:
        return cost.collective_seconds(kind, mesh, axes, wire)
    others = bucket if bucket > 0 else wire
    combined = cost.collective_seconds(kind, mesh, axes, others + wire)
    return combined - cost.collective_seconds(kind, mesh, axes, others)
