"""Checks of a step that is cut into microbatches or pipeline stages: the graphs together must compute what the joint
graph computed.

A term of the step is what a reduction over time took in the joint graph, and a sum stands for what that gave. So the
graphs agree with the joint graph if each term, each value that graphs hand on, and each output has its fingerprint.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import torch
from torch import fx

from shardc.ir import grammar
from shardc.ir import graph as ir
from shardc.ir.comm_volume import arguments_of, collective_kind, named_axes
from shardc.ir.executable import GATHER, JOIN, KEPT, KNOWN, SUM, TERM, TRANSFER
from shardc.ir.graph import Role, info, placeholders
from shardc.ir.mesh import Mesh
from shardc.verify.identity import digest, fingerprints, of_outputs, same
from shardc.verify.local_graph import Fingerprint

_CAT = torch.ops.aten.cat.default
Graphs = Iterable[tuple[str, fx.Graph]]


def _values(graph: fx.Graph, prints: Mapping[fx.Node, Fingerprint]) -> dict[str, Fingerprint]:
    """Return the fingerprint (hash) of each value of ``graph``: name -> fingerprint."""
    return {info(node).name: prints[node] for node in graph.nodes if node.op != "output"}


def _results(graph: fx.Graph, prints: Mapping[fx.Node, Fingerprint]) -> dict[tuple[str, str], Fingerprint]:
    """Return the fingerprints of the outputs of ``graph``: (kind, name) -> fingerprint."""
    return {(role.kind, role.name): prints[x] for role, x in ir.outputs(graph) if isinstance(x, fx.Node)}


def in_microbatches(
    joint: fx.Graph, bodies: Graphs, once: Graphs, mesh: Mesh, split: Iterable[str | int]
) -> tuple[str, str] | None:
    """Return (graph, reason) for the first fault of the graphs into which a joint graph is cut for microbatches; None
    if they compute its results.

    Args:
        joint: the joint graph, with reductions over the axis of microbatches.
        bodies, once: (name, graph) of the graphs that run for each microbatch, and of those that run once.
        mesh: the mesh, with its axis of microbatches.
        split: names of inputs, and indices of outputs, that each microbatch has its own part of.
    """
    prints = fingerprints(joint)
    by_name = _values(joint, prints)
    results = _results(joint, prints)
    terms: dict[str, Fingerprint] = {}
    for node in joint.nodes:
        if node.op == "call_function" and collective_kind(node) is not None:
            if mesh.time in (named_axes(str(arguments_of(node)["group_name"])) or ()):
                terms[info(node).name] = prints[node.all_input_nodes[0]]
    arguments = {(SUM, name): by_name[name] for name in terms}
    arguments |= {(kind, name): value for kind in (KNOWN, KEPT) for name, value in by_name.items()}
    missing = set(results)
    for name, graph in (*bodies, *once):
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
    """Return whether an argument with ``role`` differs between microbatches. ``split`` has the names of inputs and
    indices of outputs that are split over them.
    """
    if role.kind == "coordinate":
        return any(mesh.overlap(axis, mesh.time) for axis in role.name.split(","))
    return {"input": role.name, "tangent": role.index}.get(role.kind) in split


def closes(
    backward: fx.Graph, closing: fx.Graph, last: fx.Graph, reduce: Mapping[str, str], left: Container[str] = ()
) -> str | None:
    """Check ``last``, the backward of the last microbatch, which also computes what ``closing`` does (gradient
    reductions). Return its first fault as text; None if it computes the right values.

    Its results must be those of ``closing`` on sums of the other microbatches' terms plus the terms of ``backward``.

    Args:
        backward: the backward of any microbatch.
        closing: the graph that closes the step.
        last: the backward of the last microbatch.
        reduce: name of each term -> reduce op, as in `Phases`.
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
    own_results = {
        key: value for key, value in of_outputs(backward, prints).items() if key[0] != TERM or key[1] in left
    }
    expected = of_outputs(closing, fingerprints(closing, arguments=sums)) | own_results
    return same(expected, of_outputs(last, fingerprints(last)))


