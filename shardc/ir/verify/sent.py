"""Checks of what is sent: somebody reads what each collective brings, and none brings what is there already."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.ir import grammar
from shardc.ir.comm import WAIT, waits_of
from shardc.ir.graph import info, outputs
from shardc.ir.tally import arguments_of, collective_kind
from shardc.ir.verify.subject import Broken, Subject


def read(subject: Subject) -> Broken:
    """What a collective brings leads to an output."""
    live: set[fx.Node] = set()
    for node in reversed(subject.nodes):
        if node.op == "output" or node in live:
            live.update(node.all_input_nodes)
    for node in subject.calls:
        if collective_kind(node) is not None and node not in live:
            yield node, "nobody reads what it brings"


def once(subject: Subject) -> Broken:
    """No value is sent twice to become the same."""
    seen: dict[Any, fx.Node] = {}
    for node in subject.calls:
        for value, rest in _sent(node):
            first = seen.setdefault((collective_kind(node), value, rest), node)
            if first is not node:
                yield node, f"it brings what {_name(first)} has brought, of {_name(value)}"


def kept(forward: fx.GraphModule, backward: fx.GraphModule) -> Broken:
    """The collectives of ``backward`` that run again though ``forward`` has kept what they bring."""
    held = {
        info(_brought(x)).name for role, x in outputs(forward.graph) if role.kind == "saved" and isinstance(x, fx.Node)
    }
    for node in backward.graph.nodes:
        if collective_kind(node) is not None:
            for wait in waits_of(node):
                if info(wait).name in held:
                    yield node, f"forward keeps what it brings, {_name(wait)}"


def _sent(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Each value that a collective sends, with what else says what becomes of it."""
    if collective_kind(node) is None:
        return []
    given = arguments_of(node)
    (first, values), *rest = given.items()
    said = tuple((name, repr(one)) for name, one in rest if name != "slots")
    return [(value, said) for value in (values if isinstance(values, list | tuple) else [values])]


def _brought(x: fx.Node) -> fx.Node:
    """The wait that ``x`` is a view of, or ``x``."""
    here = x
    while here.op == "call_function" and here.target is not WAIT:
        schema = getattr(here.target, "_schema", None)
        viewed = schema is not None and len(schema.returns) == 1 and schema.returns[0].alias_info is not None
        if not viewed and here.target is not torch.ops.aten.reshape.default:
            return x
        here = here.all_input_nodes[0]
    return here if here.target is WAIT else x


def _name(node: fx.Node) -> str:
    return grammar.name_text(info(node).name)
