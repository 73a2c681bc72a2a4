"""Schedule: orders the starts and waits of collectives, and of moves between host and device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from torch import fx

from shardc.cost.compute import is_dense
from shardc.ir.comm import WAIT, is_stored, move_kind, waits_of
from shardc.ir.comm_volume import collective_kind
from shardc.ir.rewriter import positions, reorder
from shardc.passes.op_calls import before_other_starts, is_start, leaving, result_bytes
from shardc.passes.schedule.prefetch import Wanted, check, prefetchable, prioritize, sink_to_first_use
from shardc.plan.entries import Prefetch


@dataclass(frozen=True)
class Schedule:
    """Starts each collective, and each move between host and device, as early as limits allow, and waits for it late.

        %a = all_gather(%w1)                %a = all_gather(%w1)
        %wa = wait(%a)                      %y = mm(%x, %w0)
        %y = mm(%x, %w0)                ->  %wa = wait(%a)
        %z = mm(%y, %wa)                    %z = mm(%y, %wa)

    - A collective starts as soon as its inputs are computed. If these need only inputs of the graph (a parameter's
      gather; see `prefetchable`), it starts under the compute before an earlier collective's first use, as far ahead as
      ``max_in_flight`` allows. A move to the device starts ahead of its gather (or first use) in the same way.
    - Ops between an all-to-all and the matrix products beside it are computed as soon as what they send is there, and
      where what they received is needed: rows are in flight while others are computed.
    - A wait stands before the first use. For a collective whose results only leave the graph, it stands where more than
      ``max_in_flight`` would otherwise be in flight.
    - A reduced gradient that is reduced over other axes too, or goes to the host, is waited for when the next reduction
      starts, and its next step starts then. A gradient's move to the host is waited for at the end.
    - A saved value's move to the host is waited for where more than ``max_in_flight`` of such values would otherwise be
      on the device still; from there on the device's memory is free.

    *Requires:* one half of a local graph, bucketed. *Ensures:* collectives start in the same order on every rank, since
    every rank has this graph.

    Args:
        max_in_flight: bytes of results that are in flight or wait for their first use, of collectives that are
            prefetched or only leave the graph, and as many of moves and maxima in front of gathers; -1 for no limit.
        blocking: leave every collective where it is, and wait for it there.
        prefetch: plan entries that name gathers to start before a module computes.

    Raises:
        PlanError: an entry of ``prefetch`` cannot be met, because of these limits or of what a gather depends on.
    """

    max_in_flight: int
    blocking: bool = False
    prefetch: tuple[Prefetch, ...] = ()
    name = "schedule"
    requires = ("partition",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if not self.blocking:
            _spread_all_to_alls(gm.graph)
        priority = positions(gm.graph)  # node -> position; below, fractions put a node between two others
        wanted = self._wait_at_starts(gm.graph, priority) if self.blocking else self._overlap(gm.graph, priority)
        reorder(gm.graph, priority)  # operands before their users all the same, which may delay a node
        check(gm.graph, wanted)  # so a gather may not stand where a plan entry wants it
        gm.recompile()
        return gm

    def _wait_at_starts(self, graph: fx.Graph, priority: dict[fx.Node, float]) -> Wanted:
        """Waits for each collective and move where it starts: sets the waits' positions in ``priority``, in place.
        Returns the gathers that should start earlier, as `prioritize` does; `check` refuses them.
        """
        starts = filter(is_start, graph.nodes)
        priority |= {wait: priority[node] + 0.1 for node in starts for wait in waits_of(node)}
        return prioritize(graph, self.prefetch, dict(priority), limit=-1)  # on a copy: nothing is prefetched here

    def _overlap(self, graph: fx.Graph, priority: dict[fx.Node, float]) -> Wanted:
        """Starts each collective and move early and waits for it late: sets their positions in ``priority``, in place.
        Returns the gathers that plan entries name, as `prioritize` does.
        """
        # ``free``: ops that depend on inputs alone, and may move to an earlier position together with a gather.
        starts, free = list(filter(is_start, graph.nodes)), prefetchable(graph)
        uses = {node: _first_use(node, priority) for node in starts}
        _start_early_wait_late(graph, starts, free, priority)
        # Gathers first, then what these may wait for: moves to the device and float8 maxima. What can start at once
        # stands before all ops (the first has position 0), and moves before gathers.
        collectives = [node for node in starts if move_kind(node) is None]
        gathers = [node for node in collectives if _always_ready(node, free)]
        self._prefetch(gathers, uses, priority, first=-1.0)
        sink_to_first_use(graph, free, priority)  # what a gather reads goes where the gather went
        before_gathers = [node for node in starts if node in free]
        # Their uses are their waits, which stand right before a gather now.
        wait_positions = {node: min((priority[x] for x in waits_of(node)), default=inf) for node in before_gathers}
        self._prefetch(before_gathers, wait_positions, priority, first=-2.0)
        sink_to_first_use(graph, free.difference(before_gathers), priority)
        stored = list(filter(is_stored, starts))  # moves of saved values to the host
        for group in (collectives, stored):
            _place_final_waits(graph, group, free, priority, self.max_in_flight)
        # At last the gathers that plan entries name, and again what they read.
        wanted = prioritize(graph, self.prefetch, priority, self.max_in_flight)
        if wanted:
            sink_to_first_use(graph, free, priority)
        return wanted

    def _prefetch(
        self, gathers: list[fx.Node], uses: dict[fx.Node, float], priority: dict[fx.Node, float], first: float
    ) -> None:
        """Sets the start of each gather by its position in ``priority``, in place: just after the first use of an
        earlier gather, so that the bytes in flight stay within the limit, or at ``first``.

        Example: if two gathers fit in the limit, the third one starts after the first use of the first one, from when
        on the second one and itself are in flight.

        Args:
            gathers: the gathers to prefetch.
            uses: gather -> position of its first use.
            priority: position of each node in the new order, changed in place.
            first: position, before all ops, of gathers that can start at once.
        """
        gathers.sort(key=lambda node: (uses[node], priority[node]))
        for at, node in enumerate(gathers):
            # Gathers number ``earliest`` to ``at`` may be in flight together; the one before them must be used first.
            earliest, in_flight = at, result_bytes(node)
            while earliest > 0:
                in_flight += result_bytes(gathers[earliest - 1])
                if 0 <= self.max_in_flight < in_flight:
                    break
                earliest -= 1
            place = uses[gathers[earliest - 1]] + 0.3 if earliest > 0 else first
            priority[node] = min(place, uses[node] - 0.5)  # at the latest before its first use


def _start_early_wait_late(
    graph: fx.Graph, starts: list[fx.Node], free: frozenset[fx.Node], priority: dict[fx.Node, float]
) -> None:
    """Puts each of ``starts`` (of collectives and moves) right after its last input, and its waits right before their
    first use: changes positions in ``priority``, in place. A start that only reads inputs of the graph, or ops in
    ``free`` (which move ahead together with a gather), stays.

    The fractions order what stands at one position: a start behind an op (0.2), then a move and a wait before the next
    op (-0.3 and -0.25).
    """
    dense = [priority[node] for node in graph.nodes if is_dense(node)]  # matrix products, attention, ...
    for node in starts:
        inputs = (x for x in node.all_input_nodes if x.op != "placeholder" and x not in free)
        ready = max((priority[x] for x in inputs), default=None)
        if ready is not None:
            priority[node] = ready + 0.2
            # A saved value moves to the host behind the light ops that follow it, which one kernel computes with it.
            next_dense = bisect_right(dense, ready)
            if is_stored(node) and next_dense < len(dense):
                priority[node] = dense[next_dense] - 0.3
        for wait in waits_of(node):
            priority[wait] = min((priority[user] for user in wait.users), default=inf) - 0.25


def _spread_all_to_alls(graph: fx.Graph) -> None:
    """Overlaps all-to-alls with light ops (no matrix products or collectives): those before an all-to-all run as early
    as possible, those after it as late as possible.

    Light ops are those between it and the next matrix product or collective. All-to-alls that can start before the same
    product start in the order in which their results are needed. An op that needs only inputs of the graph stays where
    it is, since its result would be in memory from the start.
    """
    priority = positions(graph)
    dense = [priority[node] for node in graph.nodes if is_dense(node)]
    starts = [node for node in graph.nodes if collective_kind(node) == "all_to_all"]
    light = [n for n in graph.nodes if n.op == "call_function" and not (is_start(n) or is_dense(n) or n.target is WAIT)]
    # In this order: where an op stands between two all-to-alls, the second one decides.
    _delay_ops_after(starts, light, dense, priority)
    before = set(starts)  # and the light ops that lead to one
    for node in reversed(light):
        if not before.isdisjoint(node.users):
            before.add(node)
    _advance_ops_before(starts, [node for node in graph.nodes if node in before], dense, priority)
    reorder(graph, priority)


def _delay_ops_after(
    starts: list[fx.Node], light: list[fx.Node], dense: list[float], priority: dict[fx.Node, float]
) -> None:
    """Moves those of the ``light`` ops that depend on an all-to-all to just before their first use, if a dense op (a
    matrix product, attention) stands in between, which the all-to-all can then overlap. Changes their positions in
    ``priority``, in place.

    Args:
        starts: the all-to-alls.
        light: ops that are no dense ops, collectives or waits, in the order of the graph.
        dense: positions of the dense ops, ascending.
    """
    after = {wait for node in starts for wait in waits_of(node)}  # and the light ops that depend on one
    for node in light:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    for node in reversed(light):  # users first, so that a chain of ops moves as one
        users = [user for user in node.users if user.op != "output"]
        # An op that a collective reads stays: its delay would delay that collective.
        if node in after and users and not any(map(is_start, users)):
            first_use = min(priority[user] for user in users)
            # More dense ops stand before the first use than before the op.
            dense_between = bisect_right(dense, priority[node]) < bisect_left(dense, first_use)
            if dense_between:
                priority[node] = first_use - 1e-3


def _advance_ops_before(
    starts: list[fx.Node], before: list[fx.Node], dense: list[float], priority: dict[fx.Node, float]
) -> None:
    """Moves the light ops before an all-to-all to just after their last input, if a dense op (a matrix product,
    attention) stands in between. Those before all-to-alls that can start before the same dense op are put in the order
    in which results are needed. Changes positions in ``priority``, in place.

    Args:
        starts: the all-to-alls.
        before: these and the light ops (no dense ops, collectives or waits) that lead to one, in order.
        dense: positions of the dense ops, ascending.
    """
    # Number of dense ops before an all-to-all -> (position of its first use, of its last input, the all-to-all).
    by_product: dict[int, list[tuple[float, float, fx.Node]]] = {}
    for node in before:
        # Where its last input is computed; None if it needs inputs of the graph only, and then it stays.
        ready = max((priority[x] for x in node.all_input_nodes if x.op != "placeholder"), default=None)
        if node in starts:
            need = _first_use(node, priority)
            by_product.setdefault(bisect_right(dense, ready or 0.0), []).append((need, ready or 0.0, node))
        elif ready is not None and bisect_right(dense, ready) < bisect_left(dense, priority[node]):  # one in between
            priority[node] = ready + 1e-3
    # A start follows its last input later on, so the order of their inputs becomes that of the all-to-alls.
    for group in by_product.values():
        ready = max(at for _, at, _ in group)
        for number, (_, _, node) in enumerate(sorted(group, key=lambda entry: entry[:2])):
            for x in node.all_input_nodes if len(group) > 1 else ():
                if x in before and x.op == "call_function":
                    priority[x] = ready + 1e-3 * (number + 1)


def _place_final_waits(
    graph: fx.Graph, starts: list[fx.Node], free: frozenset[fx.Node], priority: dict[fx.Node, float], limit: int
) -> None:
    """Sets where to wait for collectives whose results only leave the graph (such as reduced gradients), so that when
    one starts, at most ``limit`` bytes of earlier ones are in flight, or only the one before it. Changes the waits'
    positions in ``priority``, in place.

    Each is waited for after the start of a later such collective, at the earliest the next one; the last ones at the
    end. A second reduction, or a move to the host, starts when the next collective does.

    Args:
        starts: the collectives, or the moves of saved values to the host.
        free: ops that can move to an earlier position, as from `prefetchable`.
        priority: position of each node in the new order, changed in place.
        limit: bytes; -1 for no limit.
    """
    # Nodes between a collective and the output -> number of collectives before them, and those of these nodes that lead
    # to a second collective or move.
    reductions_before = leaving(graph)
    lead_on = before_other_starts(reductions_before)
    # Waits whose results only leave the graph; other results of the same bucket may be used.
    tails = {node: [wait for wait in waits_of(node) if wait in reductions_before] for node in starts}
    awaited = [node for node in starts if tails[node]]
    # Gathers of inputs are prefetched already.
    awaited = [node for node in awaited if lead_on.isdisjoint(tails[node]) or not _always_ready(node, free)]
    # First reductions before second ones, whose starts move with the waits of the first ones.
    for turn in sorted({reductions_before.get(node, 0) for node in awaited}):
        same_turn = sorted(
            (node for node in awaited if reductions_before.get(node, 0) == turn), key=priority.__getitem__
        )
        bytes_before = [0, *accumulate(result_bytes(node) for node in same_turn)]  # bytes of the first n, by n
        for at, node in enumerate(same_turn):
            # Wait behind the start of the collective number ``later`` or, if there is none, at the position ``end``.
            later, end = len(same_turn), float(len(graph.nodes) + turn)
            if lead_on.issuperset(tails[node]):  # its next reduction should start soon
                later, end = at + 1, end - 0.5
            elif limit >= 0:  # the first one with which the bytes in flight, from this one on, exceed the limit
                later = max(at + 1, bisect_right(bytes_before, bytes_before[at] + limit) - 1)
            place = priority[same_turn[later]] + 0.1 if later < len(same_turn) else end
            # What follows the wait on the way to the output moves with it: casts, views, a next reduction.
            work = list(tails[node])
            while work:
                tail = work.pop()
                priority[tail] = place
                work += [user for user in tail.users if user in reductions_before]
    # Gradients on the host are read by the caller alone, after the graph.
    for node in graph.nodes:
        if move_kind(node) == "to_host" and not is_stored(node):
            priority |= dict.fromkeys(waits_of(node), inf)


def _always_ready(node: fx.Node, free: frozenset[fx.Node]) -> bool:
    """Returns whether all inputs of ``node`` are inputs of the graph, or ops in ``free`` (which need only these and can
    move ahead), so that it could start before all other ops.
    """
    return all(x.op == "placeholder" or x in free for x in node.all_input_nodes)


def _first_use(node: fx.Node, priority: dict[fx.Node, float]) -> float:
    """Returns the position of the first op that uses the result of a collective; inf for none."""
    return min((priority[user] for wait in waits_of(node) for user in wait.users), default=inf)
