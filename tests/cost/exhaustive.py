"""The yardstick of the planner: the cheapest way between layouts by up to three collectives, by brute force.

It knows nothing of digits. A layout is the set of elements that each rank holds, and its pending sums;
whether one collective leads from one layout to another is read off these sets. Every layout of the list
may be an intermediate one, and local slices are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

import numpy as np

from shardc.ir.layout import Layout

INFINITE = np.inf


def wire_elements(layouts: Sequence[Layout], collectives: int = 3) -> np.ndarray:
    """Elements that a rank receives on the cheapest way from each of ``layouts`` (row) to each (column)."""
    free, wire = _one_step(layouts)
    step = _compose(_compose(free, wire), free)
    best, way = np.minimum(free, step), step
    for _ in range(collectives - 1):
        way = _compose(way, step)
        best = np.minimum(best, way)
    return best


def _compose(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.stack([(row[:, None] + second).min(0) for row in first])


def _one_step(layouts: Sequence[Layout]) -> tuple[np.ndarray, np.ndarray]:
    """Costs of local changes (0 or infinite) and of one collective."""
    mesh, count = layouts[0].mesh, len(layouts)
    held = np.stack([_held(layout) for layout in layouts]).astype(np.int32)  # [layout, rank, element]
    size = held[:, 0].sum(1)
    # common[i, q, j, r]: elements that rank q holds in layout i and rank r in layout j.
    common = np.einsum("iqe,jre->iqjr", held, held, optimize=True)
    pending = [frozenset(axis for axis, _ in layout.partial) for layout in layouts]
    shards = [sorted(row.tobytes() for row in ranks) for ranks in held]
    same_pending = np.array([[p == q for q in pending] for p in pending])
    own = np.stack([common[:, r, :, r] for r in range(mesh.ranks)], -1)  # [i, j, rank]
    keeps = (own == size[None, :, None]).all(-1)
    free = np.where(keeps & same_pending, 0.0, INFINITE)
    wire = np.full((count, count), INFINITE)
    swap = np.array([[a == b for b in shards] for a in shards]) & same_pending
    wire[swap] = np.broadcast_to(size[:, None], wire.shape)[swap]
    for axes in (c for k in range(1, len(mesh.axes) + 1) for c in combinations(mesh.axes, k)):
        n = prod(mesh.size(axis) for axis in axes)
        pairs = [(q, r) for r in range(mesh.ranks) for q in mesh.group(axes, r)]
        q, r = (list(side) for side in zip(*pairs, strict=True))
        between = common[:, q, :, :][np.arange(count)[:, None], np.arange(len(q)), :, r].reshape(count, len(q), count)
        gathers = (between == size[:, None, None]).all(1) & (size[None, :] == n * size[:, None]) & same_pending
        exchanges = (between * n == size[:, None, None]).all(1) & (size[None, :] == size[:, None]) & same_pending
        alike = [[set(axes) <= p and p - set(axes) == after for after in pending] for p in pending]
        others = [(a, b) for a, b in pairs if a != b]
        apart = np.array([all(common[j, a, j, b] == 0 for a, b in others) for j in range(count)])
        scatters = np.array(alike) & keeps & (size[None, :] * n == size[:, None]) & apart[None, :]
        reduces = np.array(alike) & keeps & (size[None, :] == size[:, None])
        for found, cost in (
            (gathers, (n - 1) * size),
            (exchanges, size - size // n),
            (scatters, size - size // n),
            (reduces, -(-2 * (n - 1) * size // n)),
        ):
            wire = np.where(found, np.minimum(wire, cost[:, None]), wire)
    # A whole value becomes a pending sum for nothing.
    for i, layout in enumerate(layouts):
        for j, other in enumerate(layouts):
            if pending[i] < pending[j] and layout.dims == other.dims:
                free[i, j] = 0.0
    return free, wire


def _held(layout: Layout) -> np.ndarray:
    """[rank, element]: whether the rank holds the element."""
    out = np.zeros((layout.mesh.ranks, *layout.shape), dtype=bool)
    for rank in range(layout.mesh.ranks):
        out[(rank, *np.ix_(*(layout.local_index(dim, rank) for dim in range(layout.ndim))))] = True
    return out.reshape(layout.mesh.ranks, -1)
