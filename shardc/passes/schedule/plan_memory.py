"""Plan memory: places the results of direct collectives (messages between ranks) in an arena, by their lifetimes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from operator import getitem
from typing import Any

from torch import Tensor, fx

from shardc.cost.step_sequence import aliased
from shardc.ir import graph as ir
from shardc.ir.arena import INSIDE, KEPT, OUTSIDE, PLAN, MemoryPlan, Packing, Slot, place, rows_of
from shardc.ir.comm import ALL_REDUCE, GATHER, IN_MESSAGES, REDUCE_SCATTER, is_ring, waits_of
from shardc.ir.comm_volume import group_of
from shardc.ir.mesh import Mesh
from shardc.ir.op_traits import may_share_memory
from shardc.passes.op_calls import is_start


@dataclass(frozen=True)
class PlanMemory:
    """Plans the memory of direct collectives: each result gets a slot (bytes with a lifetime), and each slot a place in
    an arena.

        %a = gather([%w], 2, "dp", [])      ->  %a = gather([%w], 2, "dp", [0])        (slot 0 of the arena)

    A slot is in use from the start of its collective to the last op that reads it, through views; a slot that a
    collective sends from, until the wait. Torch's own collectives allocate their own memory and stay.

    *Requires:* one half of a local graph, scheduled. *Ensures:* the same graph, except for the slots' numbers as the
    last argument of each direct collective, and a `MemoryPlan` on the output node.

    A collective has a slot for each result. If it reduces over n > 2 ranks by messages, it also has a slot for each
    result, for the terms that come from n - 2 ranks. Tensors that share a message (`shardc.ir.arena`) have instead
    one slot for all incoming messages and one for the outgoing ones. An all-reduce over more than two ranks has one
    slot.

    Args:
        mesh: the mesh, which gives the number of ranks of a process group.
    """

    mesh: Mesh
    name = "plan_memory"
    requires = ("partition",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        slots: list[Slot] = []
        for at, node in enumerate(gm.graph.nodes):
            if node.target in IN_MESSAGES:  # a direct collective
                added = self._slots_of(node, at)
                numbers = list(range(len(slots), len(slots) + len(added)))
                other_arguments = len(node.target._schema.arguments) - 1  # the last one is ``slots``
                node.args = (*node.args[:other_arguments], numbers)
                slots += added
        ir.output_node(gm.graph).meta[PLAN] = _plan(gm.graph, slots)
        gm.recompile()
        return gm

    def _slots_of(self, node: fx.Node, at: int) -> list[Slot]:
        """Returns the memory slots of the collective ``node``: one for each result, then those for messages that
        arrive or leave. ``at``: the position of ``node`` in the graph.

        Their lifetimes begin and end at ``at``; `_plan` sets them.
        """
        results = node.meta["val"]
        names = _result_names(node)
        _, ranks = group_of(node, self.mesh)
        # gloo's ring reduces all tensors in one buffer; nothing arrives in messages.
        if node.target is ALL_REDUCE and is_ring("all_reduce", ranks):
            return [Slot(ir.info(node).name, sum(_bytes(x) for x in results), start=at, end=at)]
        slots = [Slot(name, _bytes(x), start=at, end=at) for name, x in zip(names, results, strict=True)]
        packing = Packing.of(rows_of(node, ranks))  # the small tensors, which share one message to each rank
        wires = []
        # Of a reduction over n ranks, n - 1 terms arrive: one in the result itself, the others need room.
        if node.target is not GATHER and ranks > 2:
            alone = [slot for number, slot in enumerate(slots) if number not in packing.offsets]
            wires += [Slot(f"{slot.name}.wire", (ranks - 2) * slot.size, start=at, end=at) for slot in alone]
        if packing.offsets:
            # A reduce-scatter sends another part to each rank, the others the same message to all.
            messages_out = ranks - 1 if node.target is REDUCE_SCATTER else 1
            wires += [
                Slot(f"{ir.info(node).name}.{way}.wire", count * packing.room, start=at, end=at)
                for way, count in (("comes", ranks - 1), ("goes", messages_out))
            ]
        return slots + wires


def _plan(graph: fx.Graph, slots: list[Slot]) -> MemoryPlan:
    """Returns the memory plan of a half: ``slots`` with their lifetimes and their places in the arena. A slot's region
    follows from what leaves the graph in it: nothing (`INSIDE`), values for backward alone (`KEPT`), or a result that
    the caller may hold on to (`OUTSIDE`).
    """
    position_of = {node: at for at, node in enumerate(graph.nodes)}
    slots_of, ends = _uses_of_slots(graph, position_of)
    regions: dict[int, str] = {}  # slot number -> its region
    saved: dict[int, tuple[str, ...]] = {}  # slot number -> names of the saved values in it
    for role, x in ir.outputs(graph):
        for slot in slots_of.get(x, frozenset()) if isinstance(x, fx.Node) else ():
            # A slot that the caller gets is outside, even if backward reads it, too.
            is_kept = role.kind == "saved" and regions.get(slot) != OUTSIDE
            regions[slot], ends[slot] = KEPT if is_kept else OUTSIDE, len(position_of) - 1
            if role.kind == "saved":
                saved[slot] = (*saved.get(slot, ()), role.name)
    timed = [
        replace(slot, end=ends[k], region=regions.get(k, INSIDE), saved=saved.get(k, ()))
        for k, slot in enumerate(slots)
    ]
    last_reads = tuple(
        (node.name, max(map(position_of.__getitem__, node.users), default=0)) for node in ir.placeholders(graph)
    )
    return MemoryPlan(place(timed), last_reads)


def _uses_of_slots(
    graph: fx.Graph, place_of: Mapping[fx.Node, int]
) -> tuple[dict[fx.Node, frozenset[int]], dict[int, int]]:
    """Returns (value -> the slots that hold its memory, slot -> position of the last op that uses it).

    Args:
        place_of: node -> its position.
    """
    # Of views and getitems too, so that an op that reads a slot through them counts.
    slots_of: dict[fx.Node, frozenset[int]] = {}
    ends: dict[int, int] = {}
    for node, at in place_of.items():
        if node.op == "output":
            continue
        reads = frozenset().union(*(slots_of.get(read, frozenset()) for read in node.all_input_nodes))
        # A collective's input must not be overwritten until the collective is waited for.
        until = max([at, *(place_of[wait] for wait in waits_of(node))]) if is_start(node) else at
        for slot in reads:
            ends[slot] = max(ends.get(slot, 0), until)
        # A view lies in the slots of its operand; other ops allocate their results elsewhere.
        slots_of[node] = reads if aliased(node) is not None or may_share_memory(node.target) else frozenset()
        if node.target in IN_MESSAGES:
            numbers: Any = node.args[-1]  # of its slots
            # The slots of its results come first, then those of received messages, which end with the first wait.
            count = len(node.meta["val"])
            slots_of[node] = frozenset(numbers[:count])
            first_wait = min((place_of[wait] for wait in waits_of(node)), default=at)
            ends.update({slot: max(at, first_wait) for slot in numbers[count:]})
            ends.update({slot: at for slot in numbers[:count]})  # until an op reads them, later in this loop
        elif node.target is getitem and node.args[0].target in IN_MESSAGES:
            numbers = node.args[0].args[-1]
            # Result number n is in the collective's slot n. A ring has one slot for all of its results.
            slots_of[node] = frozenset([numbers[node.args[1]] if node.args[1] < len(numbers) else numbers[0]])
    return slots_of, ends


def _result_names(node: fx.Node) -> list[str]:
    """Returns the name of each result of a collective: the name of the getitem that reads it or, without one, a
    numbered name.
    """
    items = {user.args[1]: ir.info(user).name for user in node.users if user.target is getitem}
    return [items.get(at, f"{ir.info(node).name}.{at}") for at in range(len(node.meta["val"]))]


def _bytes(x: Tensor) -> int:
    """Returns the bytes of ``x``; 0 if its size is symbolic, which keeps it out of the arena."""
    size = prod(x.shape) * x.dtype.itemsize
    return size if isinstance(size, int) else 0
