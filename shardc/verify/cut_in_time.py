"""Checks of a step that is cut into microbatches: its graphs together give what the joint graph gave.

A term of the step is what a reduction over time took in the joint graph, and a sum stands for what that gave. So the
graphs agree with the joint graph if each term, each value that graphs hand on, and each output has its fingerprint.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import fx

from shardc.ir import grammar
from shardc.ir import graph as ir
from shardc.ir.comm_volume import arguments_of, collective_kind, named_axes
from shardc.ir.executable import GATHER, JOIN, KEPT, KNOWN, SUM, TERM
from shardc.ir.graph import Role, info, placeholders
from shardc.ir.mesh import Mesh
from shardc.verify.identity import digest, fingerprints, of_outputs, same
from shardc.verify.local_graph import Fingerprint

_CAT = torch.ops.aten.cat.default
Graphs = Sequence[tuple[str, fx.Graph]]


def in_time(
    joint: fx.Graph, each: Graphs, once: Graphs, mesh: Mesh, split: Iterable[str | int]
) -> tuple[str, str] | None:
    """Return (graph, reason) for the first fault of graphs that a joint graph is cut into, or None.

    Args:
        joint: the joint graph, with reductions over the axis of time.
        each, once: name and graph of those that run for each microbatch, and once.
        mesh: the mesh, with its axis of time.
        split: names of inputs, and indices of outputs, that each microbatch has its own part of.
    """
    prints = fingerprints(joint)
    by_name = {info(node).name: prints[node] for node in joint.nodes if node.op != "output"}
    results = {(role.kind, role.name): prints[x] for role, x in ir.outputs(joint) if isinstance(x, fx.Node)}
    terms: dict[str, Fingerprint] = {}
    for node in joint.nodes:
        if node.op == "call_function" and collective_kind(node) is not None:
            if mesh.time in (named_axes(str(arguments_of(node)["group_name"])) or ()):
                terms[info(node).name] = prints[node.all_input_nodes[0]]
    arguments = {(SUM, name): by_name[name] for name in terms}
    arguments |= {(kind, name): value for kind in (KNOWN, KEPT) for name, value in by_name.items()}
    missing = set(results)
    for name, graph in (*each, *once):
        now = fingerprints(graph, arguments=arguments)
        for role, x in ir.outputs(graph):
            if not isinstance(x, fx.Node):
                continue
            if role.name in terms and role.kind in (TERM, "grad"):
                expected: Fingerprint | None = terms[role.name]
            else:
                expected = by_name.get(role.name) if role.kind in (KNOWN, KEPT) else results.get((role.kind, role.name))
                missing.discard((role.kind, role.name))
            if now[x] != expected:
                return name, f"{role.kind} {role.name} is not the value that it was in one graph"
    for name, graph in once:
        for node in placeholders(graph):
            if _is_own(ir.role(node), mesh, set(split)):
                return name, f"it runs once, and takes {grammar.name_text(info(node).name)} of a microbatch"
    return None if not missing else ("the step", f"no graph gives {' '.join(sorted(missing)[0])}")


def _is_own(role: Role, mesh: Mesh, split: set[str | int]) -> bool:
    """Return whether an argument of ``role`` differs between microbatches."""
    if role.kind == "coordinate":
        return any(mesh.overlap(axis, mesh.time) for axis in role.name.split(","))
    return {"input": role.name, "tangent": role.index}.get(role.kind) in split


def closes(
    backward: fx.Graph, closing: fx.Graph, last: fx.Graph, reduce: Mapping[str, str], left: Container[str] = ()
) -> str | None:
    """Return a description of the first result of the last microbatch's backward that is not that of ``closing`` on the
    sums with its own terms, or None.

    Args:
        left: terms that are results, too.
    """
    prints = fingerprints(backward)
    sums = {}
    for node in placeholders(closing, SUM):
        role = ir.role(node)
        of_others = digest("placeholder", role.kind, role.name, role.index)
        mine: list[object] = [prints[x] for of, x in ir.outputs(backward) if of.kind == TERM and of.name == role.name]
        is_gather = reduce[role.name] == GATHER
        terms: list[object] = [of_others, *mine]
        added: tuple[object, ...] = (_CAT, [terms], []) if is_gather else (JOIN[reduce[role.name]], terms, [])
        sums[SUM, role.name] = digest(*added) if mine else of_others
    own = {key: value for key, value in of_outputs(backward, prints).items() if key[0] != TERM or key[1] in left}
    expected = of_outputs(closing, fingerprints(closing, arguments=sums)) | own
    return same(expected, of_outputs(last, fingerprints(last)))


def opens(forward: fx.Graph, gathers: fx.Graph, first: fx.Graph) -> str | None:
    """Return a description of the first result of the first microbatch's forward that is not that of ``forward`` on the
    parameters that ``gathers`` gathers, or None.
    """
    gathered = of_outputs(gathers, fingerprints(gathers))
    arguments = {(kind, name): value for (kind, name, _), value in gathered.items()}
    expected = of_outputs(forward, fingerprints(forward, arguments=arguments)) | gathered
    return same(expected, of_outputs(first, fingerprints(first)))
