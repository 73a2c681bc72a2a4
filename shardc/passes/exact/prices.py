"""Prices: the seconds of resharding every layout of a value to every other, computed together.

Over each part of an axis a value is replicated, split at a place of a dim, or a partial sum. A change of one kind over
some parts is one collective, or a slice. A reshard may lead over other layouts of the list: shortest paths between all
pairs (Floyd, 1962), in numpy. `shardc.cost.redistribute` searches more sequences for a single pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations
from math import prod

import numpy as np

from shardc.cost.model import Pricing
from shardc.cost.redistribute import step_seconds
from shardc.ir.layout import REDUCE_OPS, Digits, Layout, refine, strides
from shardc.ir.mesh import Mesh, split_part
from shardc.rules.spec import atoms

Table = np.ndarray
_KINDS = ("", "shard", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_NONE, _SLICE, _GATHER, _SCATTER, _REDUCE, _EXCHANGE = range(6)
_AGAIN = 6  # an exchange between splits of a dim without a common refinement: gathered, then sliced
_NEVER = 255


@lru_cache(maxsize=1 << 10)
def prices(have: tuple[Layout, ...], want: tuple[Layout, ...], itemsize: int, cost: Pricing) -> Table:
    """Returns the seconds from each of ``have`` to each of ``want``, layouts of one tensor; inf if there is no path."""
    every = tuple(dict.fromkeys((*have, *want)))
    at = {layout: index for index, layout in enumerate(every)}
    table = _closed(every, itemsize, cost)
    return table[np.ix_([at[x] for x in have], [at[x] for x in want])]


def one_axis(have: tuple[Layout, ...], want: tuple[Layout, ...]) -> Table:
    """Tells, for each of ``have`` and each of ``want``, whether exactly one axis changes, and not only by a slice."""
    parts, codes = _codes(have[0].mesh, (*have, *want))
    source, target = codes[: len(have), None], codes[None, len(have) :]
    changed, axes = source != target, [split_part(part)[0] for part in parts]
    masks = [np.array([axis == each for each in axes]) for axis in dict.fromkeys(axes)]
    by_axis = np.stack([changed[:, :, mask].any(axis=2) for mask in masks] or [np.zeros(changed.shape[:2], bool)])
    moved = (changed & (source != 0)).any(axis=2)
    is_one: Table = np.equal(by_axis.sum(axis=0), 1) & moved
    return is_one


def _closed(layouts: tuple[Layout, ...], itemsize: int, cost: Pricing) -> Table:
    table = _direct(layouts, itemsize, cost)
    for middle in range(len(layouts)):
        np.minimum(table, table[:, middle, None] + table[None, middle], out=table)
    return table


def _direct(layouts: tuple[Layout, ...], itemsize: int, cost: Pricing) -> Table:
    """Returns the seconds of a single step from each layout to each other; inf if one step does not suffice."""
    mesh = layouts[0].mesh
    parts, codes = _codes(mesh, layouts)
    numel = np.array([layout.local_numel for layout in layouts])
    kinds = _kinds(codes)
    changed = kinds != _NONE
    most = kinds.max(axis=2, initial=0)
    uniform = (kinds == most[:, :, None]) | ~changed  # every change is of one kind
    fits = uniform.all(axis=2) & (most != _NEVER)
    subset = (changed << np.arange(len(parts))).sum(axis=2)
    after = np.broadcast_to(numel[None], fits.shape)
    table = np.full(fits.shape, np.inf)
    np.fill_diagonal(table, 0.0)
    np.fill_diagonal(fits, False)
    rows, columns = np.nonzero(fits)
    kind = most[rows, columns]
    kind[(kind == _EXCHANGE) & _clashes(layouts)[rows, columns]] = _AGAIN
    keys = np.stack([kind, subset[rows, columns], numel[rows], after[rows, columns]], axis=1)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    seconds = np.zeros(len(distinct))
    for at, (number, mask, numel_before, numel_after) in enumerate(distinct.tolist()):
        changing = tuple(p for k, p in enumerate(parts) if mask >> k & 1)
        between = numel_before * prod(map(mesh.size, changing))
        steps = [("all_gather", numel_before, between), ("shard", between, numel_after)] if number == _AGAIN else []
        for name, before, behind in steps or [(_KINDS[number], numel_before, numel_after)]:
            seconds[at] += step_seconds(name, mesh, changing, before, behind, itemsize, cost)
    if len(rows):
        table[rows, columns] = seconds[inverse.ravel()]
    _reductions(table, mesh, parts, kinds, numel, itemsize, cost)
    return table


def _reductions(
    table: Table, mesh: Mesh, parts: Sequence[str], kinds: Table, numel: Table, itemsize: int, cost: Pricing
) -> None:
    """Fills in pairs that take a mix of slices, reduce-scatters and all-reduces, in the cheapest order of these.

    They are independent, so any order is possible. The layouts in between need not be in the list: a gradient is
    scattered over one axis, then its shard is reduced over another.
    """
    steps = (_SLICE, _SCATTER, _REDUCE)
    masks = [((kinds == kind) << np.arange(len(parts))).sum(axis=2) for kind in steps]
    mixed = np.isin(kinds, (_NONE, *steps)).all(axis=2) & (sum((mask != 0).astype(int) for mask in masks) > 1)
    rows, columns = np.nonzero(mixed)
    if not len(rows):
        return
    keys = np.stack([*(mask[rows, columns] for mask in masks), numel[rows]], axis=1)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    least = []
    for *some, start in distinct.tolist():
        changing = [
            (kind, tuple(p for k, p in enumerate(parts) if mask >> k & 1))
            for kind, mask in zip(steps, some, strict=True) if mask
        ]  # fmt: skip
        totals = []
        for order in permutations(changing):
            total, before = 0.0, start
            for kind, over in order:
                after = before if kind == _REDUCE else before // prod(map(mesh.size, over))
                total += step_seconds(_KINDS[kind], mesh, over, before, after, itemsize, cost)
                before = after
            totals.append(total)
        least.append(min(totals))
    table[rows, columns] = np.array(least)[inverse.ravel()]


def _clashes(layouts: Sequence[Layout]) -> Table:
    """Tells, for each pair of layouts, whether their splits of some dim have no common refinement."""
    out = np.zeros((len(layouts), len(layouts)), dtype=bool)
    for dims in zip(*(layout.dims for layout in layouts), strict=True):
        index = {digits: at for at, digits in enumerate(dict.fromkeys(dims))}
        table = np.array([[_clash(layouts[0].mesh, first, second) for second in index] for first in index])
        place = np.array([index[digits] for digits in dims])
        out |= table[np.ix_(place, place)]
    return out


@lru_cache(maxsize=1 << 16)
def _clash(mesh: Mesh, first: Digits, second: Digits) -> bool:
    return refine(mesh, first, strides(second)) is None or refine(mesh, second, strides(first)) is None


def _codes(mesh: Mesh, layouts: Sequence[Layout]) -> tuple[list[str], Table]:
    """Returns the parts of axes that layouts bind, and each layout's codes: 0 replicated, < 0 partial, else a place."""
    cut = atoms(mesh, [axis for layout in layouts for axis in layout.axes])
    parts = sorted({part for found in cut.values() for part in found}, key=mesh.order)
    column = {part: at for at, part in enumerate(parts)}
    places: dict[tuple[int, int], int] = {}
    codes = np.zeros((len(layouts), len(parts)), dtype=np.int64)
    for row, layout in enumerate(layouts):
        for axis, op in layout.partial:
            for part in cut[axis]:
                codes[row, column[part]] = -1 - REDUCE_OPS.index(op)
        for dim, digits in enumerate(layout.dims):
            below = 1
            for radix, bound in reversed(digits):
                inner = below
                for part in reversed(cut[bound]) if bound is not None else ():
                    codes[row, column[part]] = places.setdefault((dim, inner), len(places) + 1)
                    inner *= mesh.size(part)
                below *= radix
    return parts, codes


def _kinds(codes: Table) -> Table:
    """Returns the kind of change of each part from each layout to each other."""
    source, target = codes[:, None], codes[None, :]
    kinds = np.full(np.broadcast_shapes(source.shape, target.shape), _NEVER, dtype=np.uint8)
    kinds[np.broadcast_to(source == target, kinds.shape)] = _NONE
    for condition, kind in (
        ((source == 0) & (target > 0), _SLICE),
        ((source > 0) & (target == 0), _GATHER),
        ((source < 0) & (target > 0), _SCATTER),
        ((source < 0) & (target == 0), _REDUCE),
        ((source > 0) & (target > 0) & (source != target), _EXCHANGE),
    ):
        kinds[np.broadcast_to(condition, kinds.shape)] = kind
    return kinds
