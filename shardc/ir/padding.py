"""Padding of uneven dims: which positions of a padded dim hold elements, and which hold filling.

A dim is an ordered product of *runs*, major to minor. A run has ``size`` positions, the first ``true`` of which hold
elements. A view may merge a padded dim with others, so a padded run can be anywhere among the runs of a dim: a sequence
of 7 in 8 positions, merged under a batch of 2, is ``(2 8/7)``, 16 positions of which the 8th and 16th are filling.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Run(NamedTuple):
    """A stretch of a padded dim: ``size`` positions, split over ``axes``; the first ``true`` hold elements."""

    size: int
    true: int
    axes: tuple[str, ...] = ()

    @property
    def padded(self) -> bool:
        return self.size != self.true


Runs = tuple[Run, ...]
Padding = tuple[Runs, ...]  # one entry a dim


def unpadded(shape: Sequence[int]) -> Padding:
    """Return the padding of a tensor of ``shape`` that has no filling."""
    return tuple((Run(size, size),) for size in shape)


def is_padded(runs: Runs) -> bool:
    return any(run.padded for run in runs)


def places(runs: Runs) -> int:
    """Return the padded size of a dim: elements and filling."""
    return prod(run.size for run in runs)


def elements(runs: Runs) -> int:
    """Return the number of elements of a dim."""
    return prod(run.true for run in runs)


def axes_of(padding: Padding) -> tuple[str, ...]:
    """Return the axes for which some dim is padded."""
    return tuple(dict.fromkeys(axis for runs in padding for run in runs if run.padded for axis in run.axes))


def canonical(runs: Sequence[Run]) -> Runs:
    """Return ``runs`` with each run merged with the unpadded run below it: the filling is then at the end of both.

    >>> canonical([Run(3, 3), Run(6, 5), Run(2, 2), Run(4, 4)])
    (Run(size=3, true=3, axes=()), Run(size=48, true=40, axes=()))
    """
    out: list[Run] = []
    for run in runs:
        if out and not run.padded:
            out[-1] = Run(out[-1].size * run.size, out[-1].true * run.true, out[-1].axes)
        elif run.size != 1:
            out.append(run)
    return tuple(out) or (Run(1, 1),)


def share_out(runs: Runs, sizes: Sequence[int]) -> list[Runs] | None:
    """Split ``runs`` among factors of ``sizes`` elements, major to minor; None if a padded run spans two factors.

    >>> share_out((Run(12, 10),), [5, 2])
    [(Run(size=6, true=5, axes=()),), (Run(size=2, true=2, axes=()),)]
    """
    out, left = [], [run for run in runs if run != Run(1, 1)]
    for size in sizes:
        factors: list[Run] = []
        while size > 1:
            if not left:
                return None
            run = left.pop(0)
            if size % run.true == 0:
                factors.append(run)
                size //= run.true
                continue
            below = run.true // size
            if run.true % size or run.size % below:
                return None
            factors.append(Run(run.size // below, size, run.axes))
            left.insert(0, Run(below, below))
            size = 1
        out.append(canonical(factors))
    return None if left else out
