"""The collectives in the code that Inductor emitted, against those of the graph that it was given."""

from __future__ import annotations

import re
from itertools import zip_longest

from torch import fx

from shardc.errors import VerifyError
from shardc.ir.tally import arguments_of, collective_kind

_CALL = re.compile(r"torch\.ops\.(?:_c10d_functional|shardc)\.(\w+)\.default\((.*)\)")
_NAME = re.compile(r"'([^']*)'")


def of_graph(graph: fx.Graph) -> list[str]:
    """The collectives of a local graph in order: each one's op, with the group that it is over."""
    found = []
    for node in graph.nodes:
        if collective_kind(node) is not None:
            target: object = node.target
            found.append(f"{_plain(target._opname)}({arguments_of(node)['group_name']})")  # type: ignore[attr-defined]
    return found


def of_source(source: str) -> list[str]:
    """The same of the Python code of a compiled graph, whose collectives may be the in-place ones."""
    found = []
    for name, arguments in _CALL.findall(source):
        if name != "wait_tensor":
            found.append(f"{_plain(name)}({_NAME.findall(arguments)[-1]})")
    return found


def check_order(graph: fx.Graph, source: str) -> None:
    """Checks that ``source`` starts the collectives of ``graph`` in its order, which is what the ranks agreed on.

    Raises:
        VerifyError: names the first that differs.
    """
    for at, (asked, made) in enumerate(zip_longest(of_graph(graph), of_source(source), fillvalue="nothing more")):
        if asked != made:
            raise VerifyError(
                f"the compiled code starts {made} as collective {at}, where the schedule has {asked}; "
                "ranks whose orders differ would wait for each other",
                fix='compile with backend="eager", or switch off the Inductor pass that reorders or rewrites it',
            )


def _plain(name: str) -> str:
    return name.removesuffix("_out").removesuffix("_")
