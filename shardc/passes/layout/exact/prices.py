"""Costs of the exact layout problem: the seconds of resharding values, and the memory traffic of ops.

Over each part of an axis a value is replicated, split at a place of a dim, or a partial sum. A change of one kind over
some parts is one collective, or a slice. A reshard may lead over other layouts of the list: shortest paths between all
pairs (Floyd, 1962), in numpy. `shardc.cost.redistribute` searches more sequences for one pair, and plans what runs.
It cannot take the place of this table: Llama 3 8B on ``dp=8, tp=8`` has 10,156 pairs, which it prices in 53 s (5 ms
each), and the table in 1.3 s on the same core.

Traffic assumes fusion: a run of ops between matrix products counts as one kernel, as in `shardc.cost.compute`. It reads
values from outside of the run and writes values that are read outside of it. Views have no traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from math import prod

import numpy as np
from torch import fx

from shardc.cost.compute import is_dense
from shardc.cost.model import Pricing
from shardc.cost.places import WHOLE, Place, located
from shardc.cost.redistribute import step_seconds
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Digits, Layout, refine, strides
from shardc.ir.mesh import Mesh, split_part
from shardc.ir.op_traits import aliases
from shardc.passes.op_calls import operands_of


@dataclass(frozen=True)
class Traffic:
    """What an op reads from and writes to memory. Ops that are fused with it pass their values in registers.

    Args:
        reads: positions of the operands that it reads from memory.
        writes: whether it writes its results to memory.
        dense: whether it is not fused: a matrix product, attention or convolution.
    """

    reads: tuple[int, ...] = ()
    writes: bool = False
    dense: bool = False


def traffic_of(graph: fx.Graph) -> dict[fx.Node, Traffic]:
    """Returns op -> its memory traffic, for a graph at global shapes; views have no entry.

    Ops are divided into runs, each of which becomes one kernel. A value has traffic only if it crosses from one run to
    another.
    """
    runs: dict[fx.Node, int] = {}  # op -> number of the run that computes it
    roots: dict[fx.Node, fx.Node] = {}  # value -> the value whose memory it has, for a view that of its source
    readers: dict[fx.Node, set[int]] = {}  # value with memory -> the runs that read it
    order: list[tuple[fx.Node, int]] = []  # (op, number of its run)
    run, phase, after_dense = 0, "", True
    for node in graph.nodes:
        if node.op != "call_function":
            if node.op == "output":
                for _, x in ir.outputs(graph):
                    if isinstance(x, fx.Node):
                        # -1: read by the output, which is no run but needs the value in memory
                        readers.setdefault(roots[x], set()).add(-1)
            roots[node] = node
            continue
        if node.target in ops.MARKERS.values() or aliases(node.target):  # it allocates no memory
            roots[node] = roots[node.all_input_nodes[0]] if node.all_input_nodes else node
            continue
        roots[node] = node
        now = ir.info(node).origin.phase
        # Ops between two dense ones of a phase are fused into one kernel; each dense op is a kernel by itself.
        if after_dense or is_dense(node) or now != phase:
            run += 1
        after_dense, phase, runs[node] = is_dense(node), now, run
        order.append((node, run))
        for x in node.all_input_nodes:
            readers.setdefault(roots[x], set()).add(run)
    return dict(_traffic_per_op(order, runs, roots, readers))


def _traffic_per_op(
    order: list[tuple[fx.Node, int]],
    runs: dict[fx.Node, int],
    roots: dict[fx.Node, fx.Node],
    readers: dict[fx.Node, set[int]],
) -> Iterator[tuple[fx.Node, Traffic]]:
    """Yields (op, its `Traffic`) for each op in ``order``. ``runs`` says which ops are fused into one kernel; within a
    kernel, only the first reader of a value reads it from memory.

    Args:
        order: (op, number of its run), in graph order.
        runs: op -> number of its run.
        roots: value -> the value whose memory it has.
        readers: value with memory of its own -> the runs that read it; -1 for the graph's output.
    """
    seen: set[tuple[int, fx.Node]] = set()
    for node, run in order:
        reads = []
        for at, x in enumerate(operands_of(node)):
            # From memory, unless this kernel computes the value or has read it already.
            root = roots[x]
            if runs.get(root) != run and (run, root) not in seen:
                seen.add((run, root))
                reads.append(at)
        yield node, Traffic(tuple(reads), bool(readers.get(node, set()) - {run}), is_dense(node))


Table = np.ndarray
_KINDS = ("", "shard", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_NONE, _SLICE, _GATHER, _SCATTER, _REDUCE, _EXCHANGE = range(6)
_STEPS = (_SLICE, _GATHER, _SCATTER, _REDUCE, _EXCHANGE)
_NEVER = 255


@lru_cache(maxsize=1 << 10)
def prices(have: tuple[Layout, ...], want: tuple[Layout, ...], itemsize: int, cost: Pricing) -> Table:
    """Returns the seconds to reshard from each of ``have`` to each of ``want``, [have, want]; inf without a path.

    Args:
        have, want: layouts of one tensor.
        itemsize: bytes per element.
        cost: the cost model.
    """
    every = tuple(dict.fromkeys((*have, *want)))
    at = {layout: index for index, layout in enumerate(every)}
    table = _seconds_by_any_way(every, itemsize, cost)
    return table[np.ix_([at[x] for x in have], [at[x] for x in want])]


def one_axis(have: tuple[Layout, ...], want: tuple[Layout, ...]) -> Table:
    """Returns a bool array [have, want]: whether exactly one axis changes between two layouts, and
    not only by a slice.
    """
    parts, codes = _part_codes(have[0].mesh, (*have, *want))
    # Arrays [have, want, part]: what a layout does with an axis part before the reshard and after it.
    source, target = codes[: len(have), None], codes[None, len(have) :]
    changed, axes = source != target, [split_part(part)[0] for part in parts]
    masks = [np.array([axis == other for other in axes]) for axis in dict.fromkeys(axes)]  # the parts of each axis
    by_axis = np.stack([changed[:, :, mask].any(axis=2) for mask in masks] or [np.zeros(changed.shape[:2], bool)])
    moved = (changed & (source != 0)).any(axis=2)  # from replicated (0), a change is a slice
    is_one: Table = np.equal(by_axis.sum(axis=0), 1) & moved
    return is_one


def _seconds_by_any_way(layouts: tuple[Layout, ...], itemsize: int, cost: Pricing) -> Table:
    """Returns a table [from, to] of the predicted seconds to reshard between any two of ``layouts``: directly or by way
    of others of them, whichever is cheapest.
    """
    table = _direct_seconds(layouts, itemsize, cost)
    # Floyd's shortest paths: after each turn, paths may lead over the layouts up to ``middle``.
    for middle in range(len(layouts)):
        np.minimum(table, table[:, middle, None] + table[None, middle], out=table)
    return table


def _direct_seconds(layouts: tuple[Layout, ...], itemsize: int, cost: Pricing) -> Table:
    """Returns a table [from, to] of the predicted seconds to reshard between any two of ``layouts`` directly. The entry
    is inf if this needs another layout in between.

    A direct reshard has changes of one kind, or slices, reduce-scatters and all-reduces in their cheapest order. These
    are independent, so any order is possible. A gradient is scattered over one axis, then its shard is reduced over
    another.
    """
    mesh = layouts[0].mesh
    parts, codes = _part_codes(mesh, layouts)
    kinds = _change_kinds(codes)
    # Kind -> the parts that change in this way, as the bits of an integer.
    masks = {kind: ((kinds == kind) << np.arange(len(parts))).sum(axis=2) for kind in _STEPS}
    count = sum((mask != 0).astype(int) for mask in masks.values())
    # One kind of change, or any slices and reductions; a gather or an exchange stands alone.
    fits = ((count == 1) | ((masks[_GATHER] == 0) & (masks[_EXCHANGE] == 0))) & (kinds != _NEVER).all(axis=2)
    np.fill_diagonal(fits, False)
    table = np.where(np.eye(len(layouts), dtype=bool), 0.0, np.inf)
    rows, columns = np.nonzero(fits)
    numel = np.array([layout.local_numel for layout in layouts])
    # Reshards of equally many elements with the same changes are priced once.
    keys = [numel[rows], _clashing_pairs(layouts)[rows, columns], *(mask[rows, columns] for mask in masks.values())]
    distinct, inverse = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)
    seconds = []
    # ``start``: elements per rank before the reshard; ``changed``: for each kind, the bits of the parts that change.
    for start, clash, *changed in distinct.tolist():
        changes = [
            (kind, tuple(p for k, p in enumerate(parts) if mask >> k & 1))
            for kind, mask in zip(_STEPS, changed, strict=True)
            if mask
        ]
        if clash and changes[0][0] == _EXCHANGE:  # no common refinement: gathered, then sliced
            changes = [(_GATHER, changes[0][1]), (_SLICE, changes[0][1])]
        # What is gathered has to be gathered before it is sliced; other changes are independent.
        orders = [changes] if _GATHER in dict(changes) else permutations(changes)
        seconds.append(min(_sequence_seconds(mesh, order, start, itemsize, cost) for order in orders))
    if len(rows):
        table[rows, columns] = np.array(seconds)[inverse.ravel()]
    return table


def _sequence_seconds(
    mesh: Mesh, steps: Sequence[tuple[int, tuple[str, ...]]], before: int, itemsize: int, cost: Pricing
) -> float:
    """Returns the predicted seconds of a sequence of collectives, ``steps``: (kind, axis parts) of each. The tensor has
    ``before`` elements per rank before the first one.
    """
    total = 0.0
    for kind, over in steps:
        ranks = prod(map(mesh.size, over))
        # An all-reduce or an all-to-all leaves the number of elements per rank as it is.
        after = before * ranks if kind == _GATHER else before // ranks if kind in (_SLICE, _SCATTER) else before
        total += step_seconds(_KINDS[kind], mesh, over, before, after, itemsize, cost)
        before = after
    return total


def _clashing_pairs(layouts: Sequence[Layout]) -> Table:
    """Returns a bool array [layout, layout]: whether two of ``layouts`` split some dim in ways without a common
    refinement.
    """
    out = np.zeros((len(layouts), len(layouts)), dtype=bool)
    for dims in zip(*(layout.dims for layout in layouts), strict=True):
        # Many layouts split a dim in the same way: compare each two ways once, then spread the result to the layouts.
        index = {digits: at for at, digits in enumerate(dict.fromkeys(dims))}
        table = np.array([[_clash(layouts[0].mesh, first, second) for second in index] for first in index])
        place = np.array([index[digits] for digits in dims])
        out |= table[np.ix_(place, place)]
    return out


@lru_cache(maxsize=1 << 16)
def _clash(mesh: Mesh, first: Digits, second: Digits) -> bool:
    """Returns whether two splits of a dim, ``first`` and ``second``, have no common refinement."""
    return refine(mesh, first, strides(second)) is None or refine(mesh, second, strides(first)) is None


def _part_codes(mesh: Mesh, layouts: Sequence[Layout]) -> tuple[list[str], Table]:
    """Returns (the axis parts that occur in ``layouts``, int array [layout, part]). An entry is a code that says what
    the layout does with the part: split a dim, a pending reduction, or nothing.

    A code is 0 for replicated, negative for a pending reduction, and positive for a split, equal for equal places.
    """
    # Axes are cut into parts that are as small as the finest use of the axis in any of the layouts.
    cuts = mesh.edges([axis for layout in layouts for axis in layout.axes])
    locations = [located(layout, cuts) for layout in layouts]
    parts = sorted({part for location in locations for part in location}, key=mesh.order)
    places: dict[tuple[int, int], int] = {}
    codes = np.zeros((len(layouts), len(parts)), dtype=np.int64)
    for row, location in enumerate(locations):
        for column, part in enumerate(parts):
            at = location.get(part, WHOLE)
            # A split is identified by dim and stride, as a part's size is the same everywhere.
            codes[row, column] = places.setdefault(at[:2], len(places) + 1) if isinstance(at, Place) else at
    return parts, codes


def _change_kinds(codes: Table) -> Table:
    """Returns an array [from, to, part]: the kind of collective that changes one layout to another along an axis part.

    Args:
        codes: code of each layout and part, as from `_part_codes`: 0 replicated, < 0 partial, > 0 split.
    """
    source, target = codes[:, None], codes[None, :]
    changes = {
        _NONE: source == target,
        _SLICE: (source == 0) & (target > 0),
        _GATHER: (source > 0) & (target == 0),
        _SCATTER: (source < 0) & (target > 0),
        _REDUCE: (source < 0) & (target == 0),
        _EXCHANGE: (source > 0) & (target > 0),
    }
    # The first kind whose condition holds; no reshard leads to a partial sum, unless it is there before (_NEVER).
    kinds: Table = np.select(list(changes.values()), list(changes), default=_NEVER)
    return kinds
