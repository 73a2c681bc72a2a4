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
        self._sizes: list[int] = []  # number of a sub-dim -> its size
        self._stands_for: dict[int, Row] = {}  # joined or cut sub-dim -> what replaces it, which may be replaced too
        self.whole: set[int] = set()  # sub-dims that no axis may split

    def new(self, size: int, whole: bool = False) -> Row:
        """Create a sub-dim (a factor of a dim) of ``size`` elements; return it as a row (the sub-dims of one dim). The
        row is () for size 1. ``whole``: no axis may split the sub-dim.
        """
        if size == 1:
            return ()
        self._sizes.append(size)
        row = (len(self._sizes) - 1,)  # its number
        self.whole.update(row if whole or not size else ())  # an empty dim is never split
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

        Of two sub-dims of different sizes the larger one is cut: 6 joined with (2, 3) becomes (2, 3). If neither size
        divides the other, what remains is kept whole.
        """
        a, b = list(self.leaves(left)), list(self.leaves(right))
        while a and b:
            # Resolve again, since the pair before may have replaced sub-dims of what is left; take the minor ones.
            *a, x = self.leaves(a)
            *b, y = self.leaves(b)
            if x == y:  # joined before
                continue
            m, n = self._sizes[x], self._sizes[y]
            if not m or not n or (m % n and n % m):
                self.keep_whole([*a, x, *b, y])
                return
            # The minor part of the larger one pairs with the smaller one; its major part waits for the next pair.
            if m > n:
                major, x = self._cut(x, n)
                a.append(major)
            elif n > m:
                major, y = self._cut(y, m)
                b.append(major)
            self._replace(x, (y,))

    def _cut(self, sub_dim: int, size: int) -> Row:
        """Cut a sub-dim into a major part and a minor part of ``size`` elements; return both, as a row."""
        parts = (*self.new(self._sizes[sub_dim] // size), *self.new(size))
        self._replace(sub_dim, parts)  # in all dims that have it
        return parts

    def _replace(self, sub_dim: int, row: Row) -> None:
        """Make ``sub_dim`` stand for the sub-dims in ``row`` from now on."""
        self._stands_for[sub_dim] = row
        if sub_dim in self.whole:  # what must be whole stays so under its new numbers
            self.whole.update(row)

    def keep_distinct(self, rows: Sequence[Row]) -> None:
        """Keep whole the sub-dims in more than one of ``rows`` (each: the sub-dims of one dim), since an axis cannot
        split two dims of a value.
        """
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
    """An op in a function: its call at global shapes, its rule's factors as sub-dims, and the nodes of its operands.
    Without a rule, ``spec`` is None and ``factors`` is empty.
    """

    node: fx.Node
    call: Call
    spec: Spec | None
    factors: Mapping[str, Row]
    operands: list[fx.Node]

    def summed(self, sub_dims: SubDims, rows: Rows) -> set[int]:
        """Return the sub-dims over which the op sums to compute a result: all sub-dims of the op that are not in
        ``rows``, the dims of the result.
        """
        all_sub_dims = _row(self.factors, names=self.factors)
        return set(sub_dims.leaves(all_sub_dims)) - _leaves_of(sub_dims, rows)


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
        self.vals = self._run(operands)  # node -> its fake value, of global shape
        # By node, for each of its results: the sub-dims of its dims, and those over whose split it is a pending sum.
        self.rows: dict[fx.Node, list[Rows]] = {}
        self.pending: dict[fx.Node, list[Pending]] = {}
        self.ops: dict[fx.Node, Op] = {}
        argument_rows = iter(rows)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.rows[node] = [next(argument_rows)]
            elif node.target is getitem:  # the result of that number of an op with several
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
        """Run the graph on fake tensors of the types ``operands`` (dtypes and global shapes); return node -> its fake
        value, from which the rules of its ops read shapes.
        """
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
        """Add the op ``node`` to ``ops``, and unify the sub-dims of its operands with the factors of its rule.

        Example: ``mm`` has the factors i, k and j. Each becomes a sub-dim; (i, k) is joined with the dims of operand 0,
        (k, j) with those of operand 1, and the result has the dims (i, j).
        """
        call, new = self._call(node), self.sub_dims.new
        spec = self._spec_of(call)
        # Operands as a `Spec` lists them: in the order of the schema, lists of tensors flattened.
        arguments = arguments_of(node)
        named = [arguments.get(argument.name) for argument in call.target._schema.arguments]
        flat = [x for item in named for x in (item if isinstance(item, (list, tuple)) else (item,))]
        operands = [x for x in flat if isinstance(x, fx.Node)]
        if spec is None:  # an op without a rule needs its operands whole
            self.ops[node] = Op(node, call, None, {}, operands)
            self.sub_dims.keep_whole(s for x in operands for row in self.rows[x][0] for s in row)
            self.rows[node] = [[new(n, whole=True) for n in value.shape] if value else [] for value in call.results]
            return
        routed = () if spec.routed is None else (spec.routed.rows, spec.routed.owners)
        # In a function, no rank sends to another: what an op finds by its place, or routes, stays whole.
        placed = {*spec.indexed, *spec.ordered, *routed}
        factors = {f: new(n, whole=f in placed or not _splits(spec, f)) for f, n in spec.sizes}
        for x, dims in zip(operands, spec.operands, strict=True):
            for row, names in zip(self.rows[x][0], dims, strict=True):
                self.sub_dims.join(row, _row(factors, names))
        results = iter(spec.results)  # of the results that are tensors; the others (None) have no dims
        self.rows[node] = [[_row(factors, names) for names in next(results)] if value else [] for value in call.results]
        self.ops[node] = Op(node, call, spec, factors, operands)

    def _call(self, node: fx.Node) -> Call:
        """Return the `Call` of an op, from the fake values of its operands and results."""

        def plain(x: Any) -> Any:  # hashable: a type for each tensor, tuples for lists
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

        Without ``check`` every op is assumed to pass them on: the first steps of a loop may add a pending sum to a
        carry that looks complete, and that a later step shows to be a pending sum itself.
        """
        arguments = iter(pending)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.pending[node] = [next(arguments)]
            elif node.target is getitem:  # one result of an op with several
                self.pending[node] = [self.pending[node.args[0]][node.args[1]]]
            elif node in self.ops:
                self.pending[node] = self._pending(self.ops[node], check)
        return [self.pending[node][0] for node in self.outputs]

    def _pending(self, op: Op, check: bool) -> list[Pending]:
        """Return the pending sums of each result of ``op`` (the sub-dims whose split leaves it a sum that is still to
        be reduced): those of its operands, which pass through, and those over sub-dims that the op itself sums.
        ``check``: forbid splits of a sub-dim if the op cannot take operands that are pending sums over it.
        """
        of_operands, whole = [self.pending[x][0] for x in op.operands], self.sub_dims.whole
        passing = NOTHING.union(*of_operands)
        all_of_op = op.summed(self.sub_dims, [])  # of a result without dims: every sub-dim of the op
        for sub_dim in passing if check else ():
            positions = frozenset(at for at, pending in enumerate(of_operands) if sub_dim in pending)
            # A sum over it passes only if the op is linear in these operands together, and has no dim that it splits.
            if sub_dim in all_of_op or op.spec is None or not carries(op.spec, "sum", positions):
                whole.add(sub_dim)
        replicated = NOTHING if op.spec is None else op.spec.replicated
        return [
            (passing | (set() if at in replicated else op.summed(self.sub_dims, rows))) - whole  # unsplit: no sum
            for at, rows in enumerate(self.rows[op.node])
        ]


