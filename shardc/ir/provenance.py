"""Provenance of a collective in one graph: the plan entry and the line of the user's code that it comes from.

`shardc.report.causes` looks further, over all ops of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import getitem

from torch import fx

from shardc.ir import ops
from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import GROUP_PREFIX, arguments_of, collective_kind
from shardc.ir.graph import Origin, info, placeholders

_FAR = 64  # most ops after a collective that are searched for a line


def collective_of(node: fx.Node) -> fx.Node | None:
    """Return the collective that ``node`` starts, waits for or is a result of, or None."""
    while node.target is WAIT or node.target is getitem:
        node = node.all_input_nodes[0]
    return node if collective_kind(node) is not None else None


def entry_of(node: fx.Node, causes: Mapping[str, str]) -> str | None:
    """Return the plan entry that caused the collective ``node``, or None; ``causes``: parameter -> its entries."""
    origin: Origin = info(node).origin
    if not origin.consumer:
        return origin.cause or None
    stored = (info(x).origin.cause for x in placeholders(node.graph) if info(x).name == origin.consumer)
    beside = (entry for param, entry in causes.items() if param.rpartition(".")[0] == origin.module)
    return next(about(axes_of(node), (*stored, *beside)), None)


def axes_of(node: fx.Node) -> set[str]:
    """Return the mesh axes of a collective, without their parts."""
    group = node.kwargs.get("axis", "") if node.target in ops.COLLECTIVES else arguments_of(node)["group_name"]
    return {axis.partition(":")[0] for axis in str(group).removeprefix(GROUP_PREFIX).split(",")}


def about(axes: Iterable[str], entries: Iterable[str]) -> Iterator[str]:
    """Yield the plan entries that mention one of ``axes``."""
    return (entry for entry in entries if any(f'"{axis}"' in entry or f"@{axis}" in entry for axis in axes))


def source_of(node: fx.Node) -> str | None:
    """Return the user's line that caused the collective ``node``: its own, or that of the first op that uses it."""
    seen = [node]
    for user_node in seen:
        if user_node.op != "output" and (source := info(user_node).origin.source):
            return source
        seen += [user for user in user_node.users if user not in seen][: _FAR - len(seen)]
    return None