def opens(forward: fx.Graph, gathers: fx.Graph, first: fx.Graph) -> str | None:
    """Check ``first``, the forward of the first microbatch, which also gathers parameters as the graph ``gathers``
    does. Return its first fault as text; None if it has none.

    Its results must be those of ``forward`` on the parameters that ``gathers`` gathers.
    """
    gathered = of_outputs(gathers, fingerprints(gathers))
    arguments = {(kind, name): value for (kind, name, _), value in gathered.items()}
    expected = of_outputs(forward, fingerprints(forward, arguments=arguments)) | gathered
    return same(expected, of_outputs(first, fingerprints(first)))


def in_stages(whole: fx.Graph, parts: Graphs) -> tuple[str, str] | None:
    """Return (graph, reason) for the first fault of the stage graphs into which ``whole`` is cut; None if they compute
    its results.

    Each result of a part is a result of the whole graph, or a value that it has under this name. Values that a part
    takes from others are those of their names. Together the parts give all results, each once.

    Args:
        whole: joint graph of a microbatch, or the graph that closes a step.
        parts: name and graph of each stage.
    """
    prints = fingerprints(whole)
    values = _values(whole, prints)
    results = _results(whole, prints)
    missing = set(results)
    arguments: dict[tuple[str, str], Fingerprint] = {(TRANSFER, name): value for name, value in values.items()}
    for name, graph in parts:
        now = fingerprints(graph, arguments=arguments)
        for role, x in ir.outputs(graph):
            key = role.kind, role.name
            if not isinstance(x, fx.Node):
                continue
            if key in results and key not in missing:
                return name, f"{role.kind} {role.name} is given by another stage, too"
            missing.discard(key)
            if now[x] != results.get(key, values.get(role.name)):
                return name, f"{role.kind} {role.name} is not the value that it was in one graph"
    return None if not missing else ("the step", f"no stage gives {' '.join(min(missing))}")


def in_time(
    graphs: Sequence[fx.Graph], up: Sequence[Collection[str]], down: Sequence[Collection[str]]
) -> tuple[str, str] | None:
    """Return (stage, reason) for the first value that a stage needs and that does not reach it in time; None if all do.
    Values cross to later stages as ``up`` says, and to earlier ones as ``down`` says.

    A value of an earlier stage comes with the forward, over all boundaries between the two; one of a later stage comes
    with the backward, and no result of the forward depends on it.

    Args:
        graphs: joint graph of each stage.
        up, down: for each stage but the last, names of the values that cross to the next one, and from that to it.
    """
    gives = {(role.kind, role.name): at for at, graph in enumerate(graphs) for role, _ in ir.outputs(graph)}
    for at, graph in enumerate(graphs):
        late: set[fx.Node] = set()
        for node in ir.placeholders(graph, TRANSFER):
            name = ir.role(node).name
            below, above = gives.get((TRANSFER, name), at), gives.get(("grad", name), at)
            if below < at and all(name in crossing for crossing in up[below:at]):
                continue
            if above <= at or not all(name in crossing for crossing in down[at:above]):
                return f"stage {at}", f"takes %{name}, which no stage sends it"
            late.add(node)
        for node in graph.nodes:
            if node.op != "output" and not late.isdisjoint(node.all_input_nodes):
                late.add(node)
        wrong = next((role for role, x in ir.outputs(graph) if role.kind != "grad" and x in late), None)
        if wrong is not None:
            return f"stage {at}", f"gives {wrong.kind} {wrong.name} with the forward, from what comes with the backward"
    return None


def in_two(whole: fx.Graph, first: fx.Graph | None, second: fx.Graph | None) -> str | None:
    """Check that ``first`` and ``second``, the parts of a backward, together compute what the backward ``whole``
    computes. Return a text about the first value that differs; None if all agree.
    """
    saved: dict[str, Fingerprint] = {}
    now: dict[tuple[str, str], Fingerprint] = {}
    for graph in filter(None, (first, second)):
        prints = fingerprints(graph, saved)
        of_results = _results(graph, prints)
        saved |= {name: value for (kind, name), value in of_results.items() if kind == "saved"}
        now |= {key: value for key, value in of_results.items() if key[0] != "saved"}
    prints = fingerprints(whole)
    expected = _results(whole, prints)
    wrong = next((key for key in (*expected, *now) if expected.get(key) != now.get(key)), None)
    return None if wrong is None else f"{' '.join(wrong)} is not the value that it was in one graph"