def _splits(spec: Spec, factor: str) -> bool:
    """Return whether an axis may split ``factor``, and every result that lacks the factor is then a partial sum (not a
    partial maximum, for example).
    """
    # Splittable means that all results carry the factor, or that it has a reduce op.
    return spec.splittable(factor) and (spec.carried_by_all(factor) or dict(spec.reduce)[factor] == "sum")


def _row(factors: Mapping[str, Row], names: Iterable[str]) -> Row:
    """Return the sub-dims of the factors ``names``, one after the other. ``factors``: name -> its sub-dims."""
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


# How one graph takes part in a step: (operand, carry that it is or None) of each argument, carry of each result or None
Flow = tuple[list[tuple[int, int | None]], list[int | None]]


def _flows(kind: str, counts: tuple[int, int], floating: Sequence[bool]) -> tuple[list[int], list[Flow]]:
    """Return how values flow from step to step of an op of this ``kind`` ("scan", "cond", "while_loop",
    "loop_gradient"): (for each carry, the operand that it starts from; for each graph, its flow).

    A carry is a value that goes from step to step; it has the sub-dims of that operand. The flow of a graph is (operand
    and number of the carry for each argument, number of the carry for each result), with None where there is no carry.
    Results behind the carries, such as those of a scan, are left out.

    Args:
        counts: as in `Function`: how many operands are carries (of a loop's gradient: gradients, then carries).
        floating: for each operand, whether it is of a floating-point dtype, and so may have a gradient.
    """
    if kind == "loop_gradient":
        return _gradient_flows(*counts, floating)
    carries, _ = counts  # the first operands
    arguments = [(at, at if at < carries else None) for at in range(len(floating))]
    step: Flow = arguments, [*range(carries)]
    condition: Flow = arguments, [None]  # the predicate that it returns is no carry
    # The graphs before the last: the other branch of a `cond` (which has no carries), the condition of a loop.
    others: dict[str, list[Flow]] = {"scan": [], "cond": [step], "while_loop": [condition]}
    return [*range(carries)], [*others[kind], step]


