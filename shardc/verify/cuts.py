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
Graphs = Sequence[tuple[str, fx.Graph]]
ByRole = dict[tuple[str, str], Fingerprint]  # fingerprints of arguments or outputs, by kind and name


def _values(graph: fx.Graph, prints: Mapping[fx.Node, Fingerprint]) -> dict[str, Fingerprint]:
    """Return the fingerprint (hash) of each value of ``graph``: name -> fingerprint."""
    return {info(node).name: prints[node] for node in graph.nodes if node.op != "output"}


def _results(graph: fx.Graph, prints: Mapping[fx.Node, Fingerprint]) -> ByRole:
    """Return the fingerprints of the outputs of ``graph``: (kind, name) -> fingerprint."""
    return {(role.kind, role.name): prints[x] for role, x in ir.outputs(graph) if isinstance(x, fx.Node)}


def in_microbatches(
    joint: fx.Graph, bodies: Graphs, once: Graphs, mesh: Mesh, split: Iterable[str | int]
) -> str | None:
    """Return the first fault, as text, of the graphs into which a joint graph is cut for microbatches; None if they
    compute its results.

    Args:
        joint: the joint graph, with reductions over the axis of microbatches.
        bodies, once: (name, graph) of the graphs that run for each microbatch, and of those that run once.
        mesh: the mesh, with its axis of microbatches.
        split: names of inputs, and indices of outputs, that each microbatch has its own part of.
    """
    prints = fingerprints(joint)
    by_name, results = _values(joint, prints), _results(joint, prints)
    terms: dict[str, Fingerprint] = {}
    for node in joint.nodes:
        if node.op == "call_function" and collective_kind(node) is not None:
            if mesh.time in (named_axes(str(arguments_of(node)["group_name"])) or ()):
                terms[info(node).name] = prints[node.all_input_nodes[0]]
    handed_on = {(kind, name): value for kind in (KNOWN, KEPT) for name, value in by_name.items()}
    expected = results | handed_on | {(kind, name): x for kind in (TERM, "grad") for name, x in terms.items()}
    arguments = handed_on | {(SUM, name): by_name[name] for name in terms}
    fault = _fault_of_parts((*bodies, *once), results, expected, arguments)
    for name, graph in once if fault is None else ():
        for node in placeholders(graph):
            if _is_own(ir.role(node), mesh, set(split)):
                return f"{name}: it runs once, and takes {grammar.name_text(info(node).name)} of a microbatch"
    return fault


def _fault_of_parts(
    parts: Graphs, results: ByRole, expected: ByRole, arguments: ByRole, each_once: bool = False
) -> str | None:
    """Return the first fault, as text, of the graphs into which a graph is cut; None if they compute its results.

    Args:
        parts: name and graph of each part.
        results: fingerprints of the results of the graph that is cut.
        expected: fingerprints that outputs of the parts must have.
        arguments: fingerprints of the parts' arguments.
        each_once: whether two parts may not give one result.
    """
    missing = set(results)
    for name, graph in parts:
        prints = fingerprints(graph, arguments=arguments)
        for role, x in ir.outputs(graph):
            key = role.kind, role.name
            if not isinstance(x, fx.Node):
                continue
            if each_once and key in results and key not in missing:
                return f"{name}: {' '.join(key)} is given by another stage, too"
            missing.discard(key)
            if prints[x] != expected.get(key):
                return f"{name}: {' '.join(key)} is not the value that it was in one graph"
    return f"the step: no graph gives {' '.join(min(missing))}" if missing else None


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
    results = _results(backward, prints)
    sums: ByRole = {}
    for role in map(ir.role, placeholders(closing, SUM)):
        total = digest("placeholder", role.kind, role.name, role.index)  # of the other microbatches
        if (term := results.get((TERM, role.name))) is not None:
            terms = [total, term]
            is_gather = reduce[role.name] == GATHER
            total = digest(_CAT, [terms], []) if is_gather else digest(JOIN[reduce[role.name]], terms, [])
        sums[SUM, role.name] = total
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


def in_stages(whole: fx.Graph, stages: Sequence[fx.Graph]) -> str | None:
    """Return the first fault, as text, of the stage graphs into which ``whole`` is cut; None if they compute its
    results.

    Each result of a stage is a result of the whole graph, or a value that it has under this name. Values that a stage
    takes from others are those of their names. Together the stages give all results, each once.

    Args:
        whole: joint graph of a microbatch, or the graph that closes a step.
    """
    prints = fingerprints(whole)
    results = _results(whole, prints)
    crossing = {(kind, name): value for kind in (TRANSFER, "grad") for name, value in _values(whole, prints).items()}
    parts = [(f"stage {at}", graph) for at, graph in enumerate(stages)]
    return _fault_of_parts(parts, results, crossing | results, crossing, each_once=True)


def in_time(graphs: Sequence[fx.Graph], up: Sequence[Collection[str]], down: Sequence[Collection[str]]) -> str | None:
    """Return a text about the first value that a stage needs and that does not reach it in time; None if all do. Values
    cross to later stages as ``up`` says, and to earlier ones as ``down`` says.

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
                return f"stage {at}: takes %{name}, which no stage sends it"
            late.add(node)
        for node in graph.nodes:
            if node.op != "output" and not late.isdisjoint(node.all_input_nodes):
                late.add(node)
        wrong = next((role for role, x in ir.outputs(graph) if role.kind != "grad" and x in late), None)
        if wrong is not None:
            return f"stage {at}: gives {wrong.kind} {wrong.name} with the forward, from what comes with the backward"
    return None


def in_two(whole: fx.Graph, first: fx.Graph | None, second: fx.Graph | None) -> str | None:
    """Check that ``first`` and ``second``, the parts of a backward, together compute what the backward ``whole``
    computes. Return a text about the first value that differs; None if all agree.
    """
    saved: dict[str, Fingerprint] = {}
    now: ByRole = {}
    for graph in filter(None, (first, second)):
        prints = fingerprints(graph, saved)
        of_results = _results(graph, prints)
        saved |= {name: value for (kind, name), value in of_results.items() if kind == "saved"}
        now |= {key: value for key, value in of_results.items() if key[0] != "saved"}
    expected = _results(whole, fingerprints(whole))
    wrong = next((key for key in (*expected, *now) if expected.get(key) != now.get(key)), None)
    return None if wrong is None else f"{' '.join(wrong)} is not the value that it was in one graph"
