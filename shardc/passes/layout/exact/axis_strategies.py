"""Strategies of each op over one mesh axis, and their combinations over the whole mesh.

Over one axis a value is replicated, split at some digit, or a partial sum. A split of one value splits others through
the factors of its op: from every factor that the axis divides, layouts spread through the rules, from operands to
results and back, until no op gets a new strategy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from operator import getitem

from torch import fx

from shardc.errors import LayoutError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Digit, Digits, Layout, canonical, strides
from shardc.ir.mesh import Mesh, split_part
from shardc.passes import local_regions
from shardc.passes.op_calls import call_of, operands_of
from shardc.rules import spec_of
from shardc.rules.spec import (
    Assignment,
    Spec,
    Strategy,
    carries,
    commute,
    meets_requirements,
    merge,
    place,
    project,
    results_of,
)

Slot = tuple[fx.Node, int]  # a node and the position of one of its results


@dataclass(frozen=True)
class AxisStrategy:
    """A way to run an op over one mesh axis: the factors (loops of its rule) that the axis splits, or the pending
    reductions that it passes on.

    Args:
        factors: (factor, its digits) for each factor that the axis splits.
        carried: (axis, reduce op) of each pending reduction that passes through the op.
        positions: positions of the partial operands.
    """

    factors: tuple[tuple[str, Digits], ...] = ()
    carried: tuple[tuple[str, str], ...] = ()
    positions: frozenset[int] = frozenset()


WHOLE = AxisStrategy()  # nothing is split or partial over the axis


def spec_at(node: fx.Node) -> Spec | None:
    """Returns the `Spec` of an op, its rule at its shapes; None if no rule gives its strategies (a marker, a region, an
    op without a rule).
    """
    if node.op != "call_function" or node.target is getitem or node.target in ops.MARKERS.values():
        return None
    return None if node.target in local_regions.OPS else spec_of(call_of(node))


def slot_of(node: fx.Node) -> Slot:
    """Returns (op, position among its results) of the value ``node``."""
    return (node.args[0], node.args[1]) if node.target is getitem else (node, 0)


@dataclass
class Closure:
    """Collects the strategies of all ops over one mesh axis. Layouts spread through the graph: a strategy of an op
    gives layouts to its operands and results, and these suggest strategies of neighbouring ops.

    Args:
        graph: the joint graph.
        mesh: the mesh.
        axis: the axis, of more than one rank.
        seeds: value -> its layouts, of any axes, from which others spread.
        ways: op -> its strategies over the axis, as an ordered set.
        layouts: value -> its layouts over the axis, as an ordered set.
    """

    graph: fx.Graph
    mesh: Mesh
    axis: str
    seeds: Mapping[Slot, Iterable[Layout]]
    ways: dict[fx.Node, dict[AxisStrategy, None]] = field(default_factory=dict)
    layouts: dict[Slot, dict[Layout, None]] = field(default_factory=dict)

    def run(self) -> dict[fx.Node, list[AxisStrategy]]:
        """Propagates layouts until no op gets a new strategy; returns op -> its strategies."""
        # Value -> the ops around it, as (op, its `Spec`, position of the value, whether it is a result of the op).
        self._ops_at: dict[Slot, list[tuple[fx.Node, Spec, int, bool]]] = {}
        # New layouts of values, which the ops around these values have not seen yet.
        self._queue: deque[tuple[Slot, Layout]] = deque()
        specs = [(node, spec) for node in self.graph.nodes if (spec := spec_at(node)) is not None]
        for node, spec in specs:
            self.ways[node] = {WHOLE: None}
            for at, operand in enumerate(operands_of(node)):
                self._ops_at.setdefault(slot_of(operand), []).append((node, spec, at, False))
            for at, index in enumerate(_result_indices(node)):
                self._ops_at.setdefault((node, index), []).append((node, spec, at, True))
        # Layouts start from splits of single factors, from inputs and from the layouts that the plan fixes.
        for node, spec in specs:
            self._split_factors(node, spec)
        self._split_inputs()
        for slot, layouts in self.seeds.items():
            for layout in layouts:
                self._add(slot, _restricted_to_axis(layout, self.axis))
        while self._queue:
            slot, layout = self._queue.popleft()
            for node, spec, at, is_result in self._ops_at.get(slot, ()):
                self._add_strategies(node, spec, at, is_result, layout)
        return {node: self._meeting_requirements(spec, list(self.ways[node])) for node, spec in specs}

    def _split_factors(self, node: fx.Node, spec: Spec) -> None:
        """Adds strategies that split a factor of the op ``node``, whatever the layouts of its operands: each factor
        that may be split first and, of an op with a `Routed`, its two factors together.
        """
        for factor in _initial_factors(spec):
            if spec.splittable(factor) and (digits := self._chunk_digits(spec.size(factor))) is not None:
                self._add_strategy(node, spec, AxisStrategy(((factor, digits),)))
        if spec.routed is not None:
            # Sorted, as everywhere in an `AxisStrategy`, so that equal ones compare equal.
            pair = [(f, self._chunk_digits(spec.size(f))) for f in sorted((spec.routed.rows, spec.routed.owners))]
            both = tuple((factor, digits) for factor, digits in pair if digits is not None)
            if len(both) == 2:
                self._add_strategy(node, spec, AxisStrategy(both))

    def _split_inputs(self) -> None:
        """Adds layouts that split a dim of an input. Pointwise ops and views start no split, so layouts of inputs that
        only they read start here.
        """
        for node in filter(ir.is_tensor, ir.placeholders(self.graph)):
            whole = Layout.whole(self.mesh, ir.value(node).shape)
            for dim, length in enumerate(whole.shape):
                if (digits := self._chunk_digits(length)) is not None:
                    self._add((node, 0), whole.replace(dims=[*whole.dims[:dim], digits, *whole.dims[dim + 1 :]]))

    def _meeting_requirements(self, spec: Spec, ways: list[AxisStrategy]) -> list[AxisStrategy]:
        """Returns those of an op's strategies (``ways``) that the plan allows for an op with a `Routed`, such as routed
        experts. If it allows none, returns all: a requirement holds only where the sizes permit it.
        """
        if spec.routed is None:
            return ways
        return [way for way in ways if meets_requirements(spec, dict(way.factors), (self.axis,))] or ways

    def _chunk_digits(self, length: int) -> Digits | None:
        """Returns the digits of a dim of ``length`` elements of which each rank along the axis holds one contiguous
        chunk; None if the axis does not divide it.
        """
        size = self.mesh.size(self.axis)
        if not length or length % size:
            return None
        return canonical(self.mesh, (Digit(size, self.axis), Digit(length // size)))

    def _add(self, slot: Slot, layout: Layout) -> None:
        """Records ``layout`` as a possible layout of a value. A new layout is queued, to spread to other ops. ``slot``:
        the value, as (op, position among its results).
        """
        have = self.layouts.setdefault(slot, {})
        # A layout without axes is replicated and suggests nothing: `WHOLE` is a strategy of every op already.
        if layout not in have and layout.axes:
            have[layout] = None
            self._queue.append((slot, layout))

    def _add_strategies(self, node: fx.Node, spec: Spec, at: int, is_result: bool, layout: Layout) -> None:
        """Adds the strategies of ``node`` in which operand ``at`` (result ``at`` if ``is_result``) has ``layout``."""
        # Pending reductions spread from operands to results only, through ops that pass them on.
        for axis, op in () if is_result else layout.partial:
            for positions in _partial_operand_sets(spec, op, at):
                self._add_strategy(node, spec, AxisStrategy((), ((axis, op),), positions))
        # A split: it splits factors of the op, and these its other operands and results.
        dims = spec.results[at] if is_result else spec.operands[at]
        if len(dims) == layout.ndim:
            digits = project(spec, dims, layout.without_partial())
            split = tuple(sorted((f, d) for f, d in digits.items() if any(x.axis is not None for x in d)))
            if split:
                self._add_strategy(node, spec, AxisStrategy(split))
                self._add_routed(node, spec, dict(split))

    def _add_routed(self, node: fx.Node, spec: Spec, split: Assignment) -> None:
        """Adds strategies of an op with a `Routed` (a pair of factors that one axis may split together, such as tokens
        and experts), in which the axis splits both: one factor as in ``split``, the other as in a strategy that the op
        has already.
        """
        if spec.routed is None:
            return
        pair = (spec.routed.rows, spec.routed.owners)
        for factor, partner in (pair, pair[::-1]):
            # A copy of the list, as it grows inside of the loop.
            for way in list(self.ways[node]) if factor in split else ():
                if partner in (factors := dict(way.factors)):
                    both = {factor: split[factor], partner: factors[partner]}
                    self._add_strategy(node, spec, AxisStrategy(tuple(sorted(both.items()))))

    def _add_strategy(self, node: fx.Node, spec: Spec, way: AxisStrategy) -> None:
        """Adds the strategy ``way`` to the op ``node``, and the layouts that it implies to the op's operands and
        results.
        """
        if way in self.ways[node]:
            return
        self.ways[node][way] = None
        # The operands at ``positions`` are partial over the axis.
        positions = {way.carried: way.positions}
        operands, results = laid_out(spec, self.mesh, dict(way.factors), way.carried, positions)
        for operand, layout in zip(operands_of(node), operands, strict=True):
            self._add(slot_of(operand), layout)
        for index, layout in zip(_result_indices(node), results, strict=True):
            self._add((node, index), layout)


def laid_out(
    spec: Spec,
    mesh: Mesh,
    factors: Mapping[str, Digits],
    carried: Sequence[tuple[str, str]],
    positions: Mapping[tuple[tuple[str, str], ...], frozenset[int]],
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Returns (layouts of an op's operands, layouts of its results) if its factors are split as in ``factors`` and it
    passes on the pending reductions ``carried``: (axis, reduce op) of each. ``positions``: some of these reductions ->
    positions of the operands that are partial by them.
    """
    operands = []
    for at, dims in enumerate(spec.operands):
        partial = [pair for pairs, where in positions.items() if at in where for pair in pairs]
        operands.append(Layout(mesh, place(spec, dims, factors), partial))
    return tuple(operands), results_of(spec, mesh, factors, carried)


