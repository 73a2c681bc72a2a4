"""Emits scans on one rank. If the scanned dim is split, each rank has one contiguous piece of the slices, in rank
order.

The ranks compute one after another what the scan carries from piece to piece, and send it on. Then all of them compute
the results of their steps. What steps only add to is not sent: each rank adds up its own terms.

If a step scales each number that is carried and adds to it, ranks do not wait for the steps of others. All compute at
once what their steps make of zeros, and the product of the scales, from which the state behind them follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
from torch import fx

from shardc.custom_ops.flops import function_flops
from shardc.custom_ops.function_ops import Function, named, register
from shardc.ir.comm import WAIT
from shardc.rules.positions import zero_unless
from shardc.rules.rule import Emitted, Local
from shardc.rules.window_rules import Pieces

aten = torch.ops.aten


def on_rank(local: Local, function: Function, operands: list[Emitted]) -> Emitted:
    """Emit a scan by ``function`` over the slices that this rank holds; return its results: the carries (values that go
    from step to step) after the last step, then what each step returns, stacked.

    Args:
        operands: the carries before the first step, then the sequences, then tensors that all steps read.
    """
    carries, reverse = function.counts[0], local.call["reverse"]
    # How the first sequence, the operand behind the carries, is split along its dim 0.
    pieces, run = Pieces(local, carries, 0), local.builder.call
    steps = _unpadded_slices(pieces)
    if not pieces.axes:
        return run(local.call.target, operands, function.name, reverse, steps)
    # The pieces in the order in which they are scanned; a mask of one element for each: whether this rank holds it.
    places = range(pieces.ranks)[::-1] if reverse else range(pieces.ranks)
    coordinate = local.builder.coordinate(pieces.axes)
    turns = [run(aten.eq.Scalar, coordinate, place) for place in places]
    carried = _Carried(function)  # steps leave `same` as is, only add to `sums`; others are `sent`
    # Carry -> its value before this rank's slices; on ranks whose turn is yet to come, still that before the scan.
    states = {at: operands[at] for at in carried.sent}
    # To know the state, `sums` are not needed; those in `same` are arguments like others.
    state_step, rest = carried.step(), [*operands[carries:], *(operands[at] for at in carried.same)]
    size = pieces.size if steps is None else steps
    scaled = _scales(local, carried, operands, rest, steps) if states else None
    # One rank after the other computes the state behind its slices, from the one that it received, and sends it on.
    for (place, next_place), turn, next_turn in zip(pairwise(places), turns, turns[1:], strict=False) if states else ():
        if scaled is None:
            # Only the rank whose turn it is takes steps: the others take 0.
            count = run(aten.mul.Tensor, turn, size)
            results = run(local.call.target, [*states.values(), *rest], state_step.name, reverse, count)
            after = [run(getitem, results, number) for number in range(len(states))]
        else:  # all of the rank's steps are one map: scale * state + summand
            after = [
                run(aten.addcmul.default, summand, scale, x)
                for (scale, summand), x in zip(scaled, states.values(), strict=True)
            ]
        for at, x in zip(states, after, strict=True):
            moved = _swap(pieces, x, place, next_place)
            states[at] = run(aten.where.self, _mask_like(local, next_turn, moved), moved, states[at])
    # Now all ranks know the state before their slices, and compute their results at the same time. Of a carry that
    # steps add to, the first rank starts with the value and the others with zeros, so that the results add up.
    initial = [_only(local, turns[0], x) if at in carried.sums else states.get(at, x) for at, x in enumerate(operands)]
    results = run(local.call.target, initial, function.name, reverse, steps)
    outputs = [run(getitem, results, at) for at in range(len(local.results))]
    # The last state is on the last rank: with zeros on the others, it is a pending sum.
    return [_only(local, turns[-1], x) if at in (*carried.sent, *carried.same) else x for at, x in enumerate(outputs)]


def is_padded(local: Local) -> bool:
    """Return whether some dim of the scan's operands is padded (there may then be more slices than steps)."""
    sizes = [size for layout in local.operands for size in layout.shape]
    return any(local.true_size(dim, size) != size for dim, size in enumerate(sizes))


def _unpadded_slices(pieces: Pieces) -> Emitted | None:
    """Return how many of this rank's slices are not padding, int64 [1]; None if the scanned dim has no padding."""
    run, builder = pieces.local.builder.call, pieces.local.builder
    if pieces.true_size == pieces.layout.shape[0]:
        return None
    if not pieces.axes:
        return run(aten.full.default, [1], pieces.true_size, dtype=torch.int64, device=builder.device)
    # Padding is behind all elements: elements - (slices before this rank's), at least 0 and at most its size.
    before = run(aten.mul.Scalar, builder.coordinate(pieces.axes), -pieces.size)
    return run(aten.clamp.default, run(aten.add.Scalar, before, pieces.true_size), 0, pieces.size)


