"""Every row of the ruler, in the order of its tables."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from benchmarks.peers import (
    alone,
    autoparallel,
    data_parallel,
    kernels,
    microbatches,
    ours,
    pipeline,
    sharded,
    simple_fsdp,
    tensor_parallel,
)
from benchmarks.peers.row import ALONE, OURS, Row

ROWS: tuple[Row, ...] = (
    *alone.ROWS, *data_parallel.ROWS, *sharded.ROWS, *simple_fsdp.ROWS, *tensor_parallel.ROWS, *autoparallel.ROWS,
    *ours.ROWS, *kernels.ROWS, *microbatches.ROWS, *pipeline.ROWS,
)  # fmt: skip


def groups(globs: Sequence[str], at_once: int | None = None) -> dict[str, list[Row]]:
    """The rows whose names match a glob, by the groups that take turns: a family each, or parts of one.

    Args:
        globs: over row names.
        at_once: the most rows of a group. A larger family is cut into parts, each with some of the peers (at least
            one) and all of what they are compared with: the limit and shardc's rows. None cuts nothing.
    """
    chosen = [row for row in ROWS if any(fnmatchcase(row.name, glob) for glob in globs)]
    limits = [row for row in chosen if row.family == ALONE]
    found: dict[str, list[Row]] = {}
    for family in dict.fromkeys(row.family for row in chosen if row.family != ALONE):
        mine = [row for row in chosen if row.family == family and row.kind == OURS]
        peers = [row for row in chosen if row.family == family and row.kind != OURS]
        most = len(peers) if at_once is None else max(at_once - len(limits) - len(mine), 1)
        parts = [peers[at : at + most] for at in range(0, len(peers), most or 1)] or [[]]
        for number, part in enumerate(parts, 1):
            name = family if len(parts) == 1 else f"{family} {number} of {len(parts)}"
            found[name] = [*limits, *part, *mine]
    return found or ({ALONE: limits} if limits else {})