def _initial_factors(spec: Spec) -> list[str]:
    """Returns the factors (loops of an op's rule) that may be split first, before any layout is known: each is the
    major factor of some dim.

    Pointwise ops and views (no flops, no reduction) start none; they follow the ops around them.
    """
    if not spec.flops and not spec.reduce:
        return []
    return list(dict.fromkeys(dim[0] for tensor in (*spec.operands, *spec.results) for dim in tensor if dim))


def _partial_operand_sets(spec: Spec, op: str, at: int) -> list[frozenset[int]]:
    """Returns sets of operand positions, each with ``at``: if the operands of one set are all pending reductions by
    ``op``, the reduction passes through to the results.
    """
    sets = [operands for operands in spec.linear if at in operands]
    # An op that only moves data passes on any reduction of operand 0, also one that is not linear, such as max.
    if spec.moves and at == 0 and frozenset({0}) not in sets:
        sets.append(frozenset({0}))
    return [operands for operands in sets if carries(spec, op, operands)]


def _restricted_to_axis(layout: Layout, axis: str) -> Layout:
    """Returns ``layout`` without what it does with other axes: only ``axis`` and its parts still split dims or carry
    pending reductions.
    """
    # `split_part` returns the axis of a part first: "tp" of "tp:1x2".
    others = [a for a in layout.axes if split_part(a)[0] != axis]
    return layout.unbind(others).without_partial(others)


