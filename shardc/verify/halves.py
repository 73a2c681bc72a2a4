"""Checks of forward and backward graphs (halves): results, order of ops, redundant collectives, arena memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from operator import getitem

from torch import fx

from shardc.ir import grammar
from shardc.ir.arena import INSIDE, PLAN, Slot
from shardc.ir.comm import IN_MESSAGES, WAIT, waits_of
from shardc.ir.comm_volume import arguments_of, collective_kind, sent_tensors
from shardc.ir.graph import info, output_node, outputs
from shardc.ir.op_traits import RESHAPES, is_view, may_share_memory
from shardc.ir.repeat import Segment
from shardc.verify.identity import computed, same
from shardc.verify.subject import Broken, Subject


def in_order(subject: Subject, segments: Sequence[Segment]) -> Broken:
    """Check that the segments of a graph run all its ops, in the scheduled order. Yields (op, reason) for what is
    broken.

    - Their ops, in order, are the ops of the half, in its order.
    - Each op has the operands that it has in the half.
    - Each segment returns the values in its ``gives``.
    """
    if len(segments) == 1:
        return  # the half itself
    end, values = subject.nodes[-1], {node.name: _value(node) for node in subject.nodes}
    scheduled = (node for node in subject.calls if node.target is not getitem)
    for segment in segments:
        operand_names = iter(segment.takes)
        computed: dict[fx.Node, object] = {}
        for x in segment.gm.graph.nodes:
            if x.op == "placeholder":
                computed[x] = values.get(next(operand_names))
            elif x.target is getitem:
                computed[x] = computed[x.args[0]], x.args[1]
            elif x.op == "call_function":
                node = next(scheduled, end)
                operands = [values.get(y.name) for y in node.all_input_nodes]
                if x.target is not node.target or [computed[y] for y in x.all_input_nodes] != operands:
                    yield node, "the segments do not run it where it was scheduled"
                    return
                computed[x] = node
        returned = output_node(segment.gm.graph).args[0]
        if [computed[x] for x in returned] != [values.get(name) for name in segment.gives]:
            yield end, "the segments hand on other values"
    for node in scheduled:
        yield node, "no segment runs it"


def _value(node: fx.Node) -> fx.Node | tuple[fx.Node, int]:
    """Return the identity of a node's value: the op, or (op, index) for a getitem."""
    return (node.args[0], node.args[1]) if node.target is getitem else node


def cut(joint: fx.Graph, forward: fx.Graph, backward: fx.Graph) -> str | None:
    """Return a description of the first result of ``joint`` that forward and backward do not compute, or None."""
    first = computed(forward)
    handed = {name: value for (kind, name, _), value in first.items() if kind == "saved"}
    of_forward = {role: value for role, value in first.items() if role[0] != "saved"}
    return same(computed(joint), of_forward | computed(backward, handed))


def order(graph: fx.Graph) -> list[str]:
    """Return the names of the ops in the order in which they run, without getitems."""
    return [info(node).name for node in graph.nodes if node.op == "call_function" and node.target is not getitem]


def moved(scheduled: list[str], graph: fx.Graph) -> tuple[fx.Node, str] | None:
    """Return (op, reason) for the first op of ``graph`` that is out of the order ``scheduled`` (names of ops); None if
    the order is kept.
    """
    now = order(graph)
    if now == scheduled:
        return None
    if sorted(now) != sorted(scheduled):
        return output_node(graph), "other ops were scheduled"
    at = next(at for at, pair in enumerate(zip(now, scheduled, strict=True)) if pair[0] != pair[1])
    nodes = {info(node).name: node for node in graph.nodes if node.op == "call_function"}
    if now[at] == scheduled[at + 1] and now[at + 1] != scheduled[at]:  # an op runs too late
        late = now.index(scheduled[at])
        ahead, behind = grammar.name_text(scheduled[at + 1]), grammar.name_text(now[late - 1])
        return nodes[scheduled[at]], f"it runs behind {behind}, and not in front of {ahead} as scheduled"
    ahead, behind = grammar.name_text(scheduled[at]), grammar.name_text(scheduled[scheduled.index(now[at]) - 1])
    return nodes[now[at]], f"it runs in front of {ahead}, and not behind {behind} as scheduled"


