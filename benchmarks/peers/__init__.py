"""Every row of the ruler, in the order of its tables."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from benchmarks.peers import alone, data_parallel, ours, sharded, tensor_parallel
from benchmarks.peers.row import ALONE, Row

ROWS: tuple[Row, ...] = (*alone.ROWS, *data_parallel.ROWS, *sharded.ROWS, *tensor_parallel.ROWS, *ours.ROWS)


def families(globs: Sequence[str]) -> dict[str, list[Row]]:
    """The rows whose names match a glob, by family; the limit leads each family if it matches too."""
    chosen = [row for row in ROWS if any(fnmatchcase(row.name, glob) for glob in globs)]
    limits = [row for row in chosen if row.family == ALONE]
    names = dict.fromkeys(row.family for row in chosen if row.family != ALONE)
    found = {name: [*limits, *(row for row in chosen if row.family == name)] for name in names}
    return found or ({ALONE: limits} if limits else {})