def _scales(
    local: Local, carried: _Carried, operands: Sequence[Emitted], rest: Sequence[Emitted], steps: Emitted | None
) -> list[tuple[Emitted, Emitted]] | None:
    """Emit all steps of this rank as one map ``c -> scale * c + summand`` of a carry c (a value that goes from step to
    step). Return (scale, summand) for each carry that is sent between ranks; None if the steps compute something else.

    Args:
        operands: the scan's operands, carries first.
        rest: arguments of `_Carried.step` behind its carries.
        steps: number of steps, int64 [1]; None for all slices.
    """
    function, run = carried.scaled_step(), local.builder.call
    if function is None:
        return None
    like = [operands[at] for at in carried.sent]
    # From a carry of zeros the steps make the summand, and from a product that starts with 1 the scale.
    first = [run(aten.full_like.default, x, value) for value in (0, 1) for x in like]
    results = run(local.call.target, [*first, *rest], register(function).name, local.call["reverse"], steps)
    added, scales = ([run(getitem, results, side * len(like) + at) for at in range(len(like))] for side in (0, 1))
    return list(zip(scales, added, strict=True))


def _swap(pieces: Pieces, x: Emitted, first: int, second: int) -> Emitted:
    """Emit a swap of ``x`` between two ranks: those that hold the pieces number ``first`` and ``second`` of the scanned
    dim. Return what each of the two receives; on all other ranks, their own ``x``.
    """
    # Destination of each rank's ``x``: only these two send to each other.
    to, ranks = list(range(pieces.ranks)), (pieces.members[first], pieces.members[second])
    to[ranks[0]], to[ranks[1]] = ranks[1], ranks[0]
    return pieces.run(WAIT, pieces.run(torch.ops.shardc.permute_ranks.default, x, to, pieces.group))


def _mask_like(local: Local, mask: Emitted, x: Emitted) -> Emitted:
    """Emit and return a view of ``mask``, of one element, that has as many dims as ``x`` and broadcasts to it."""
    return local.builder.call(aten.view.default, mask, [1] * len(local.builder.shape(x)))


def _only(local: Local, mask: Emitted, x: Emitted) -> Emitted:
    """Emit and return ``x`` if ``mask``, of one element, is true; else zeros."""
    return zero_unless(local, _mask_like(local, mask, x), x)


class _Carried:
    """The carries of a scan (values that go from step to step), sorted by what a step does to them.

    Attributes:
        sums: positions of the carries to which a step only adds something.
        same: positions of those that a step does not change.
        sent: positions of all others, which ranks send to each other.
        nodes, arguments, results: of the step's graph: all nodes; placeholders (carries, then a slice of each sequence,
            then the rest); what it returns (carries, then a slice of each result).
        sequences: number of sequences.
    """

    def __init__(self, function: Function) -> None:
        (graph,), (carries, self.sequences) = function.graphs, function.counts
        self.results: Any = next(iter(reversed(graph.nodes))).args[0]
        self.nodes, self.arguments = list(graph.nodes), list(graph.find_nodes(op="placeholder"))
        self.sums = [at for at in range(carries) if self._adds(self.arguments[at], self.results[at])]
        self.same = [at for at in range(carries) if _copied(self.results[at]) is self.arguments[at]]
        self.sent = [at for at in range(carries) if at not in (*self.sums, *self.same)]

    def _adds(self, before: fx.Node, after: fx.Node) -> bool:
        """Return whether a step only adds something to a carry. ``before`` is the carry at the start of the step,
        ``after`` at its end.
        """
        return (
            # Nothing else in the step may read the carry, or what it becomes.
            list(before.users) == [after]
            and after.target is aten.add.Tensor
            and not after.kwargs
            and after.args.count(before) == 1
            and len(after.users) == 1
            and self.results.count(after) == 1
        )

    def step(self) -> Function:
        """Return the scan function that computes only the carries in ``sent``: from their values before a step to those
        after it.

        The carries ``same`` are its last arguments, and ``sums`` are left out.
        """
        graph, env, _ = self._copy()
        return self._function(graph, [env[self.results[at]] for at in self.sent])

    def scaled_step(self) -> Function | None:
        """Return a scan function as `step` does, with a further carry for each carry in ``sent``: the product of the
        factors by which the steps scale it. Return None if a step is not ``factor * carry + summand`` for each of
        these.
        """
        # ``scales``: (carry, factor) of each node that is factor * carry + summand; factors are nodes of the copy.
        graph, env, scales = self._copy(scales=True)
        others: set[fx.Node] = set()  # computed from carries in other ways
        for node in self.nodes:
            inputs = node.all_input_nodes if node.op == "call_function" else []
            scaled = _scaled(graph, node, env, scales) if others.isdisjoint(inputs) else None
            # The map is one of single elements only if the result has the carry's shape: nothing is broadcast.
            if scaled is not None and node.meta["val"].shape == scaled[0].meta["val"].shape:
                scales[node] = scaled
            elif any(x in scales or x in others for x in inputs):
                others.add(node)
        # Each carry after the step must be a multiple, plus a summand, of the same carry before it.
        products = [scales.get(self.results[at], (None, None)) for at in self.sent]
        if any(source is not self.arguments[at] for at, (source, _) in zip(self.sent, products, strict=True)):
            return None
        return self._function(graph, [*(env[self.results[at]] for at in self.sent), *(scale for _, scale in products)])

    def _copy(self, scales: bool = False) -> tuple[fx.Graph, dict[fx.Node, fx.Node], Scales]:
        """Copy the step's graph without its results and the carries in ``sums``. Return (the copy, node -> its copy,
        carry -> (the carry, product of its scales so far)). The last is empty without ``scales``, else the product is a
        new argument of the copy for each carry in ``sent``.
        """
        graph, carries = fx.Graph(), len(self.sums) + len(self.same) + len(self.sent)
        first, last = ([self.arguments[at] for at in places] for places in (self.sent, self.same))
        # Placeholders in the order of the new function's arguments: carries, products, slices and the rest, ``same``.
        env = {node: graph.node_copy(node) for node in first}
        products = {node: (node, graph.node_copy(node)) for node in (first if scales else ())}
        for node in (*self.arguments[carries:], *last):
            env[node] = graph.node_copy(node)
        # What reads a carry in ``sums`` reads None in the copy: only the sum does, and `_function` removes it.
        for node in self.nodes:
            if node.op == "call_function":
                env[node] = graph.node_copy(node, env.get)
        return graph, env, products

    def _function(self, graph: fx.Graph, results: list[Any]) -> Function:
        """Return a scan function that runs ``graph`` and gives ``results``. All of its results are carries (values that
        go to the next step).
        """
        graph.output(tuple(results))
        graph.eliminate_dead_code()  # ops that compute other results of the step
        named(graph)
        return register(Function("scan", (graph,), (len(results), self.sequences), function_flops("scan", (graph,))))


