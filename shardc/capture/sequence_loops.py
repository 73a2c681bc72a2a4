"""Rewrites loops over the elements, or equal pieces, of a sequence as scans. (Dynamo unrolls such loops.)

    for t in range(n):                          scan(step, [state], [x.movedim(1, 0)])
        state = f(state, x[:, t])        ->
        out[:, t] = g(state)                    out[:] = every.movedim(0, 1)

A scan over a sequence that ranks have in pieces passes its state from rank to rank (`shardc.rules.scans`). Of an
unrolled loop, each place is an op of its own, and all ranks need all places.

In the graph, a loop is a row of equal segments. What differs between them is known to be

- the number of a slice that a step reads: 0 in the first segment, then 1, up to all slices of a dim;
- values of the segment before, in whose place the first segment has others: what is carried;
- the number of the slice that a step writes.

What segments compute is used by the same and the next segment, collected by ``stack`` or ``cat``, written, or, of the
last segment, used in other ways. If anything else differs, or if a step draws random numbers or writes to its operands,
the loop stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.capture.functions import graph_of_function
from shardc.capture.slices import WHOLE, Series, arguments, indexed, memory_of, slices, value_of
from shardc.capture.writes import written
from shardc.capture.written_out import scan

STEPS = 4  # fewest steps of a loop that is written as a scan


def scan_loops(
    gm: fx.GraphModule, lengths: Collection[int], decompositions: dict[Any, Callable[..., object]]
) -> Callable[[], None] | None:
    """Rewrites each unrolled loop over a whole sequence in Dynamo's graph as a scan, in place. Returns a function that
    undoes this; None if there is no such loop.

    Args:
        lengths: lengths of the sequences, in elements.
        decompositions: as for AOTAutograd.
    """
    original: fx.Graph | None = None
    count = 0
    while lengths and (loop := next(_loops(gm.graph, lengths, decompositions), None)) is not None:
        original = original or _copy(gm.graph)
        loop.rewrite(gm, f"loop_{count}")
        count += 1
    if original is None:
        return None
    gm.graph.lint()
    gm.recompile()
    return lambda: setattr(gm, "graph", original)


def _copy(graph: fx.Graph) -> fx.Graph:
    """Return a copy of ``graph``, with its code generator."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    copy._codegen = graph._codegen
    return copy


def _loops(
    graph: fx.Graph, lengths: Collection[int], decompositions: dict[Any, Callable[..., object]]
) -> Iterator[_Loop]:
    """Yield the unrolled loops in ``graph`` over a whole sequence that can be written as scans: find calls at equal
    distances that use its slices in order, cut the calls around them into segments, and check these.
    """
    by_series: dict[Series, dict[int, list[fx.Node]]] = {}
    for node in graph.nodes:
        for series, at in slices(node):
            by_series.setdefault(series, {}).setdefault(at, []).append(node)
    # Series of which every slice is read.
    whole_series = {
        x: nodes for x, nodes in by_series.items() if len(nodes) >= STEPS and set(nodes) == {*range(x.count)}
    }
    for steps in dict.fromkeys(x.count for x in whole_series if _is_whole_sequence(x, lengths)):
        numbered = {x: nodes for x, nodes in whole_series.items() if x.count == steps}
        order = _Order(graph, numbered)
        for series, nodes in numbered.items():
            for last, size in order.strides(nodes) if _is_whole_sequence(series, lengths) else ():
                for segments in order.segments(last, size, steps):
                    loop = _Loop(order, segments, decompositions)
                    if loop.matches():
                        yield loop
                        break  # other cuts of these calls overlap this loop


def _is_whole_sequence(series: Series, lengths: Collection[int]) -> bool:
    """Return whether ``series`` cuts a whole sequence into its elements, or into pieces of equal size. ``lengths`` are
    the lengths of the sequences. False for slices of a parameter.
    """
    if isinstance(value_of(series.source), nn.Parameter):  # layers that are stacked, say
        return False
    shape, dim = value_of(series.source).shape, series.dim
    # A sequence viewed as [pieces, size of a piece]: its length is the product of both dims.
    after = shape[dim + 1] if dim + 1 < len(shape) else 1
    return any(length in (shape[dim], series.count * after) for length in lengths)


