"""Faults planted in the graphs of a step in microbatches: the verifier refuses each, and says in which graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

import shardc
from shardc import passes
from shardc.errors import VerifyError
from shardc.ir import graph as ir
from shardc.ir.phases import Phases
from shardc.passes.lower.microbatch import with_closing_last as right_closed
from shardc.step_cut import MicrobatchCut
from tests.microbatches.programs import CASES

right_cut = passes.Microbatch.__call__


def lowered(monkeypatch: pytest.MonkeyPatch, plant: Callable[[Phases], Phases], level: int = 3) -> None:
    """Compiles a program whose joint graph is cut with a fault."""
    monkeypatch.setattr(passes.Microbatch, "__call__", lambda self, gm: plant(right_cut(self, gm)))
    case = CASES["masked"]()
    plan = shardc.fsdp("dp", level=level) | shardc.microbatches(2)
    shardc.compile(case.model, shardc.Mesh(dp=2), plan, loss=case.loss).lower(*case.args).step()


def roles(graph: fx.Graph, change: Callable[[list[ir.Role]], list[ir.Role]]) -> None:
    output = ir.output_node(graph)
    output.meta[ir.ROLES] = tuple(change(list(output.meta[ir.ROLES])))


def swapped(found: list[ir.Role]) -> list[ir.Role]:
    first, second = (at for at, role in enumerate(found) if role.kind == "grad" and "mm" in role.name) and (1, 2)
    found[first], found[second] = found[second], found[first]
    return found


def terms_swapped(phases: Phases) -> Phases:
    roles(phases.body.graph, swapped)
    return phases


def term_of_another_op(phases: Phases) -> Phases:
    output = ir.output_node(phases.body.graph)
    results = list(output.args[0])
    results[0] = results[0].all_input_nodes[0]
    output.args = (tuple(results),)
    return phases


def sum_taken_for_another(phases: Phases) -> Phases:
    first, second, *_ = ir.placeholders(phases.closing.graph, "sum")
    for node, other in ((first, ir.role(second)), (second, ir.role(first))):
        ir.update(node, role=other)
    return phases


def result_lost(phases: Phases) -> Phases:
    output = ir.output_node(phases.closing.graph)
    output.args = (output.args[0][:-1],)
    roles(phases.closing.graph, lambda found: found[:-1])
    return phases


def input_of_a_microbatch_once(phases: Phases) -> Phases:
    (loop,) = phases.openings
    assert loop.body is not None
    graph = ir.copied(loop.body.graph)
    return replace(phases, openings=(replace(loop, once=fx.GraphModule(loop.body, graph)), *phases.openings[1:]))


FAULTS = {
    terms_swapped: "body: grad .* is not the value",
    term_of_another_op: "body: term .* is not the value",
    sum_taken_for_another: "closing: .* is not the value",
    result_lost: "the step: no graph gives",
    input_of_a_microbatch_once: "opened 1",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_cut(plant: Callable[[Phases], Phases], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VerifyError, match=f"(?s)after microbatch.*{FAULTS[plant]}"):
        lowered(monkeypatch, plant)


def test_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered(monkeypatch, lambda phases: phases)


def test_a_term_that_the_last_backward_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(backward: fx.GraphModule, closing: fx.GraphModule, reduce: dict[str, str]) -> fx.GraphModule:
        gm = right_closed(backward, closing, reduce)
        added = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.add.Tensor and _is_sum(node))
        added.replace_all_uses_with(added.args[0])
        gm.graph.erase_node(added)
        return gm

    monkeypatch.setattr("shardc.step_cut.with_closing_last", faulty)
    with pytest.raises(VerifyError, match="after microbatch.*grad .* is not the value that it was"):
        lowered(monkeypatch, lambda phases: phases)


def _is_sum(node: fx.Node) -> bool:
    first = node.args[0]
    return isinstance(first, fx.Node) and first.op == "placeholder" and ir.role(first).kind == "sum"


def test_a_parameter_that_the_first_forward_takes_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(phases: Phases) -> Phases:
        assert phases.gathers is not None
        output = ir.output_node(phases.gathers.graph)
        results = list(output.args[0])
        results[2], results[4] = results[4], results[2]
        output.args = (tuple(results),)
        return phases

    with pytest.raises(VerifyError, match="after microbatch.*gathers: known"):
        lowered(monkeypatch, faulty, level=2)


def test_phases_of_each_level() -> None:
    case = CASES["masked"]()
    phases = {}
    for level in (2, 3):
        plan = shardc.fsdp("dp", level=level) | shardc.microbatches(2)
        program = shardc.compile(case.model, shardc.Mesh(dp=2), plan, loss=case.loss).lower(*case.args)
        assert isinstance(program.cut, MicrobatchCut)
        phases[level] = [half.phase for half, _ in program.runs()]
    opening = ["opening 1", "opening 1", "opened 1"]
    assert phases[3] == [*opening, "forward", "backward", "forward", "last backward"]
    assert phases[2] == [*opening, "first forward", "backward", "forward", "last backward"]
