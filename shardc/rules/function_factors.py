"""The factors of ``cond``, ``scan`` and ``while_loop`` (`shardc.custom_ops.function_ops`), from the ops in them.

Each op in a function joins the sub-dims of its operands and results, as its own rule says, and a step joins those of
what it carries. What is then one sub-dim everywhere is a factor of the whole op. A factor that an op in the function
sums leaves a pending sum, if all that follows is linear in it; what is carried is then a pending sum from the first
step on. A factor that is needed whole inside, such as one that a predicate depends on, is never split: functions do not
communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from shardc._compat import FakeTensorMode
from shardc.custom_ops.function_ops import Function, function_of
from shardc.ir.comm_volume import arguments_of
from shardc.ir.graph import Value, value_of
from shardc.rules.rule import Call
from shardc.rules.spec import Spec, carries

Row = tuple[int, ...]  # the sub-dims of a dim, major to minor; () for a dim of size 1
Rows = list[Row]  # one for each dim of a value


class SubDims:
    """The sub-dims of all values in the functions of a call, and which of them are the same. Sub-dims are numbers. As
    in union-find, a joined sub-dim stands for another one; a sub-dim that was cut stands for its two parts.

    Attributes:
        whole: the sub-dims that no axis may split.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._stands_for: dict[int, Row] = {}
        self.whole: set[int] = set()

    def new(self, size: int, whole: bool = False) -> Row:
        """Create a sub-dim of ``size`` elements; return it as a row (the sub-dims of one dim), which is () for size 1.
        ``whole``: no axis may split the sub-dim.
        """
        if size == 1:
            return ()
        self._sizes.append(size)
        row = (len(self._sizes) - 1,)
        self.whole.update(row if whole or not size else ())
        return row

    def size(self, sub_dim: int) -> int:
        """Return the number of elements of a sub-dim."""
        return self._sizes[sub_dim]

    def leaves(self, row: Iterable[int]) -> Iterator[int]:
        """Yield the sub-dims of ``row``. A sub-dim that was joined or cut is replaced by the sub-dims that it now
        stands for.
        """
        for sub_dim in row:
            if sub_dim in self._stands_for:
                yield from self.leaves(self._stands_for[sub_dim])
            else:
                yield sub_dim

    def keep_whole(self, row: Iterable[int]) -> None:
        """Forbid that an axis splits any of the sub-dims in ``row``."""
        self.whole.update(self.leaves(row))

    def join(self, left: Row, right: Row) -> None:
        """Record that two rows (lists of sub-dims) describe the same dim: their sub-dims are unified in pairs, the
        minor ones first.

        Sub-dims of different sizes are cut. If neither size divides the other, what remains is kept whole.
        """
        a, b = list(self.leaves(left)), list(self.leaves(right))
        while a and b:
            (*a, x), (*b, y) = self.leaves(a), self.leaves(b)
            if x == y:
                continue
            m, n = self._sizes[x], self._sizes[y]
            if not m or not n or (m % n and n % m):
                self.keep_whole([*a, x, *b, y])
                return
            if m > n:
                major, x = self._cut(x, n)
                a.append(major)
            elif n > m:
                major, y = self._cut(y, m)
                b.append(major)
            self._replace(x, (y,))

    def _cut(self, sub_dim: int, size: int) -> Row:
        """Cut a sub-dim into a major part and a minor part of ``size`` elements; return the row of both."""
        parts = (*self.new(self._sizes[sub_dim] // size), *self.new(size))
        self._replace(sub_dim, parts)
        return parts

    def _replace(self, sub_dim: int, row: Row) -> None:
        """Make ``sub_dim`` stand for the sub-dims in ``row`` from now on."""
        self._stands_for[sub_dim] = row
        if sub_dim in self.whole:
            self.whole.update(row)

    def keep_distinct(self, rows: Sequence[Row]) -> None:
        """Keep whole the sub-dims in more than one of ``rows``, since an axis cannot split two dims of a value."""
        seen: set[int] = set()
        for row in rows:
            leaves = set(self.leaves(row))
            self.whole.update(seen & leaves)
            seen |= leaves


Pending = frozenset[int]  # sub-dims over whose split a value is a pending sum
NOTHING: Pending = frozenset()
SpecOf = Callable[[Call], Spec | None]


@dataclass(frozen=True)
class Op:
    """An op in a function: its call at global shapes, its rule's factors as sub-dims, and the nodes of its operands."""

    node: fx.Node
    call: Call
    spec: Spec | None
    factors: Mapping[str, Row]
    operands: list[fx.Node]

    def summed(self, sub_dims: SubDims, rows: Rows) -> set[int]:
        """Return the sub-dims over which the op sums to compute a result: all sub-dims of the op that are not in
        ``rows``, the dims of the result.
        """
        return set(sub_dims.leaves(_row(self.factors, self.factors))) - _leaves_of(sub_dims, rows)


class Graph:
    """A graph of a function at global shapes, with the sub-dims of its values.

    Args:
        graph: the graph.
        operands: types of its arguments.
        rows: their sub-dims.
        sub_dims: those of all graphs of the function.
        spec_of: rules of the ops.

    Attributes:
        rows: node -> the sub-dims of each of its results.
        pending: node -> pending sums of each of its results, by the last `propagate`.
        outputs: the nodes that it returns.
    """

    def __init__(
        self, graph: fx.Graph, operands: Sequence[Value], rows: Sequence[Rows], sub_dims: SubDims, spec_of: SpecOf
    ) -> None:
        self.graph, self.sub_dims, self._spec_of = graph, sub_dims, spec_of
        self.device = _device(graph)
        self.vals = self._run(operands)
        self.rows: dict[fx.Node, list[Rows]] = {}
        self.pending: dict[fx.Node, list[Pending]] = {}
        self.ops: dict[fx.Node, Op] = {}
        argument_rows = iter(rows)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.rows[node] = [next(argument_rows)]
            elif node.target is getitem:
                self.rows[node] = [self.rows[node.args[0]][node.args[1]]]
            elif node.op == "call_function":
                self._add_op(node)
        output: Any = next(iter(reversed(graph.nodes))).args[0]
        self.outputs: list[fx.Node] = list(output)

    @property
    def results(self) -> list[Rows]:
        """Return the sub-dims of each output."""
        return [self.rows[node][0] for node in self.outputs]

    def _run(self, operands: Sequence[Value]) -> dict[fx.Node, Any]:
        """Run the graph on fake tensors of the types ``operands``; return node -> its fake value."""
        vals: dict[fx.Node, Any] = {}
        values = iter(operands)
        with FakeTensorMode():
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    value = next(values)
                    vals[node] = torch.empty(value.shape, dtype=value.dtype, device=self.device)
                elif node.op == "call_function":
                    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: vals[x])
                    vals[node] = node.target(*args, **kwargs)
        return vals

    def _add_op(self, node: fx.Node) -> None:
        """Adds the op ``node`` to ``ops``, and unifies the sub-dims of its operands with the factors of its rule."""
        call, new = self._call(node), self.sub_dims.new
        spec = self._spec_of(call)
        arguments = arguments_of(node)
        named = [arguments.get(argument.name) for argument in call.target._schema.arguments]
        flat = [x for item in named for x in (item if isinstance(item, (list, tuple)) else (item,))]
        operands = [x for x in flat if isinstance(x, fx.Node)]
        if spec is None:
            self.ops[node] = Op(node, call, None, {}, operands)
            self.sub_dims.keep_whole(s for x in operands for row in self.rows[x][0] for s in row)
            self.rows[node] = [[new(n, whole=True) for n in value.shape] if value else [] for value in call.results]
            return
        routed = () if spec.routed is None else (spec.routed.rows, spec.routed.owners)
        # In a function, no rank sends to another: what an op finds by its place, or routes, stays whole.
        placed = {*spec.indexed, *spec.ordered, *routed}
        factors = {f: new(n, f in placed or not _splits(spec, f)) for f, n in spec.sizes}
        for x, dims in zip(operands, spec.operands, strict=True):
            for row, names in zip(self.rows[x][0], dims, strict=True):
                self.sub_dims.join(row, _row(factors, names))
        results = iter(spec.results)
        self.rows[node] = [[_row(factors, names) for names in next(results)] if value else [] for value in call.results]
        self.ops[node] = Op(node, call, spec, factors, operands)

    def _call(self, node: fx.Node) -> Call:
        """Return the `Call` of an op, from the fake values of its operands and results."""

        def plain(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return tuple(map(plain, x))
            return value_of(self.vals[x]) if isinstance(x, fx.Node) else x

        value: Any = value_of(self.vals[node])
        kwargs = tuple(sorted((name, plain(x)) for name, x in node.kwargs.items()))
        target: Any = node.target
        return Call(target, plain(node.args), kwargs, value if isinstance(value, tuple) else (value,))

    def propagate(self, pending: Sequence[Pending], check: bool) -> list[Pending]:
        """Return the pending sums of each output (the sub-dims over which it is a pending sum), given those of the
        arguments. ``check``: forbid splits of a sub-dim if an op cannot take operands that are pending sums over it.

        Without ``check`` every op is assumed to pass them on.
        """
        arguments = iter(pending)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.pending[node] = [next(arguments)]
            elif node.target is getitem:
                self.pending[node] = [self.pending[node.args[0]][node.args[1]]]
            elif node in self.ops:
                self.pending[node] = self._pending(self.ops[node], check)
        return [self.pending[node][0] for node in self.outputs]

    def _pending(self, op: Op, check: bool) -> list[Pending]:
        """Return the pending sums of each result of ``op``, given the pending sums that are known for its operands.
        ``check``: forbid splits of a sub-dim if the op cannot take operands that are pending sums over it.
        """
        before, whole = [self.pending[x][0] for x in op.operands], self.sub_dims.whole
        carried, summed = NOTHING.union(*before), op.summed(self.sub_dims, [])
        for sub_dim in carried if check else ():
            positions = frozenset(at for at, pending in enumerate(before) if sub_dim in pending)
            if sub_dim in summed or op.spec is None or not carries(op.spec, "sum", positions):
                whole.add(sub_dim)
        replicated = NOTHING if op.spec is None else op.spec.replicated
        return [
            (carried | (set() if at in replicated else op.summed(self.sub_dims, rows))) - whole
            for at, rows in enumerate(self.rows[op.node])
        ]


def _splits(spec: Spec, factor: str) -> bool:
    """Return whether an axis may split ``factor``, and every result that lacks the factor is then a partial sum (not a
    partial maximum, for example).
    """
    return spec.splittable(factor) and (spec.carried_by_all(factor) or dict(spec.reduce)[factor] == "sum")


def _row(factors: Mapping[str, Row], names: Iterable[str]) -> Row:
    """Return the sub-dims of the factors ``names``, one after the other."""
    return tuple(sub_dim for name in names for sub_dim in factors[name])


def _leaves_of(sub_dims: SubDims, rows: Rows) -> set[int]:
    """Return the sub-dims of a value whose dims are ``rows``. A sub-dim that was joined or cut is replaced by the
    sub-dims that it now stands for.
    """
    return {sub_dim for row in rows for sub_dim in sub_dims.leaves(row)}


def _device(graph: fx.Graph) -> Any:
    """Return the device on which ops of the graph create tensors; the CPU if none does, which is enough to compute
    shapes.
    """
    return next((x for node in graph.nodes if (x := node.kwargs.get("device")) is not None), torch.device("cpu"))


Flow = tuple[list[tuple[int, int | None]], list[int | None]]


def _flows(kind: str, counts: tuple[int, int], floating: Sequence[bool]) -> tuple[list[int], list[Flow]]:
    """Return how values flow from step to step of an op of this ``kind`` ("scan", "cond", "while_loop",
    "loop_gradient"): (for each carry, the operand that it starts from; for each graph, its flow).

    A carry is a value that goes from step to step; it has the sub-dims of that operand. The flow of a graph is (operand
    and number of the carry for each argument, number of the carry for each result), with None where there is no carry.
    """
    first, second = counts
    operands = len(floating)
    # Operands: gradients of the loop's results, its carries, and the rest, whose gradients are summed over the steps.
    if kind == "loop_gradient":
        initial = first + second
        summed = [at for at in range(initial, operands) if floating[at]]
        totals = [(at, initial + number) for number, at in enumerate(summed)]
        plain = [(at, at if at < initial else None) for at in range(first, operands)]
        gradients: list[int | None] = [*range(first), *(number for _, number in totals)]
        back = [*((at, at) for at in range(first)), *totals, *plain]
        return [*range(initial), *summed], [(plain, [None]), (plain, [*range(first, initial)]), (back, gradients)]
    arguments = [(at, at if at < first else None) for at in range(operands)]
    step: Flow = arguments, [*range(first)]
    others: dict[str, list[Flow]] = {"scan": [], "cond": [step], "while_loop": [(arguments, [None])]}
    return [*range(first)], [*others[kind], step]


class Factored:
    """A call of an op that runs functions, such as ``scan`` or ``cond``: the graphs of the functions, and the factors
    of the call that follow from their ops.

    Attributes:
        operands, results: sub-dims of the operands and of the results.
        time: sub-dim of the steps of a scan.
        pending: pending sums of each result.
        carried: pending sums of each carry (value that is carried from step to step).
        initial: number of carries that start with an operand's value; the others start with zero.
        replicated: see `shardc.rules.spec.Spec`.
    """

    def __init__(self, call: Call, spec_of: SpecOf) -> None:
        self.function: Function = function_of(call["body"])
        self.sub_dims = SubDims()
        self.operands = [[self.sub_dims.new(size) for size in value.shape] for value in call.operands]
        self.pending: list[Pending] = []
        self.time: Row = ()
        kind, counts = self.function.kind, self.function.counts
        values, rows = self._step_operands(call)
        carried, self.flows = _flows(kind, counts, [value.dtype.is_floating_point for value in values])
        self.carried, self.initial = [NOTHING] * len(carried), counts[0] + counts[1] * (kind == "loop_gradient")
        self.graphs = []
        for graph, (arguments, results) in zip(self.function.graphs, self.flows, strict=True):
            places = [at for at, _ in arguments]
            of_step = [values[at] for at in places], [rows[at] for at in places]
            self.graphs.append(Graph(graph, *of_step, self.sub_dims, spec_of))
            # What a step returns for a carry is its operand in the next step: their sub-dims are the same.
            for result, number in zip(self.graphs[-1].results, results, strict=False):
                if number is not None:
                    self._join(rows[carried[number]], result)
        self.results = self._joined_results(counts[0])
        if self.time and not all(value.dtype.is_floating_point for value in values[: counts[0]]):
            self.sub_dims.keep_whole(self.time)
        self._keep_distinct()
        self._propagate_pending()
        self.replicated = self._replicated()
        for at in range(counts[0] if self.time else 0):  # the last rank has what the last step carries
            self.pending[at] |= frozenset(self.sub_dims.leaves(self.time)) - self.sub_dims.whole

    def _step_operands(self, call: Call) -> tuple[list[Value], list[Rows]]:
        """Return the types and the sub-dims of the operands as one step gets them: without the predicate of a ``cond``,
        and with a slice of each sequence of a ``scan``, whose dim 0 becomes ``time``.
        """
        kind, counts = self.function.kind, self.function.counts
        leading = 1 if kind == "cond" else 0  # the predicate
        values, rows = list(call.operands[leading:]), list(self.operands[leading:])
        for at in range(counts[0], sum(counts)) if kind == "scan" else ():
            (steps, *shape), (row, *rows[at]) = values[at].shape, rows[at]
            self.time = self.time or self.sub_dims.new(steps)
            self.sub_dims.join(row, self.time)
            values[at] = Value(values[at].dtype, tuple(shape))
        return values, rows

    def _joined_results(self, carries: int) -> list[Rows]:
        """Return the sub-dims of the results of the op: those of the last graph's outputs, with ``time`` before those
        of a ``scan`` that are no carries. The outputs of both branches of a ``cond`` are joined.
        """
        results = self.graphs[-1].results
        if self.function.kind == "cond":
            for first, other in zip(self.graphs[0].results, results, strict=True):
                self._join(first, other)
        if self.function.kind == "scan":
            return [*results[:carries], *([self.time, *result] for result in results[carries:])]
        return results

    def _join(self, rows: Rows, others: Rows) -> None:
        """Record that two values of the same shape have the same sub-dims: unify the rows of each dim."""
        for row, other in zip(rows, others, strict=True):
            self.sub_dims.join(row, other)

    def _keep_distinct(self) -> None:
        """Forbids splits of a sub-dim that occurs twice: in two factors of one op, or in two dims of one operand or
        result.
        """
        for graph in self.graphs:
            for op in graph.ops.values():
                self.sub_dims.keep_distinct(list(op.factors.values()))
        for rows in (*self.operands, *self.results):
            self.sub_dims.keep_distinct(rows)

    def _propagate_pending(self) -> None:
        """Computes over which sub-dims the carries (values that go from step to step) and results are pending sums.
        Steps are repeated until nothing changes.

        A sub-dim is kept whole if a step changes whether a carry is a pending sum over it.
        """
        whole, kind = self.sub_dims.whole, self.function.kind
        before = -1
        while before < len(whole):
            before, self.carried = len(whole), [NOTHING] * len(self.carried)
            while (
                after := [old | new for old, new in zip(self.carried, self._step(check=False), strict=True)]
            ) != self.carried:
                self.carried = after
            # The steps above only add pending sums; this one shows which of them a step does not carry on.
            for old, new in zip(self.carried, self._step(check=True), strict=True):
                whole.update(old ^ new)
            if kind in ("while_loop", "loop_gradient"):
                condition = self._pending_of_graphs[0][0]
                whole.update(condition)  # it is complete on each rank, so that all take as many steps
            of_both = [NOTHING.union(*x) for x in zip(*self._pending_of_graphs, strict=True)] if kind == "cond" else []
            self.pending = of_both or self._pending_of_graphs[-1]
            self._keep_consistent()

    def _step(self, check: bool) -> list[Pending]:
        """Return the pending sums of the carries (values that go from step to step) after one more step. ``check``:
        forbid splits of a sub-dim if an op cannot take operands that are pending sums over it.
        """
        after, self._pending_of_graphs = list(self.carried), []
        for graph, (arguments, results) in zip(self.graphs, self.flows, strict=True):
            incoming = [NOTHING if number is None else self.carried[number] for _, number in arguments]
            self._pending_of_graphs.append(graph.propagate(incoming, check))
            for number, pending in zip(results, self._pending_of_graphs[-1], strict=False):
                if number is not None:
                    after[number] = pending
        return after

    def _keep_consistent(self) -> None:
        """Forbids splits of a sub-dim over which some result is a pending sum, unless each result is split by it, is
        pending over it (not both), or has no pending sum at all.
        """
        for sub_dim in NOTHING.union(*self.pending):
            for rows, pending in zip(self.results, self.pending, strict=True):
                split = sub_dim in _leaves_of(self.sub_dims, rows)
                if split == (sub_dim in pending) and (split or pending):
                    self.sub_dims.whole.add(sub_dim)

    def _replicated(self) -> frozenset[int]:
        """Return the positions of the results that stay replicated if some factor is split (a factor other than the
        steps).
        """
        split = [_leaves_of(self.sub_dims, rows) for rows in self.results]
        free = self._all_leaves() - self.sub_dims.whole - set(self.sub_dims.leaves(self.time))
        return frozenset(at for at, summed in enumerate(self.pending) if not summed and free - split[at])

    def _all_leaves(self) -> set[int]:
        """Return the sub-dims of all operands and results."""
        return _leaves_of(self.sub_dims, [row for rows in (*self.operands, *self.results) for row in rows])

    def dims(self, rows: Rows) -> tuple[tuple[str, ...], ...]:
        """Return the names of the factors of each dim of an operand or result, whose sub-dims are ``rows``."""
        return tuple(tuple(map(self.factor, self.sub_dims.leaves(row))) for row in rows)

    @staticmethod
    def factor(sub_dim: int) -> str:
        """Return the name, such as ``f3``, that ``sub_dim`` has as a factor of the call."""
        return f"f{sub_dim}"

    def spec(self) -> Spec:
        """Return the `Spec` of the call. Its factors are the sub-dims of the operands and results."""
        every, pending = sorted(self._all_leaves()), NOTHING.union(*self.pending)
        time = frozenset(map(self.factor, self.sub_dims.leaves(self.time)))
        return Spec(
            tuple(map(self.dims, self.operands)),
            tuple(map(self.dims, self.results)),
            tuple(sorted((self.factor(x), self.sub_dims.size(x)) for x in every)),
            tuple((self.factor(x), "sum") for x in every if x in pending),
            frozenset(self.factor(x) for x in every if x in self.sub_dims.whole),
            replicated=self.replicated,
            indexed=time,
            ordered=time,
            in_turn=time,
        )