class _Order:
    """The calls of a graph in order, without those that take slices of a tensor.

    Attributes:
        calls: the calls in order.
        place: call -> its position in ``calls``.
        slices: slice -> each (series, number in it) that it may be.
    """

    def __init__(self, graph: fx.Graph, numbered: dict[Series, dict[int, list[fx.Node]]]) -> None:
        self.slices: dict[fx.Node, list[tuple[Series, int]]] = {}
        for series, nodes in numbered.items():
            for at, same in nodes.items():
                for node in same:
                    self.slices.setdefault(node, []).append((series, at))
        # Positions among all nodes of the graph; `place` counts `calls` only.
        self.everywhere = {node: at for at, node in enumerate(graph.nodes)}
        called = (node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module"))
        self.calls = [node for node in called if node not in self.slices]
        self.place = {node: at for at, node in enumerate(self.calls)}
        self._keys = [_key(node) for node in self.calls]  # equal for calls that may be the same call of two steps

    def strides(self, nodes: dict[int, list[fx.Node]]) -> Iterator[tuple[int, int]]:
        """Find calls at equal distances that use the slices ``nodes`` one after the other. Yield (position of the call
        that uses the last slice, distance) for each such row of calls.

        The use of the first slice may be elsewhere.

        Args:
            nodes: number of a slice -> the nodes that are it.
        """
        uses = []  # of each slice, the positions of the calls that use it, the last first
        for at in range(len(nodes)):
            users = {user for node in nodes[at] for user in node.users if user in self.place}
            uses.append(sorted((self.place[user] for user in users), reverse=True))
        # The k-th user from the end of each slice but the first: these may be the same call of each step.
        for places in dict.fromkeys(zip(*uses[1:], strict=False)):
            distances = {b - a for a, b in zip(places, places[1:], strict=False)}
            if len(distances) == 1 and (size := distances.pop()) > 0:
                yield places[-1], size

    def segments(self, last: int, size: int, steps: int) -> Iterator[list[list[fx.Node]]]:
        """Yield each way to cut calls into ``steps`` adjacent segments of ``size`` calls with equal ops. The last
        segment contains the call at position ``last``.

        The slices tell how far apart the steps are, but not at which call a step begins: all cuts are tried.
        """
        # The call that is in the first segment what ``last`` is in the last, and the last call of all segments.
        keys, counterpart, latest = self._keys, last - size * (steps - 1), last
        # The last segment may end later, as long as ops repeat at this distance.
        while latest + 1 < len(keys) and latest + 1 < last + size and keys[latest + 1] == keys[latest + 1 - size]:
            latest += 1
        if counterpart < 0 or any(keys[at] != keys[at + size] for at in range(counterpart, last - size + 1)):
            return
        # The first segment may begin earlier, as long as ops repeat at the same distance.
        earliest = counterpart
        while earliest > 0 and counterpart - earliest < size and keys[earliest - 1] == keys[earliest - 1 + size]:
            earliest -= 1
        for stop in range(latest + 1, last, -1):  # the end of the last segment
            start = stop - size * steps
            if start >= earliest:
                yield [self.calls[at : at + size] for at in range(start, stop, size)]


def _key(node: fx.Node) -> object:
    """Return a key of a call. Calls at the same place of two equal segments have equal keys."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: None)  # operands are compared by `_Loop.matches`
    if node.target is operator.setitem:
        args = ()  # its index differs from step to step
    types = [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in pytree.tree_leaves(value_of(node))]
    return node.op, node.target, repr(args), repr(kwargs), repr(types)


@dataclass
class _Loop:
    """An unrolled loop as adjacent equal segments of calls (its steps), and what the segments read and write. A call's
    number is its index in its segment.

    Attributes:
        carries: (number of the call whose value is carried to the next segment, the value that the first segment
            reads).
        xs: the series whose slices the segments read.
        rest: values that all segments read.
        writes: (series whose slices the segments write, number of the call that computes the values).
        last: numbers of the calls whose value in the last segment is used after it.
        collected: ``stack`` or ``cat`` -> number of the call whose values it collects.
    """

    order: _Order
    segments: list[list[fx.Node]]
    decompositions: dict[Any, Callable[..., object]]
    carries: list[tuple[int, fx.Node]] = field(default_factory=list)
    xs: list[Series] = field(default_factory=list)
    rest: list[fx.Node] = field(default_factory=list)
    writes: list[tuple[Series, int]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    collected: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = {node: (k, at) for k, nodes in enumerate(self.segments) for at, node in enumerate(nodes)}
        # Operands of the calls of the first segment: (kind, number), None for values of the segment.
        self.roles: list[list[tuple[str, int] | None]] = []

    # --- what the segments are

    def matches(self) -> bool:
        """Return whether the segments can be written as a scan: a step reads slices, carries and values that are the
        same for all, and what it computes is carried, written or collected. Fills the attributes, which describe the
        scan.
        """
        return (
            all(self._reads(at) for at in range(len(self.segments[0])))
            and all(self._provides_uses(at) for at in range(len(self.segments[0])))
            and bool(self.xs and self.carries and (self.writes or self.collected or self.last))
            and self._can_move()
            and self._step_is_pure()
        )

    def _reads(self, at: int) -> bool:
        """Check the operands of call number ``at``, in all segments: return whether a scan's step can read them. Adds
        to ``roles`` what each operand is to the scan (a carry, a slice or the same in all steps).
        """
        calls = [nodes[at] for nodes in self.segments]
        self.roles.append([])
        if calls[0].target is operator.setitem:
            return self._writes(calls)
        if not all(isinstance(x, Tensor) for x in pytree.tree_leaves(value_of(calls[0]))):
            return False
        target: Any = calls[0].target
        # Ops of shardc, such as the marks of activations that the plan names, must stay in the graph.
        marks = getattr(target, "namespace", "").startswith("shardc")
        if calls[0].op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator) or marks:
            return False
        operands = [list(_operands(node)) for node in calls]
        return all(self._operand(at, list(same)) for same in zip(*operands, strict=True))

    def _operand(self, at: int, nodes: list[fx.Node]) -> bool:
        """Return whether a scan's step can read one operand of call number ``at``. The operand is ``nodes[k]`` in
        segment k.

        It can if ``nodes`` are one value, slices in order, values of their own segments, or values of the segments
        before. Adds that role to ``roles[at]``.
        """
        places = [self.number.get(node) for node in nodes]  # (segment, number) of calls of the loop, None for others
        if places[0] is not None:  # a value of the segment itself
            self.roles[at].append(None)
            return places == [(k, places[0][1]) for k in range(len(nodes))]
        if (before := places[1]) is not None:  # of the segment before: a carry
            self._add(at, "carry", self.carries, (before[1], nodes[0]))
            return places[1:] == [(k, before[1]) for k in range(len(nodes) - 1)] and _have_same_type(nodes)
        if any(place is not None for place in places) or not isinstance(value_of(nodes[0]), Tensor):
            return False
        if all(node is nodes[0] for node in nodes):  # the same in all segments
            self._add(at, "rest", self.rest, nodes[0])
            return True
        for series, _ in self.order.slices.get(nodes[0], ()):
            if all((series, k) in self.order.slices.get(node, ()) for k, node in enumerate(nodes)):
                self._add(at, "x", self.xs, series)  # slice k in segment k
                return series.source not in self.number
        return False

    def _add(self, at: int, kind: str, items: list[Any], item: Any) -> None:
        """Adds ``item`` to the list ``items``, unless it is in there. Notes its role (``kind``, index in ``items``) as
        an operand of call number ``at``.
        """
        if item not in items:
            items.append(item)
        self.roles[at].append((kind, items.index(item)))

    def _writes(self, calls: Sequence[fx.Node]) -> bool:
        """Return whether ``calls`` (one per segment) assign values that their segments compute to all slices of a
        tensor, in order. If so, adds the series and the number of the computing call to ``writes``.
        """
        # ``out[index] = value`` of the first segment, and [out, index, value] of the others.
        (out, index, value), *others = ([*call.args] for call in calls)
        # (segment, index in it) of the call that computes the value; it must be in the first segment.
        computing = self.number.get(value) if isinstance(value, fx.Node) else None
        if computing is None or computing[0] or not isinstance(value_of(out), Tensor) or out in self.number:
            return False
        if not all(x[0] is out and self.number.get(x[2]) == (k, computing[1]) for k, x in enumerate(others, 1)):
            return False
        for series, first in indexed(out, index):
            # The number of the slice that each segment writes.
            slice_numbers = [first, *(dict(indexed(out, x[1])).get(series) for x in others)]
            if slice_numbers == [*range(series.count)] and series.count == len(self.segments) and not series.rest:
                self.writes.append((series, computing[1]))
                # A scan stacks values as they are: they must have the shape of a slice, and not broadcast to it.
                slot = list(value_of(out).shape)
                slot[series.dim : series.dim + 1] = [] if series.size is None else [series.size]
                return slot == list(value_of(value).shape)
        return False

    def _provides_uses(self, at: int) -> bool:
        """Return whether a scan over the segments (the loop's unrolled steps) can provide the values of call number
        ``at`` to all users outside of the loop. Adds a ``stack`` or ``cat`` of all its values to ``collected``, and
        ``at`` to ``last`` if the last step's value alone is used.
        """
        outside: dict[fx.Node, list[int]] = {}  # user outside of the loop -> the segments whose value it uses
        for k, nodes in enumerate(self.segments):
            for user in nodes[at].users:
                if user not in self.number:
                    outside.setdefault(user, []).append(k)
        calls = [nodes[at] for nodes in self.segments]
        for user, ks in outside.items():
            if _collects(user, calls):
                self.collected[user] = at
            elif ks == [len(calls) - 1] and isinstance(value_of(calls[0]), Tensor):
                self.last.append(at)
            else:
                return False
        return True

    @property
    def start(self) -> fx.Node:
        """Return the first call of the first segment."""
        return self.segments[0][0]

    def _can_move(self) -> bool:
        """Return whether all segments can be moved to one place of the graph without a change of any value.

        The operands must be computed before the first segment and not change until the end of the last. Nothing may
        read the memory that segments write before all of it is written. Nothing after the loop may write in place to
        what it computed.
        """
        place, slices_of = self.order.everywhere, self.order.slices
        begin, end = place[self.start], place[self.segments[-1][-1]]
        operands = [*(x for _, x in self.carries), *self.rest, *(series.source for series in self.xs)]
        if any(place[x] >= begin for x in [*operands, *(series.source for series, _ in self.writes)]):
            return False
        # The scan's results are assigned after it, so tensors that are written must share no memory with each other or
        # with operands: steps would read the old values.
        outs = [memory_of(series.source) for series, _ in self.writes]
        if None in outs or len(set(outs)) < len(outs):
            return False
        if not self._results_unchanged_later():
            return False
        memories = {memory_of(x) for x in operands}
        if not memories.isdisjoint(outs):
            return False
        read = {node for nodes in self.segments for call in nodes for node in _operands(call) if node in slices_of}
        first_read = min([begin, *(place[node] for node in read)])
        # Only slices may lie between segments, and no write to an operand between the first slice read and the loop.
        for node, at in place.items():
            inside = begin <= at <= end
            if inside and node not in self.number and node.op not in ("placeholder", "get_attr"):
                if node not in slices_of or memory_of(node) in outs:
                    return False
            if first_read <= at < begin and not memories.isdisjoint(map(memory_of, written(node))):
                return False
        return True

    def _results_unchanged_later(self) -> bool:
        """Return whether nothing after the loop writes in place to values that the loop has computed. (A scan's results
        are copies.)
        """
        used = [*(at for at, _ in self.carries), *self.results]
        memories = {memory_of(nodes[at]) for nodes in self.segments for at in used}
        end = self.order.everywhere[self.segments[-1][-1]]
        later = (node for node, at in self.order.everywhere.items() if at > end)
        return all(memories.isdisjoint(map(memory_of, written(node))) for node in later)

    # --- the step

    def _step_is_pure(self) -> bool:
        """Return whether the step can be the function of a scan: it draws no random numbers and does not write to its
        operands.
        """
        body = self._body()
        fakes = [x.meta["example_value"] for x in body.find_nodes(op="placeholder")]
        mode = fakes[0].fake_mode
        with mode, torch.no_grad():
            operands = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in fakes]
            try:  # a trace to aten ops, in which writes and draws can be told by the ops
                run = fx.Interpreter(fx.GraphModule({}, body))
                traced = make_fx(lambda *flat: run.run(*flat), decomposition_table=self.decompositions)(*operands)
                if any(node.op == "call_function" and _mutates(node.target) for node in traced.graph.nodes):
                    return False
                graph_of_function(traced, None, "scan")
            except Exception:  # from the checks, fake kernels or autograd
                return False
        return True

    def _body(self) -> fx.Graph:
        """Return the graph of one step. Its arguments are the carries, a slice of each series in ``xs``, and the values
        in ``rest``; it returns the new carries and the values to collect.
        """
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        placeholders: dict[tuple[str, int], fx.Node] = {}
        for kind, values in self._values().items():
            for number, value in enumerate(values):
                placeholders[kind, number] = graph.placeholder(f"{kind}_{number}")
                placeholders[kind, number].meta["example_value"] = value
        for number, series in enumerate(self.xs):
            if series.rest:  # the scan takes all other dims of the source, of which steps read a part
                placeholders["x", number] = graph.call_function(
                    operator.getitem, (placeholders["x", number], series.index)
                )
        for node, roles in zip(self.segments[0], self.roles, strict=True):
            if node.target is not operator.setitem:  # `rewrite` assigns the stacked values after the scan
                # `node_copy` visits the operands in the order in which they got their roles.
                remaining_roles = iter(roles)
                env[node] = graph.node_copy(
                    node, lambda x, left=remaining_roles: env[x] if (role := next(left)) is None else placeholders[role]
                )
        nodes = [env[self.segments[0][at]] for at in (*(at for at, _ in self.carries), *self.results)]
        # Results of a scan share no memory with each other or with operands.
        copies = [graph.call_method("clone", (node,)) for node in nodes]
        graph.output(tuple(copies))
        return graph

    @property
    def results(self) -> list[int]:
        """Return the numbers of the calls whose values the scan must return stacked: those that are written or
        collected, and those whose last value is used after the loop but not carried.
        """
        carried = [at for at, _ in self.carries]
        numbers = [*(number for _, number in self.writes), *self.collected.values()]
        return list(dict.fromkeys([*numbers, *(at for at in self.last if at not in carried)]))

    def _values(self) -> dict[str, list[Tensor]]:
        """Return example values of the step's operands by kind: "carry", "x" (a slice of a sequence) and "rest"."""
        sliced: list[Tensor] = []
        for series in self.xs:
            x = value_of(series.source)
            with x.fake_mode:
                sliced.append(x.select(series.dim, 0) if series.size is None else x.narrow(series.dim, 0, series.size))
        return {"carry": [value_of(x) for _, x in self.carries], "x": sliced, "rest": [*map(value_of, self.rest)]}

    # --- the scan

    def rewrite(self, gm: fx.GraphModule, name: str) -> None:
        """Replaces the segments in ``gm`` by a scan. The graph of the step becomes the attribute ``name`` of ``gm``."""
        body, result_calls, steps = self._body(), self.results, len(self.segments)
        gm.add_submodule(name, fx.GraphModule({}, body))
        with gm.graph.inserting_before(self.start):
            step = gm.graph.get_attr(name)
        at = _At(gm.graph, self.start)
        # Operands of a scan share no memory.
        shared = {memory_of(series.source) for series in self.xs}
        carries, rest = (
            [at.unaliased(x, shared) for x in group] for group in ([x for _, x in self.carries], self.rest)
        )
        results_of_scan = at.call(scan, step, carries, [at.series(series) for series in self.xs], rest)
        carried = [at.item(results_of_scan, number, value_of(x)) for number, (_, x) in enumerate(self.carries)]
        stacked = {}  # number of a call -> its values of all steps, stacked along dim 0
        for number, call_number in enumerate(result_calls, len(carried)):
            value = value_of(self.segments[0][call_number])
            with value.fake_mode:
                stacked[call_number] = at.item(results_of_scan, number, value.new_empty((steps, *value.shape)))
        for series, number in self.writes:
            at.write(series, stacked[number])
        for collector, call_number in self.collected.items():
            at_collector = _At(gm.graph, collector)
            collector.replace_all_uses_with(at_collector.collected(collector, stacked[call_number]))
            gm.graph.erase_node(collector)
        # The value of the last step alone: a scan returns that of a carry; of another result it is the last of all.
        finals = {number: value for (number, _), value in zip(self.carries, carried, strict=True)}
        for number in self.last:
            value = finals.get(number)
            value = at.call("select", stacked[number], 0, steps - 1) if value is None else value
            self.segments[-1][number].replace_all_uses_with(value, delete_user_cb=lambda user: user not in self.number)
        # Slices are no calls of the segments: those that nothing else uses are erased after these.
        used = [x for nodes in self.segments for call in nodes for x in _operands(call) if x in self.order.slices]
        for node in reversed([node for nodes in self.segments for node in nodes]):
            gm.graph.erase_node(node)
        for node in dict.fromkeys(used):
            _erase(gm.graph, node)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erases a node that takes a slice if nothing uses it. If it took an item of a tuple (of ``split``) that nothing
    else uses, the tuple is erased as well.
    """
    if node.op in ("call_function", "call_method") and not node.users:
        source = node.args[0]
        graph.erase_node(node)
        if isinstance(source, fx.Node) and isinstance(value_of(source), (tuple, list)):
            _erase(graph, source)


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes among the arguments of ``node`` in order; a node that is there twice is yielded twice."""
    leaves: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), leaves.append)
    yield from leaves


