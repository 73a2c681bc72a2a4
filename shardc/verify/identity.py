"""Check of passes that only move data: the program computes the same values, compared by fingerprints.

The fingerprint of a placeholder is its role; that of an op is its target, its constants and the fingerprints of its
operands. Data movement (collectives, slices, pads, reshards) keeps the fingerprint of its operand. So an op on a wrong
operand, though of the right type, has a fingerprint that did not exist before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from operator import getitem

from torch import fx

from shardc.ir import grammar, ops
from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import arguments_of, collective_kind
from shardc.ir.graph import Role, info, output_node, outputs
from shardc.verify.local_graph import Collective, Fingerprint, Fingerprints

Computed = dict[tuple[str, str, int], Fingerprint]  # fingerprints by an output's kind, name and index


@dataclass(frozen=True)
class ProgramFingerprints:
    """Fingerprints (hashes of what is computed) of a graph: of all its ``values``, and of its outputs (``results``)."""

    values: frozenset[Fingerprint]
    results: Computed


def program_fingerprints(gm: fx.GraphModule, prints: Fingerprints | None = None) -> ProgramFingerprints:
    """Return the fingerprints of the values and of the outputs of ``gm``, a graph at global shapes. ``prints`` is the
    result of `fingerprints`, if that was called already.
    """
    prints = prints or fingerprints(gm.graph)
    return ProgramFingerprints(frozenset(prints.values()), of_outputs(gm.graph, prints))


def changed(before: ProgramFingerprints, gm: fx.GraphModule, prints: Fingerprints) -> tuple[fx.Node, str] | None:
    """Return (first node of ``gm`` whose value the program ``before`` did not compute, reason); None if there is none.
    ``prints`` are the fingerprints of ``gm``.
    """
    for node in gm.graph.nodes:
        if node.op != "output" and prints[node] not in before.values:
            operands = ", ".join(dict.fromkeys(grammar.name_text(info(_moved(x)).name) for x in node.all_input_nodes))
            return node, f"no op took {operands or 'these arguments'} this way before the pass"
    other = same(before.results, of_outputs(gm.graph, prints))
    return None if other is None else (output_node(gm.graph), other)


def computed(graph: fx.Graph, saved: Mapping[str, Fingerprint] | None = None) -> Computed:
    """Return the fingerprint (hash) of each output of ``graph``: (kind, name, index) -> fingerprint. ``saved`` has the
    fingerprints of values that forward saves, by name.
    """
    return of_outputs(graph, fingerprints(graph, saved))


def of_outputs(graph: fx.Graph, prints: Fingerprints) -> Computed:
    """Return the fingerprint of each output of ``graph``: (kind, name, index) -> fingerprint. ``prints`` has the
    fingerprints of its nodes.
    """
    return {
        (role.kind, role.name, role.index): prints[node] for role, node in outputs(graph) if isinstance(node, fx.Node)
    }


def same(before: Computed, now: Computed) -> str | None:
    """Return a description of the first output that differs between two graphs, given the fingerprints of their
    outputs; None if all are equal.
    """
    for role in [*before, *(role for role in now if role not in before)]:
        if before.get(role) != now.get(role):
            kind, name, _ = role
            return f"{kind} {name} is {'gone' if role not in now else 'not the value that it was'}"
    return None


def fingerprints(
    graph: fx.Graph,
    saved: Mapping[str, Fingerprint] | None = None,
    replaced: Mapping[str, Collective] | None = None,
    arguments: Mapping[tuple[str, str], Fingerprint] | None = None,
) -> dict[fx.Node, Fingerprint]:
    """Return node -> fingerprint (hash of what it computes) of all nodes but the output; of a coalesced collective, a
    list.

    Data movement at global shapes keeps the fingerprint. A local collective's fingerprint depends on its operands only:
    bucketing, transport and waits do not change it.

    Args:
        saved: as in `computed`.
        replaced: result name -> collective that other ops may implement; such a result keeps its fingerprint.
        arguments: (kind, name) of an argument -> its fingerprint.
    """
    out: dict[fx.Node, Fingerprint] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            role = info(node).role or Role("", info(node).name)
            fresh: Fingerprint = digest("placeholder", role.kind, role.name, role.index)
            of_saved = (saved or {}).get(role.name, fresh) if role.kind == "saved" else fresh
            out[node] = (arguments or {}).get((role.kind, role.name), of_saved)
        elif node.op == "get_attr":
            out[node] = digest("constant", node.target)
        elif node.op == "call_function":
            out[node] = _fingerprint(node, out)
            old = replaced.get(info(node).name) if replaced else None
            if old is not None and old.value != out[node] and old.is_implemented_by(node, out):
                out[node] = old.value
    return out


def reimplemented(graph: fx.Graph, prints: Fingerprints, replaced: Mapping[str, Collective]) -> dict[str, Collective]:
    """Return those collectives of ``replaced`` (result name -> collective) whose result ``graph`` computes by other
    ops.
    """
    named = {info(node).name: node for node in graph.nodes if node.op == "call_function"}
    present = {name: old for name, old in replaced.items() if name in named}
    return {name: old for name, old in present.items() if _fingerprint(named[name], prints) != old.value}


def _fingerprint(node: fx.Node, prints: Fingerprints) -> Fingerprint:
    """Return the fingerprint (hash) of what an op computes, from the fingerprints ``prints`` of its operands; of a
    coalesced collective, a list with one for each tensor.
    """
    if node.target is WAIT or node.target in ops.MARKERS.values():
        return prints[node.args[0]]
    if node.target is getitem and isinstance(several := prints[node.args[0]], list):
        return several[node.args[1]]
    if (kind := collective_kind(node)) is None:
        return digest(
            node.target, with_fingerprints(node.args, prints), with_fingerprints(sorted(node.kwargs.items()), prints)
        )
    (_, operand), *rest = arguments_of(node).items()
    attributes = [(name, value) for name, value in rest if name not in ("slots", "group_size")]
    if isinstance(operand, list | tuple):
        return [digest(kind, prints[x], with_fingerprints(attributes, prints)) for x in operand]
    return digest(kind, prints[operand], with_fingerprints(attributes, prints))


def with_fingerprints(argument: fx.node.Argument, prints: Fingerprints) -> object:
    """Return ``argument``, an argument of a node, with fingerprints in place of the nodes in it."""
    if isinstance(argument, fx.Node):
        return prints[argument]
    return [with_fingerprints(part, prints) for part in argument] if isinstance(argument, list | tuple) else argument


def digest(*parts: object) -> bytes:
    """Return a fingerprint of ``parts``: 16 bytes of the hash of their repr."""
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def _moved(node: fx.Node) -> fx.Node:
    """Return the value that ``node`` has before data movement (reshards, tags, padding) at global shapes; ``node``
    itself if it is no data movement.
    """
    while node.target in ops.MARKERS.values():
        node = node.args[0]
    return node
