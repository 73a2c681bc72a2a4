"""Experts: replaces the traced function of one expert by one op over all experts, and its gradient by another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

from torch import fx
from torch.fx.node import Argument

from shardc._compat import OpOverload
from shardc.custom_ops import expert_markers, expert_ops
from shardc.custom_ops.expert_functions import Body, PerRow, register
from shardc.custom_ops.flops import is_dense
from shardc.errors import CaptureError
from shardc.ir import graph as ir
from shardc.ir.graph import Info, NameScope, Value
from shardc.ir.rewriter import GraphRewriter, erase_dead_code
from shardc.passes.op_calls import call_of, operands_of
from shardc.plan.entries import Ep
from shardc.rules import spec_of


@dataclass(frozen=True)
class Experts:
    """Collapses the traced function of one expert into one op over all experts, and its backward into another.

        %r, %p = enter(%x, %w, ...)
        %y = mm(%r, %p)                 ->  %z = shardc_experts::call(%x, %index, %w, [...], "body")
        %z = exit(%y, %index)

    *Requires:* a captured graph in which one expert's function stands between marks (`expert_markers`), traced as if
    that expert took all tokens. *Ensures:* no marks; `shardc_experts::call` and ``gradient`` name a registered `Body`.

    Raises:
        CaptureError: the function mixes the rows of different tokens, or reads a tensor that is not its argument.

    Args:
        entries: the plan's ep entries, which say how rows travel; if two match a module, the later one wins.
    """

    entries: tuple[Ep, ...] = ()
    name = "experts"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for end in [node for node in gm.graph.nodes if node.target is expert_markers.EXIT]:
            _collapse(end, self.entries)
        erase_dead_code(gm.graph)
        return gm


def _collapse(end: fx.Node, entries: Sequence[Ep]) -> None:
    """Replaces the traced call of one expert by one op over all experts, and its backward by another. The traced ops
    lie between marks; ``end`` is the last mark of the call.

    Args:
        entries: the plan's ep entries, which say how the op sends rows.
    """
    # Every call has its own index tensor (the experts of each token), which identifies its marks. In graph order:
    # ENTER, the function, EXIT (``end``); in backward EXIT_GRAD, the function's gradient, ENTER_GRAD.
    rows, index = end.args
    assert isinstance(index, fx.Node)
    marked = {node.target: node for node in index.users}
    start = marked[expert_markers.ENTER]
    back, tangent = marked.get(expert_markers.ENTER_GRAD), marked.get(expert_markers.EXIT_GRAD)
    inputs: Any = start.args[0]
    x, weight, *params = inputs  # tokens, routing weights, parameters of all experts
    entered = _entered_values(start, len(inputs))
    forward = _between([rows], set(entered.values()), end)
    # Gradients of rows, routing weights and parameters of one expert.
    results: list[object] = list(back.args[0]) if back is not None else []
    inside = {*forward, *entered.values()}
    backward = [] if back is None or tangent is None else _between(results, {*inside, tangent}, back)
    # Strict, as an op that mixes rows would give something else for the rows of one expert.
    where = _dims_of_rows(forward, tensors=[entered.get(0), entered.get(1)], base={}, strict=True)
    build = _Builder(size=ir.value(x).shape[0], entered=entered)  # the trace gave all tokens to one expert
    body = register(build.body(rows, forward, results, backward, tangent, where))
    module = _owner(params[0])
    entry = next((e for e in reversed(entries) if e.applies_to(module)), None)
    # (dispatch, capacity, chunks, axis): how rows are sent to the ranks of their experts.
    routing = ("auto", 0.0, 1, "") if entry is None else (entry.dispatch, entry.capacity, entry.chunks, entry.axis)
    how = (params, body.name, *routing)
    names = NameScope.of(end.graph)
    _replace(end, expert_ops.CALL, (x, index, weight, *how), names.fresh(f"{module}.call".lstrip(".")))
    if back is not None and tangent is not None:
        gradient = names.fresh(f"d.{module}.gradient".replace("..", "."))
        _replace(back, expert_ops.GRADIENT, (tangent.args[0], x, index, weight, *how), gradient)


def _entered_values(start: fx.Node, count: int) -> dict[int, fx.Node]:
    """Returns the getitems that read the ``count`` results of the mark ``start`` (the values that enter the expert), by
    the number of the result.

    A getitem is inserted for a result that nothing reads.
    """
    results = {int(node.args[1]): node for node in start.users}
    for at in range(count):
        if at not in results:
            place = GraphRewriter(start.graph).after(start)
            results[at] = place.typed(ir.info(start).values[at], getitem, start, at)
    return results


def _owner(param: fx.Node) -> str:
    """Returns the name of the module that owns a parameter; ``param`` is the parameter, a cast or a transpose of it."""
    node = param
    # Back through casts and transposes to the placeholder; the name is that of its module and ".weight".
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return ir.info(node).name.rpartition(".")[0]


def _replace(node: fx.Node, target: OpOverload, args: tuple[Argument, ...], name: str) -> None:
    """Turns ``node`` into a call of ``target`` with ``args``, under the new ``name``, in place."""
    node.target, node.args, node.kwargs = target, args, {}
    ir.set_info(node, replace(ir.info(node), name=name))


def _between(ends: Iterable[object], stops: set[fx.Node], border: fx.Node) -> list[fx.Node]:
    """Returns the nodes that ``ends`` depend on, back to ``stops`` (exclusive), in graph order; errors name the source
    line of ``border``, a mark.

    Raises:
        CaptureError: they depend on a placeholder or on another call's mark.
    """
    inside = ir.ancestors(ends, stops.__contains__)
    nodes = [node for node in border.graph.nodes if node in inside and node not in stops]
    outside = [node for node in nodes if node.op == "placeholder" or node.target is expert_markers.ENTER]
    if outside:  # the last one is read itself, not through another one
        raise CaptureError(
            f"an expert's function reads {ir.info(outside[-1]).name}, which is not among its arguments",
            source=ir.info(border).origin.source or None,
            fix="pass it as one of the experts' parameters, with a first dim of one entry for each expert",
        )
    return nodes


Where = dict[tuple[fx.Node, int], int]  # (node, position of its result) -> the dim of the rows


def _dims_of_rows(nodes: Sequence[fx.Node], tensors: Iterable[fx.Node | None], base: Where, strict: bool) -> Where:
    """Finds the dim of the rows (tokens) in each value: returns (node, number of its result) -> dim, for the results of
    ``nodes`` that have rows.

    Args:
        tensors: nodes whose rows are dim 0.
        base: dims of the rows that are known already.
        strict: check that each row of a result depends on that row alone.

    Raises:
        CaptureError: if ``strict``, an op whose result in one row depends on other rows.
    """
    where: Where = {**base, **{(node, 0): 0 for node in tensors if node is not None}}
    for node in nodes:
        if node.target is getitem and (node.args[0], node.args[1]) in where:
            where[node, 0] = where[node.args[0], node.args[1]]
        operands = operands_of(node) if node.op == "call_function" and node.target is not getitem else []
        row_operands = [(at, where[x, 0]) for at, x in enumerate(operands) if (x, 0) in where]
        if not row_operands:
            continue
        dims, by_row = _rows_of_results(node, row_operands)
        if strict and not by_row:
            raise CaptureError(
                f"{node.target} in an expert's function mixes the rows of different tokens",
                source=ir.info(node).origin.source or None,
                fix="compute each row of the result from that row alone",
            )
        where |= {(node, number): dim for number, dim in dims.items()}
    return where


def _rows_of_results(node: fx.Node, row_operands: Sequence[tuple[int, int]]) -> tuple[dict[int, int], bool]:
    """Returns (number of a result -> the dim of its rows, whether each row depends on the same row of operands alone).

    Args:
        row_operands: (position, dim of the rows) of each operand that has rows.
    """
    spec = spec_of(call_of(node))
    # ``spec.operands`` has for each operand, for each dim, the factors (loops) of which it is the product.
    factors = set() if spec is None else {spec.operands[at][dim] for at, dim in row_operands}
    if factors == {()}:  # the dim has size 1: a single row
        values = enumerate(v for v in ir.info(node).values if v is not None)
        return {number: 0 for number, value in values if value.shape[:1] == (1,)}, True
    # Else the rows have to be one whole factor, the same in all of these operands.
    if spec is None or len(factors) != 1 or len(factor := next(iter(factors))) != 1:
        return {}, False
    dims = {number: dims.index(factor) for number, dims in enumerate(spec.results) if factor in dims}
    # What may be split along the rows computes each row by itself.
    return dims, bool(dims) and spec.splittable(factor[0])


class _Builder:
    """Builds the `Body` of an expert (the graphs of its function and of its gradient) from the traced nodes.

    Args:
        size: number of rows with which they were traced.
        entered: position -> result of the ``enter`` mark: rows, scale, parameters.
    """

    def __init__(self, size: int, entered: Mapping[int, fx.Node]) -> None:
        self.size, self.entered = size, entered
        self.names = ("rows", "scale", *(f"p{at}" for at in range(len(entered) - 2)))

    def body(
        self, out: fx.Node, forward: list[fx.Node], results: Sequence[object], backward: list[fx.Node],
        tangent: fx.Node | None, where: Where,
    ) -> Body:  # fmt: skip
        """Returns the `Body` of an expert: the graph of its function, from the nodes ``forward``, and the graph of its
        gradient, from the nodes ``backward``.

        Args:
            out: the result of the function.
            forward: its nodes.
            results: the gradients of rows, scale and parameters; None for one that is not needed.
            backward: the nodes that compute these.
            tangent: the gradient of ``out``; None if the graph has no backward.
            where: the dim of the rows in each value.
        """
        # The last products before what backward reads are saved, row by row. What follows them is recomputed, and so is
        # a product without rows (of parameters alone).
        keep = [node for node in self._saved_products(results, backward, set(forward)) if (node, 0) in where]
        forward_graph = self._graph(forward, [], [out, *keep], where)
        gradient_graph = None
        if tangent is not None:
            # All that the gradients depend on, back to what is saved or passed in.
            recomputed = set(_between(results, {*keep, *self.entered.values(), tangent}, tangent))
            nodes = [node for node in forward if node in recomputed and node not in keep] + backward
            dims_of_rows = _dims_of_rows(nodes, [tangent], {**where, (tangent, 0): 0}, strict=False)
            gradient_graph = self._graph(nodes, [tangent, *keep], results, dims_of_rows)
        saved = tuple(_row_type(ir.value(node)) for node in keep)
        flops = (self._flops(forward), self._flops(backward))
        return Body(forward_graph, gradient_graph, _row_type(ir.value(out)), saved, flops)

    def _flops(self, nodes: Iterable[fx.Node]) -> int:
        """Returns the floating-point operations of ``nodes`` per row."""
        calls = [node for node in nodes if node.op == "call_function" and node.target is not getitem]
        # The trace is of ``size`` rows, each of which costs the same.
        return sum(spec.flops for node in calls if (spec := spec_of(call_of(node)))) // self.size

    def _saved_products(
        self, results: Iterable[object], backward: Iterable[fx.Node], forward: set[fx.Node]
    ) -> list[fx.Node]:
        """Returns the matrix products of the expert's forward that are saved for its backward: the last ones before
        what backward reads. Backward recomputes the ops after them.
        """
        read = [*results, *(x for node in backward for x in node.all_input_nodes)]
        work = [x for x in read if isinstance(x, fx.Node) and x in forward]
        products: dict[fx.Node, None] = {}  # as an ordered set
        seen = set(work)
        while work:
            node = work.pop(0)
            if is_dense(node.target):
                products[node] = None
                continue  # what precedes it need not be recomputed
            more = [x for x in node.all_input_nodes if x in forward and x not in seen]
            seen.update(more)
            work += more
        return list(products)

    def _graph(
        self, nodes: Sequence[fx.Node], before: Sequence[fx.Node], results: Sequence[object], where: Where
    ) -> fx.Graph:
        """Returns a graph that computes ``results``, for any number of rows, by copies of ``nodes``. Its inputs are the
        number of rows, the tangent (gradient's graph), rows, scale, parameters and saved values (gradient's graph).

        Args:
            before: in the gradient's graph the tangent, followed by the saved values; empty in the forward's.
            where: the dim of the rows in each value.
        """
        graph = fx.Graph()
        size = ir.set_info(graph.placeholder("n"), Info("n", None))
        env: dict[fx.Node, fx.Node] = {}  # traced node -> its copy
        inputs = [("grad", before[0])] if before else []
        inputs += [(name, self.entered[at]) for at, name in enumerate(self.names)]
        inputs += [(f"saved{at}", node) for at, node in enumerate(before[1:])]
        for name, node in inputs:
            env[node] = ir.set_info(graph.placeholder(name), ir.info(node))
        for node in nodes:
            args, kwargs = self._arguments_at_size(node, size, where)
            args, kwargs = fx.map_arg((args, kwargs), lambda x: env.get(x, x))  # ``size`` is new already
            env[node] = ir.set_info(graph.call_function(node.target, args, kwargs), ir.info(node))
        graph.output(tuple(env[x] if isinstance(x, fx.Node) else None for x in results))
        graph.eliminate_dead_code()
        return graph

    def _arguments_at_size(
        self, node: fx.Node, size: fx.Node, where: Where
    ) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        """Returns (args, kwargs) of ``node`` for any number of rows: where they contain a shape, ``size`` replaces the
        number of rows in the trace.
        """
        value, at = ir.info(node).value, where.get((node, 0))  # ``at``: the dim of the rows in the result
        if isinstance(value, Value) and not node.all_input_nodes and value.shape[:1] == (self.size,):
            at = 0  # a constant for every row, such as zeros([rows, n])
        if not isinstance(value, Value) or at is None:
            return node.args, node.kwargs

        def sized(argument: Argument) -> Argument:
            """Returns ``argument``. If it is the shape of the result, ``size`` replaces the traced number of rows in
            it.
            """
            if isinstance(argument, (list, tuple)) and list(argument) == list(value.shape):
                return [*argument[:at], size, *argument[at + 1 :]]
            return argument

        return tuple(map(sized, node.args)), {name: sized(x) for name, x in node.kwargs.items()}


def _row_type(value: Value) -> PerRow:
    """Returns the shape and dtype of one row of a value."""
    return PerRow(value.shape[1:], value.dtype)