def slots(subject: Subject) -> Broken:
    """Check that results that are live at the same time share no memory of the arena.

    - Two slots of the arena whose uses overlap have no byte in common. A use lasts until the wait of the collective.
    - No output is in a slot of the arena, which the next collectives overwrite.
    """
    plan = subject.nodes[-1].meta.get(PLAN)
    if plan is None:
        return
    maker: dict[int, fx.Node] = {}
    slots_of: dict[fx.Node, frozenset[int]] = {}  # value -> the slots that may hold it
    used: dict[int, tuple[int, int]] = {}
    for at, node in enumerate(subject.nodes):
        read = frozenset().union(*(slots_of.get(x, frozenset()) for x in node.all_input_nodes))
        sent = waits_of(node) if collective_kind(node) is not None else []
        until = max((subject.place[wait] for wait in sent), default=at)
        for number in read:
            used[number] = used[number][0], max(used[number][1], until)
            if node.op == "output" and plan.slots[number].region == INSIDE:
                yield maker[number], "it leaves the half, in memory that is used again"
        slots_of[node] = read if may_share_memory(node.target) else frozenset()
        if node.target in IN_MESSAGES:
            numbers = arguments_of(node)["slots"]
            arrived = min((subject.place[wait] for wait in sent), default=at)
            results = len(info(node).tensors)  # slots of shared messages come after them
            for k, number in enumerate(numbers):
                maker[number], used[number] = node, (at, at if k < results else max(at, arrived))
            slots_of[node] = frozenset(numbers[:results])
        elif node.target is getitem and node.args[0].target in IN_MESSAGES:
            numbers = arguments_of(node.args[0])["slots"]
            slots_of[node] = frozenset([numbers[min(node.args[1], len(numbers) - 1)]] if numbers else [])
    inside = [
        number for number, slot in enumerate(plan.slots) if slot.region == INSIDE and slot.size and number in used
    ]
    for first, second in _sharing(plan.slots, used, inside):
        shared = grammar.name_text(plan.slots[second].name)
        yield maker[first], f"its result lies where {shared} does, at the same time"


def _sharing(
    planned: tuple[Slot, ...], used: Mapping[int, tuple[int, int]], numbers: Iterable[int]
) -> Iterable[tuple[int, int]]:
    """Yield (slot, earlier slot), by number, for slots of the arena (places for results) that share bytes while both
    are in use.
    """
    order = sorted(numbers, key=lambda number: used[number])
    live: list[tuple[int, int]] = []  # (offset, slot) of the slots in use
    ends: list[tuple[int, int]] = []  # (last use, slot)
    for number in order:
        start, end = used[number]
        while ends and ends[0][0] < start:
            _, gone = ends.pop(0)
            live.remove((planned[gone].offset, gone))
        low, high = planned[number].offset, planned[number].offset + planned[number].size
        at = bisect_left(live, (high, -1))
        if at and planned[live[at - 1][1]].size + live[at - 1][0] > low:
            yield number, live[at - 1][1]
        insort(live, (low, number))
        insort(ends, (end, number))


def read(subject: Subject) -> Broken:
    """Check that the result of every collective is used, directly or through other ops, by an output."""
    live: set[fx.Node] = set()
    for node in reversed(subject.nodes):
        if node.op == "output" or node in live:
            live.update(node.all_input_nodes)
    for node in subject.calls:
        if collective_kind(node) is not None and node not in live:
            yield node, "nobody reads what it brings"


def once(subject: Subject) -> Broken:
    """Check that no collective repeats another of the same kind, operand, group and reduction."""
    seen: dict[object, fx.Node] = {}
    for node in subject.calls:
        for value, rest in _sent(node):
            first = seen.setdefault((collective_kind(node), value, rest), node)
            if first is not node:
                yield node, f"it brings what {_name(first)} has brought, of {_name(value)}"


def rerun(forward: fx.GraphModule, backward: Subject) -> Broken:
    """Check that backward does not repeat a collective whose result forward saves for it."""
    saved_names = {
        info(_brought(x)).name for role, x in outputs(forward.graph) if role.kind == "saved" and isinstance(x, fx.Node)
    }
    for node in backward.calls:
        if collective_kind(node) is not None:
            for wait in waits_of(node):
                if info(wait).name in saved_names:
                    yield node, f"forward keeps what it brings, {_name(wait)}"


def _sent(node: fx.Node) -> list[tuple[fx.Node, tuple[tuple[str, str], ...]]]:
    """Return (operand, other arguments as text) for each tensor that a collective sends; [] if the node is no
    collective.
    """
    if collective_kind(node) is None:
        return []
    _, *rest = arguments_of(node).items()
    attributes = tuple((name, repr(argument)) for name, argument in rest if name != "slots")
    return [(x, attributes) for x in sent_tensors(node)]


def _brought(x: fx.Node) -> fx.Node:
    """Return the wait node of a collective if ``x`` is its result, directly or through views and reshapes; else ``x``
    itself.
    """
    source = x
    while source.op == "call_function" and source.target is not WAIT:
        if not is_view(source.target) and source.target not in RESHAPES:
            return x
        source = source.all_input_nodes[0]
    return source if source.target is WAIT else x


def _name(node: fx.Node) -> str:
    """Return the name of a node as it prints in the dump."""
    return grammar.name_text(info(node).name)