def _gradient_flows(gradients: int, carries: int, floating: Sequence[bool]) -> tuple[list[int], list[Flow]]:
    """Return the `_flows` of a loop's gradient. Its operands are ``gradients`` gradients of the loop's results, then
    ``carries`` carries of the loop, which are the carries of the gradient, too, with the same numbers; then the rest.

    Each floating operand of the rest has a gradient: its sum over the steps, one more carry, which starts with zero.
    """
    rest = gradients + carries  # the first operand that is no carry
    summed = [operand for operand in range(rest, len(floating)) if floating[operand]]
    # (operand, number of the carry) of each gradient that goes from step to step.
    of_gradients = [(at, at) for at in range(gradients)]
    of_gradients += [(operand, number) for number, operand in enumerate(summed, rest)]
    # The loop runs again by its condition and its step; then its gradient takes the steps backwards.
    of_loop = [(at, at if at < rest else None) for at in range(gradients, len(floating))]
    loop_condition: Flow = of_loop, [None]
    loop_step: Flow = of_loop, [*range(gradients, rest)]
    gradient_step: Flow = [*of_gradients, *of_loop], [number for _, number in of_gradients]
    return [*range(rest), *summed], [loop_condition, loop_step, gradient_step]


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
        self.pending: list[Pending] = []  # of each result, the sub-dims over whose split it is a pending sum
        self.time: Row = ()  # the sub-dim of the steps of a scan
        kind, counts = self.function.kind, self.function.counts
        # Types and sub-dims of the operands as one step gets them: of a scanned sequence, those of one slice.
        values, rows = self._step_operands(call)
        starts_from, self.flows = _flows(kind, counts, [value.dtype.is_floating_point for value in values])
        self.carried = [NOTHING] * len(starts_from)  # as ``pending``, of each value that goes from step to step
        # Carries that start with an operand: of a loop's gradient both counts are of such, gradients and carries.
        self.initial = counts[0] + counts[1] * (kind == "loop_gradient")
        self.graphs = []
        for graph, (arguments, results) in zip(self.function.graphs, self.flows, strict=True):
            places = [at for at, _ in arguments]
            of_step = [values[at] for at in places], [rows[at] for at in places]
            self.graphs.append(Graph(graph, *of_step, self.sub_dims, spec_of))
            # What a step returns for a carry is its operand in the next step: their sub-dims are the same.
            for result, number in zip(self.graphs[-1].results, results, strict=False):
                if number is not None:
                    self._join(rows[starts_from[number]], result)
        self.results = self._joined_results(counts[0])
        # If the steps of a scan are split, its last carries are pending sums (below), which is done for floats only.
        if self.time and not all(value.dtype.is_floating_point for value in values[: counts[0]]):
            self.sub_dims.keep_whole(self.time)
        # In this order: what may be pending depends on what is whole by then.
        self._keep_distinct()
        self._propagate_pending()
        self.replicated = self._replicated()
        # The last rank has what the last step carries. The others add zeros, so this is a sum over the split of steps.
        for at in range(counts[0] if self.time else 0):
            self.pending[at] |= frozenset(self.sub_dims.leaves(self.time)) - self.sub_dims.whole

    def _step_operands(self, call: Call) -> tuple[list[Value], list[Rows]]:
        """Return the types and the sub-dims of the operands as one step gets them: without the predicate of a ``cond``,
        and with a slice of each sequence of a ``scan``. Dim 0 of the sequences, which slices lack, becomes ``time``.
        """
        kind, counts = self.function.kind, self.function.counts
        leading = 1 if kind == "cond" else 0  # the predicate
        values, rows = list(call.operands[leading:]), list(self.operands[leading:])
        # The sequences come behind the carries. All have as many slices as there are steps.
        for at in range(counts[0], sum(counts)) if kind == "scan" else ():
            # Dim 0 becomes ``time``; the others are those of a slice.
            steps, *shape = values[at].shape
            row, *rows[at] = rows[at]
            self.time = self.time or self.sub_dims.new(steps)
            self.sub_dims.join(row, self.time)
            values[at] = Value(values[at].dtype, tuple(shape))
        return values, rows

    def _joined_results(self, carries: int) -> list[Rows]:
        """Return the sub-dims of the results of the op: those of the last graph's outputs. A ``scan`` stacks those that
        are no carries over its steps, along a first dim ``time``. Of a ``cond`` those of both branches are joined, so
        that its result is split in one way, whichever branch runs.
        """
        results = self.graphs[-1].results
        if self.function.kind == "cond":
            for of_true, of_false in zip(self.graphs[0].results, results, strict=True):
                self._join(of_true, of_false)
        if self.function.kind == "scan":
            return [*results[:carries], *([self.time, *result] for result in results[carries:])]
        return results

    def _join(self, rows: Rows, others: Rows) -> None:
        """Record that two values of the same shape have the same sub-dims: unify the rows of each dim."""
        for row, other in zip(rows, others, strict=True):
            self.sub_dims.join(row, other)

    def _keep_distinct(self) -> None:
        """Forbid splits of a sub-dim that occurs twice, as an axis can split only one of two dims: in two factors of
        one op, or in two dims of one operand or result.
        """
        for graph in self.graphs:
            for op in graph.ops.values():
                self.sub_dims.keep_distinct(list(op.factors.values()))
        for rows in (*self.operands, *self.results):
            self.sub_dims.keep_distinct(rows)

    def _propagate_pending(self) -> None:
        """Compute over which sub-dims the carries (values that go from step to step) and results are pending sums: the
        least fixed point of a step.

        A carry is a pending sum from the first step on, or never. A sub-dim is kept whole if a step changes that.
        """
        whole, kind = self.sub_dims.whole, self.function.kind
        # A sub-dim that is kept whole leaves no sums. So a round that finds one starts again, until none is found.
        whole_before = -1
        while whole_before < len(whole):
            whole_before, self.carried = len(whole), [NOTHING] * len(self.carried)
            # Take steps until none adds a pending sum to a carry.
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
            # A result that is a pending sum in one branch is one of both: the other returns its own as a term of a sum.
            of_both = [NOTHING.union(*x) for x in zip(*self._pending_of_graphs, strict=True)] if kind == "cond" else []
            self.pending = of_both or self._pending_of_graphs[-1]
            self._keep_consistent()

    def _step(self, check: bool) -> list[Pending]:
        """Return, for each carry (a value that goes from step to step), the sub-dims over which it is a pending sum
        after one more step. ``check``: keep a sub-dim whole if an op cannot take a pending sum over it as an operand.

        Those of all results of the graphs are in ``_pending_of_graphs``.
        """
        after, self._pending_of_graphs = list(self.carried), []
        for graph, (arguments, results) in zip(self.graphs, self.flows, strict=True):
            # An operand that is no carry (number None) comes in complete.
            incoming = [NOTHING if number is None else self.carried[number] for _, number in arguments]
            self._pending_of_graphs.append(graph.propagate(incoming, check))
            # Results behind those that have a number are no carries: the stacked results of a scan.
            for number, pending in zip(results, self._pending_of_graphs[-1], strict=False):
                if number is not None:
                    after[number] = pending
        return after

    def _keep_consistent(self) -> None:
        """Forbid splits of a sub-dim over which some result is a pending sum, unless each result is split by it, is
        pending over it (not both), or has no pending sum at all.

        A `Spec` has no word for other cases: by it, a result that lacks a summed factor is a sum over its split, except
        for results that are the same on every rank whatever is split.
        """
        for sub_dim in NOTHING.union(*self.pending):
            for rows, pending in zip(self.results, self.pending, strict=True):
                is_split, is_pending = sub_dim in _leaves_of(self.sub_dims, rows), sub_dim in pending
                is_replicated = not is_split and not pending
                if is_split == is_pending and not is_replicated:
                    self.sub_dims.whole.add(sub_dim)

    def _replicated(self) -> frozenset[int]:
        """Return the positions of the results that are the same on every rank along some split: they lack a factor
        that may be split (that of the steps does not count), and are no pending sums.
        """
        carried_by = [_leaves_of(self.sub_dims, rows) for rows in self.results]
        splittable = self._all_leaves() - self.sub_dims.whole - set(self.sub_dims.leaves(self.time))
        return frozenset(at for at, summed in enumerate(self.pending) if not summed and splittable - carried_by[at])

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
            operands=tuple(map(self.dims, self.operands)),
            results=tuple(map(self.dims, self.results)),
            sizes=tuple(sorted((self.factor(x), self.sub_dims.size(x)) for x in every)),
            reduce=tuple((self.factor(x), "sum") for x in every if x in pending),
            whole=frozenset(self.factor(x) for x in every if x in self.sub_dims.whole),
            replicated=self.replicated,
            # Ranks take the steps of a scan in turn, each those of one contiguous piece; padding comes last.
            indexed=time,
            ordered=time,
            in_turn=time,
        )