def _have_same_type(nodes: Iterable[fx.Node]) -> bool:
    """Return whether all ``nodes`` are tensors of the same shape, dtype and device."""
    values = list(map(value_of, nodes))
    return all(isinstance(x, Tensor) for x in values) and len({(x.shape, x.dtype, x.device) for x in values}) == 1


def _collects(user: fx.Node, calls: Sequence[fx.Node]) -> bool:
    """Return whether ``user`` stacks or concatenates the values of exactly ``calls``, in order."""
    named = arguments(user, "tensors", "dim")
    listed = named.get("tensors")
    return (
        user.target in _COLLECTORS
        and named.keys() <= {"tensors", "dim"}
        and isinstance(listed, (list, tuple))
        and list(listed) == list(calls)
        and isinstance(named.get("dim", 0), int)
        and value_of(calls[0]).ndim > 0
    )


def _mutates(target: Any) -> bool:
    """Return whether a call of ``target`` may write to its operands."""
    return target is not operator.getitem and (not hasattr(target, "_schema") or target._schema.is_mutable)


_JOINS = (torch.cat, torch.concat, torch.concatenate)
_COLLECTORS = (torch.stack, *_JOINS)


@dataclass(frozen=True)
class _At:
    """Inserts calls into ``graph`` before ``node``. The calls get the source line and module of ``node``."""

    graph: fx.Graph
    node: fx.Node

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Insert a call of ``target`` and return its node. A string as ``target`` is the name of a method of the first
        argument.
        """
        with self.graph.inserting_before(self.node):
            call = self.graph.call_method(target, args) if isinstance(target, str) else self.graph.call_function(
                target, args
            )  # fmt: skip
        call.meta = {key: value for key, value in self.node.meta.items() if key != "example_value"}
        if isinstance(target, str):
            x, *rest = args
            with value_of(x).fake_mode:
                call.meta["example_value"] = getattr(value_of(x), target)(*rest)
        return call

    def unaliased(self, x: fx.Node, shared: set[Any]) -> fx.Node:
        """Return ``x`` and add its memory to ``shared``, or return a copy of ``x`` if its memory is in ``shared``
        already.
        """
        if memory_of(x) in shared:
            return self.call("clone", x)
        shared.add(memory_of(x))
        return x

    def item(self, scan: fx.Node, number: int, value: Any) -> fx.Node:
        """Insert a getitem of result ``number`` of the node ``scan`` and return it. The result is a tensor like
        ``value``.
        """
        result = self.call(operator.getitem, scan, number)
        with value.fake_mode:
            result.meta["example_value"] = torch.empty_like(value)
        return result

    def series(self, series: Series) -> fx.Node:
        """Insert calls that stack all slices of a series along dim 0; return the stacked tensor's node."""
        x, dim = series.source, series.dim
        if series.size is not None:
            x = self.call("unflatten", x, dim, (series.count, series.size))
        return self.call("movedim", x, dim, 0)

    def write(self, series: Series, every: fx.Node) -> None:
        """Insert calls that assign ``every``, new values of all slices of a series stacked along dim 0, to the tensor
        of the series.
        """
        x = self.call("movedim", every, 0, series.dim)
        if series.size is not None:
            x = self.call("flatten", x, series.dim, series.dim + 1)
        self.call(operator.setitem, series.source, WHOLE, x)

    def collected(self, collector: fx.Node, every: fx.Node) -> fx.Node:
        """Insert calls that compute the result of ``collector``, a stack or concatenation of values of the segments;
        return the last node. ``every`` is the node of these values, stacked along dim 0.
        """
        dim = arguments(collector, "tensors", "dim").get("dim", 0)
        joins = collector.target in _JOINS  # ``cat``: no dim of its own for the steps, unlike ``stack``
        dim %= value_of(every).ndim - joins
        x = self.call("contiguous", self.call("movedim", every, 0, dim))
        return self.call("flatten", x, dim, dim + 1) if joins else x