def _result_indices(node: fx.Node) -> list[int]:
    """Returns the positions of the op's results that are tensors (others have no layout)."""
    return [at for at, value in enumerate(ir.info(node).values) if value is not None]


@lru_cache(maxsize=1 << 12)
def combine_axes(spec: Spec, mesh: Mesh, ways: tuple[tuple[AxisStrategy, ...], ...]) -> tuple[Strategy, ...]:
    """Returns the strategies over the whole mesh: each combines one strategy per axis. ``ways``: for each axis, in mesh
    order, the strategies over that axis alone.

    If two axes split the same digit, the later one in mesh order is nested under the earlier one.
    """
    out: dict[Strategy, None] = {}
    for choice in product(*ways):
        strategy = _combined_strategy(spec, mesh, choice)
        if strategy is not None:
            out[strategy] = None
    return tuple(out)


def _combined_strategy(spec: Spec, mesh: Mesh, choice: Sequence[AxisStrategy]) -> Strategy | None:
    """Returns the strategy that combines ``choice``, one strategy per axis; None if they cannot be combined."""
    factors: dict[str, Digits] = {}
    for way in choice:
        for factor, digits in way.factors:
            # If an earlier axis splits the factor as well, at other digits (`merge`), or else inside of its shards.
            joint = merge(mesh, factors.get(factor), digits) or nested(mesh, factors[factor], digits)
            if joint is None:
                return None
            factors[factor] = joint
    # Pending reductions, one at most for each axis: (axis, reduce op).
    carried = [pair for way in choice for pair in way.carried]
    if not commute(spec, factors, carried):
        return None
    # Each axis has its own operands that are partial over it.
    positions = {way.carried: way.positions for way in choice}
    try:
        return Strategy(*laid_out(spec, mesh, factors, carried, positions))
    except LayoutError:  # reductions that do not commute
        return None


def nested(mesh: Mesh, outer: Digits, inner: Digits) -> Digits | None:
    """Returns the digits of a dim that is split as in ``outer`` and, inside those shards, also over the axes of
    ``inner``. Returns None if the sizes do not divide. Of a dim of 8, ``[4@dp, 2]`` and ``[2@tp, 4]`` give
    ``[4@dp, 2@tp]``.

    An axis splits the dim at its own stride; if an axis of ``outer`` splits there already, inside that one's shards.
    """
    spans = _spans(outer)  # (upper end, lower end, axis) of the strides that each axis splits
    for top, bottom, axis in _spans(inner):
        size = top // bottom
        # While another axis splits some of these strides already, move below it, inside of its shards.
        while (over := next((t for t in spans if t[1] < top and bottom < t[0]), None)) is not None:
            top, bottom = over[1], over[1] // size
        if bottom * size != top:  # the shard does not divide by the size of the axis
            return None
        spans.append((top, bottom, axis))
    out, at = [], prod(d.radix for d in outer)
    # Back to digits, from the major one down, with local digits between the split ones.
    for top, bottom, axis in sorted(spans, reverse=True):
        if at % top:
            return None
        out += [Digit(at // top), Digit(top // bottom, axis)]
        at = bottom
    return canonical(mesh, [*out, Digit(at)])


def _spans(digits: Digits) -> list[tuple[int, int, str]]:
    """Returns the range of index that each split digit covers, the major digit first: (stride times radix, stride,
    axis).
    """
    below = strides(digits)
    return [(at * d.radix, at, d.axis) for d, at in zip(digits, below, strict=True) if d.axis is not None]
