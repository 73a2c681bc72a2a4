"""Checks that a pass which only moves data left the program the same: each op computes what one computed before.

Every value gets a fingerprint: of a placeholder its role, of an op its name, its constants and the fingerprints
of what it takes. Data movement changes none, so a value that is gathered, scattered, padded or resharded has
the fingerprint of what it was made from; an op that takes the wrong value, though of the right type, gets one
that was never there before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from torch import fx

from shardc.ir import grammar, ops
from shardc.ir.graph import Role, info, outputs


@dataclass(frozen=True)
class Program:
    """What a graph computes.

    Args:
        values: the fingerprints of its values.
        results: role and fingerprint of each output that there is.
    """

    values: frozenset[bytes]
    results: tuple[tuple[str, str, int, bytes], ...]


def program(gm: fx.GraphModule) -> Program:
    """What ``gm`` computes, data movement left out."""
    found = fingerprints(gm.graph)
    results = [
        (role.kind, role.name, role.index, found[made]) for role, made in outputs(gm.graph) if isinstance(made, fx.Node)
    ]
    return Program(frozenset(found.values()), tuple(results))


def changed(before: Program, gm: fx.GraphModule) -> tuple[fx.Node, str] | None:
    """The first node of ``gm`` that computes what ``before`` did not, and what it takes; None where all is the same."""
    found = fingerprints(gm.graph)
    for node in gm.graph.nodes:
        if node.op != "output" and found[node] not in before.values:
            taken = ", ".join(dict.fromkeys(grammar.name_text(info(_moved(x)).name) for x in node.all_input_nodes))
            return node, f"no op took {taken or 'these arguments'} this way before the pass"
    now = program(gm).results
    for one, other in zip(before.results, now, strict=False):
        if one != other:
            return next(iter(reversed(gm.graph.nodes))), f"{other[0]} {other[1]} is not the value that it was"
    if len(now) != len(before.results):
        return next(iter(reversed(gm.graph.nodes))), f"{len(before.results)} outputs became {len(now)}"
    return None


def fingerprints(graph: fx.Graph) -> dict[fx.Node, bytes]:
    """The fingerprint of each node but the output."""
    out: dict[fx.Node, bytes] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.target in ops.MARKERS.values():
            out[node] = out[node.args[0]]
        elif node.op == "placeholder":
            role = info(node).role or Role("", info(node).name)
            out[node] = digest("placeholder", role.kind, role.name, role.index)
        elif node.op == "get_attr":
            out[node] = digest("constant", node.target)
        else:
            out[node] = digest(node.target, known(node.args, out), known(sorted(node.kwargs.items()), out))
    return out


def known(argument: Any, found: Mapping[fx.Node, Any]) -> Any:
    """``argument`` with the fingerprints of values in their place."""
    if isinstance(argument, fx.Node):
        return found[argument]
    return [known(one, found) for one in argument] if isinstance(argument, list | tuple) else argument


def digest(*parts: Any) -> bytes:
    """A fingerprint of ``parts``, by how they print."""
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def _moved(node: fx.Node) -> fx.Node:
    """What data movement made ``node`` of."""
    while node.target in ops.MARKERS.values():
        node = node.args[0]
    return node
