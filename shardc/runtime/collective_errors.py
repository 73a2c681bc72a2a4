"""Errors of a failed collective (a peer is gone), with its name, plan entry and source line.

Nothing is recorded during a step. The traceback shows the failing node, or the line of Inductor's code, whose
collectives are in graph order (`shardc.ir.emitted.check_order`).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from operator import getitem
from typing import Any, Protocol

import torch
from torch import fx

from shardc.errors import CollectiveError
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import arguments_of, collective_kind, group_axes
from shardc.ir.emitted import collective_at
from shardc.ir.segments import Segment
from shardc.runtime.groups import Groups


class Cause(Protocol):
    """The reason for a collective: plan entry and source line."""

    @property
    def entry(self) -> str: ...

    @property
    def source(self) -> str: ...


def named(
    error: Exception,
    gm: fx.GraphModule,
    which: str,
    groups: Groups,
    cause: Callable[[fx.Node], Cause],
    segment: Segment | None = None,
) -> CollectiveError | None:
    """Returns the CollectiveError for ``error``, raised while running ``gm``; None if it was not in a collective.

    Args:
        which: "forward", "backward", "inference" or "reduction".
        cause: maps a collective of ``gm`` to its plan entry and source line.
        segment: the part of ``gm`` that ran; by default all of it.
    """
    node = collective_of(error, gm, segment)
    if node is None:
        return None
    name = next(key for key, value in groups.rename.items() if value == arguments_of(node)["group_name"])
    axes = group_axes(name, groups.mesh) or ()
    ranks, why = groups.ranks(axes), cause(node)
    text = str(error).partition("\n")[0]
    return CollectiveError(
        f"rank {torch.distributed.get_rank()} was in {collective_kind(node)} over {','.join(axes)} of "
        f"{_results(node)}, in {which}, when it failed: {text}",
        plan_entry=why.entry or None,
        source=why.source or None,
        fix=f"look at the others of ranks {ranks} first: one of them died, raised or came too late; then restart all "
        "ranks from the last checkpoint",
    )


def collective_of(error: Exception, gm: fx.GraphModule, segment: Segment | None = None) -> fx.Node | None:
    """Returns the node of ``gm`` that started the collective in which, or in whose wait, ``error`` was raised."""
    collective: fx.Node | None = None
    step = error.__traceback__
    while step is not None:
        frame, line = step.tb_frame, step.tb_lineno
        at: Any = frame.f_locals.get("n") if frame.f_code.co_name == "run_node" else None
        if isinstance(at, fx.Node):
            collective = _start(at)
        elif frame.f_code.co_name == "call":
            index = collective_at(linecache.getlines(frame.f_code.co_filename), line)
            starts = [node for node in gm.graph.nodes if collective_kind(node) is not None]
            first, takes = (segment.collective, segment.takes) if segment is not None else (0, ())
            if index is not None and 0 <= index < len(starts) - first:
                collective = starts[first + index]
            elif index is not None and -1 - index in range(len(takes)):
                collective = next(_start(node) for node in gm.graph.nodes if node.name == takes[-1 - index])
        step = step.tb_next
    return collective


def _start(node: fx.Node) -> fx.Node | None:
    """Returns the collective that ``node`` starts or waits for; None if it does neither."""
    while collective_kind(node) is None:
        waits = node.target in (WAIT, getitem)
        if not waits or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return node


def _results(start: fx.Node) -> str:
    """Returns the names of a collective's results as text."""
    work, names = list(start.users), []
    while work:
        user = work.pop(0)
        if user.target is getitem:
            work += list(user.users)
        else:
            names.append(f"%{ir.info(user).name}")
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