Scales = dict[fx.Node, tuple[fx.Node, Any]]


def _scaled(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node], scales: Scales) -> tuple[fx.Node, Any] | None:
    """Return (carry, factor) if ``node`` computes ``factor * carry + summand`` for a carry of the scan's step; else
    None. Nodes that compute the factor are added to ``graph``, a copy of the step's graph.

    Args:
        env: node -> its copy in ``graph``.
        scales: (carry, factor) of the nodes before it that are of this form.
    """
    scaled_args = [isinstance(x, fx.Node) and x in scales for x in node.args]
    sources = {scales[x][0] for x in node.all_input_nodes if x in scales}
    if len(sources) != 1 or node.kwargs and node.target not in (*_COPIES, *_SUMS):
        return None
    (source,) = sources
    # The node's arguments, with the factor in place of each that is scaled.
    operands = [scales[x][1] if is_scaled else x for x, is_scaled in zip(node.args, scaled_args, strict=True)]

    def call(target: Any, *args: Any, **kwargs: Any) -> tuple[fx.Node, Any]:
        # Arguments are nodes of the step, to be replaced by their copies, or factors, which are in the copy already.
        args, kwargs = fx.map_arg((args, kwargs), lambda x: env.get(x, x))
        scale = graph.call_function(target, args, kwargs)
        scale.meta["val"] = node.meta["val"]
        return source, scale

    # In a sum with something else, the scaled term keeps its factor, times ``alpha`` and the sign if it comes second.
    if node.target in _SUMS and scaled_args == [True, False]:
        return source, operands[0]
    if node.target in _SUMS and scaled_args == [False, True]:
        factor = node.kwargs.get("alpha", 1) * _SUMS[node.target]
        return (source, operands[1]) if factor == 1 else call(aten.mul.Scalar, operands[1], factor)
    # In a linear op, or a sum of two scaled operands, the factor of the result is the op's result for the factors.
    product = node.target is aten.mul.Tensor and sum(scaled_args) == 1
    if node.target in _SUMS or product or node.target in _LINEAR and scaled_args[0] and sum(scaled_args) == 1:
        return call(node.target, *operands, **node.kwargs)
    return None


def _copied(node: fx.Node) -> Any:
    """Return the node that ``node`` is a copy of, through any number of copies; itself if it is none."""
    while node.target in _COPIES:
        node = node.args[0]
    return node


_COPIES = (aten.clone.default, aten.detach_copy.default, aten.alias_copy.default)
_SUMS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}  # with the sign of the second term
_LINEAR = (*_COPIES, aten.neg.default, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
