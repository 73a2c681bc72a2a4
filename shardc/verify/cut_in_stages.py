"""Checks of a step that is cut into the stages of a pipeline: together they give what the uncut graphs gave."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import fx

from shardc.ir import graph as ir
from shardc.ir.executable import TRANSFER
from shardc.ir.graph import info
from shardc.verify.identity import fingerprints
from shardc.verify.local_graph import Fingerprint

Graphs = Iterable[tuple[str, fx.Graph]]


def in_stages(whole: fx.Graph, parts: Graphs) -> tuple[str, str] | None:
    """Return (graph, reason) for the first fault of graphs that ``whole`` is cut into, or None.

    Each result of a part is a result of the whole graph, or a value that it has under this name. Values that a part
    takes from others are those of their names. Together the parts give all results, each once.

    Args:
        whole: joint graph of a microbatch, or the graph that closes a step.
        parts: name and graph of each stage.
    """
    prints = fingerprints(whole)
    values = {info(node).name: prints[node] for node in whole.nodes if node.op != "output"}
    results = {(role.kind, role.name): prints[x] for role, x in ir.outputs(whole) if isinstance(x, fx.Node)}
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
    """Return (stage, reason) for the first value that a stage takes and that does not reach it in time, or None.

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
    """Return what is wrong with two graphs that a backward is cut into, or None."""
    saved: dict[str, Fingerprint] = {}
    now: dict[tuple[str, str], Fingerprint] = {}
    for graph in filter(None, (first, second)):
        prints = fingerprints(graph, saved)
        of_results = {(role.kind, role.name): prints[x] for role, x in ir.outputs(graph) if isinstance(x, fx.Node)}
        saved |= {name: value for (kind, name), value in of_results.items() if kind == "saved"}
        now |= {key: value for key, value in of_results.items() if key[0] != "saved"}
    prints = fingerprints(whole)
    expected = {(role.kind, role.name): prints[x] for role, x in ir.outputs(whole) if isinstance(x, fx.Node)}
    wrong = next((key for key in (*expected, *now) if expected.get(key) != now.get(key)), None)
    return None if wrong is None else f"{' '.join(wrong)} is not the value that it was in one graph"
