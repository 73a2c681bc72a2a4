"""What crosses between stages, and faults planted in the cut and in the two parts of a backward."""

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
from shardc.ir.executable import GRADIENTS, LAST_BACKWARD, AtStage, Executable, Run, opening
from shardc.ir.phases import Staged
from shardc.passes.lower import stages as cut_in_stages
from tests.pipeline.programs import CASES, blocks

right_cut, right_halves = passes.Stages.__call__, passes.SplitBackward.__call__


def lowered(name: str, stages: int = 2, schedule: str = "1f1b") -> Executable:
    case = CASES[name]()
    plan = shardc.pp("pp", schedule, microbatches=4)
    return shardc.compile(case.model, shardc.Mesh(pp=stages), plan, loss=case.loss).lower(*case.args)


@pytest.mark.parametrize("name", ["decoder", "tied", "experts", "blocks"])
def test_the_residual_alone_crosses(name: str) -> None:
    """One value up and one down at each boundary; of tied weights, a copy and a term of the gradient once a step."""
    program = lowered(name, 4)
    runs = program.stage_runs(True)
    assert [(len(b.up), len(b.down)) for b in runs.boundaries] == [(1, 1)] * 3
    assert [(len(b.up), len(b.down)) for b in program.stage_runs(False).boundaries] == [(1, 0)] * 3
    assert list(runs.copies) == (["embed.weight"] if name == "tied" else [])
    shapes = {x.shape for b in runs.boundaries for x in (*b.up.values(), *b.down.values())}
    assert len(shapes) == 1


def test_skips_are_passed_on() -> None:
    runs = lowered("skips", 2).stage_runs(True)
    (boundary,) = runs.boundaries
    assert len(boundary.up) == 3 and all(len(x.shape) == 4 for x in boundary.up.values())


@pytest.mark.parametrize(("name", "alone"), [("decoder", True), ("tied", False)])
def test_sums_of_the_first_stage_alone_end_with_its_last_backward(name: str, alone: bool) -> None:
    """No graph without outputs is left to run after it; a tied weight's term comes from another stage."""
    case = CASES[name]()
    plan = shardc.pp("pp", "1f1b", microbatches=4) | shardc.fsdp("dp")
    program = shardc.compile(case.model, shardc.Mesh(pp=2, dp=2), plan, loss=case.loss).lower(*case.args)
    assert program.find(AtStage(LAST_BACKWARD, 0)) is not None
    assert (program.find(AtStage(GRADIENTS, 0)) is None) is alone


def test_phases_of_each_schedule() -> None:
    names = {schedule: {str(half) for half in _phases(schedule)} for schedule in ("1f1b", "zb")}
    assert "backward of stage 1" in names["1f1b"]
    assert {"backward of inputs of stage 1", "backward of weights of stage 1"} <= names["zb"]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_values_of_a_loop_before_the_forward_are_freed_in_it(schedule: str) -> None:
    program = lowered("balanced experts", 2, schedule)
    for rank in range(2):
        live: set[tuple[str, object, int]] = set()
        loops = 0
        for action, done in zip(program.actions(rank), program.last_uses(rank), strict=True):
            if isinstance(action, Run):
                gives = {("transfer", x.name, action.microbatch) for x in action.half.gives if x.kind == "transfer"}
            else:
                gives = {key for key in action.keys if action.target == rank and key[0] == "transfer"}
            assert not gives & live
            live = (live | gives) - done
            if isinstance(action, Run) and action.half.phase == opening(0)[1]:
                loops += 1
                assert not live, f"rank {rank} keeps {live} behind the loop"
        assert loops == 1 and not live


def _phases(schedule: str) -> list[object]:
    return [half.phase for half in lowered("blocks", 2, schedule).step() if isinstance(half.phase, AtStage)]


def planted(monkeypatch: pytest.MonkeyPatch, plant: Callable[[Staged], Staged], name: str = "blocks") -> None:
    monkeypatch.setattr(passes.Stages, "__call__", lambda self, parts: plant(right_cut(self, parts)))
    lowered(name).step()


def results(graph: fx.Graph, change: Callable[[list[fx.Node], list[ir.Role]], None]) -> None:
    output = ir.output_node(graph)
    values, roles = list(output.args[0]), list(output.meta[ir.ROLES])
    change(values, roles)
    output.args, output.meta[ir.ROLES] = (tuple(values),), tuple(roles)


def result_dropped(staged: Staged) -> Staged:
    results(staged.bodies[1].graph, lambda values, roles: (values.pop(0), roles.pop(0)))
    return staged


def swapped(kind: str) -> Callable[[Staged], Staged]:
    def swap(values: list[fx.Node], roles: list[ir.Role]) -> None:
        first, second = [at for at, role in enumerate(roles) if role.kind == kind][:2]
        values[first], values[second] = values[second], values[first]

    def plant(staged: Staged) -> Staged:
        results(staged.bodies[0].graph, swap)
        return staged

    return plant


gradients_swapped = swapped("grad")
gradients_swapped.__name__ = "gradients_swapped"


def transfer_of_another_op(staged: Staged) -> Staged:
    def take_operand(values: list[fx.Node], roles: list[ir.Role]) -> None:
        at = next(at for at, role in enumerate(roles) if role.kind == "transfer")
        values[at] = values[at].all_input_nodes[0]

    results(staged.bodies[0].graph, take_operand)
    return staged


def transfer_not_sent(staged: Staged) -> Staged:
    def drop(values: list[fx.Node], roles: list[ir.Role]) -> None:
        at = next(at for at, role in enumerate(roles) if role.kind == "transfer")
        del values[at], roles[at]

    results(staged.bodies[0].graph, drop)
    return staged


def result_of_two_stages(staged: Staged) -> Staged:
    return replace(staged, bodies=(staged.bodies[0], staged.bodies[0]))


def gradient_not_closed(staged: Staged) -> Staged:
    results(staged.closings[0].graph, lambda values, roles: (values.pop(), roles.pop()))
    return staged


def op_changed(staged: Staged) -> Staged:
    graph = staged.bodies[1].graph
    node = next(node for node in graph.nodes if node.target is torch.ops.aten.tanh.default)
    node.target = torch.ops.aten.sigmoid.default
    return staged


def crossing_left_out(staged: Staged) -> Staged:
    return replace(staged, up=((),))


FAULTS = {
    result_dropped: "no graph gives",
    gradients_swapped: "stage 0: grad .* is not the value",
    transfer_of_another_op: "stage 0: transfer .* is not the value",
    transfer_not_sent: "stage 1: takes %.*, which no stage sends it",
    result_of_two_stages: "is given by another stage, too",
    gradient_not_closed: "no graph gives",
    op_changed: "stage 1: .* is not the value",
    crossing_left_out: "stage 1: takes %.*, which no stage sends it",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_faults_in_the_cut(plant: Callable[[Staged], Staged], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VerifyError, match=f"(?s)after stages.*{FAULTS[plant]}"):
        planted(monkeypatch, plant)


def test_transfers_that_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VerifyError, match="(?s)after stages.*stage 0: transfer .* is not the value"):
        planted(monkeypatch, swapped("transfer"), "skips")


def test_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda staged: staged)


@pytest.mark.parametrize("shift", [1, -1])
def test_an_op_of_another_stage(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It then needs a value that comes too late, or gives one too late."""
    right = cut_in_stages._Assignment.__post_init__

    def moved(self: cut_in_stages._Assignment) -> None:
        right(self)
        tanhs = [x for x in self.graph.nodes if x.target is torch.ops.aten.tanh.default]
        node = next(x for x in tanhs if self.stage[x] == (0 if shift == 1 else 1))
        self.stage[node] += shift

    monkeypatch.setattr(cut_in_stages._Assignment, "__post_init__", moved)
    with pytest.raises(VerifyError, match="(?s)after stages.*with the forward, from what comes with the backward"):
        lowered("blocks").step()


def counts(on: str, op: object) -> list[int]:
    """How often ``op`` runs in each graph of a stage whose backward is in two: forward, for inputs, for weights."""
    case, plan = blocks(), shardc.pp("pp", "zb", microbatches=4) | shardc.save("blocks.*", on=on)
    program = shardc.compile(case.model, shardc.Mesh(pp=2), plan, loss=case.loss, backend="eager").lower(*case.args)
    halves = {str(half.phase): half for half in program.step()}
    names = ("forward", "backward of inputs", "backward of weights")
    graphs = [halves[f"{name} of stage 2"].graph for name in names]
    return [sum(node.target is op for node in graph.nodes) for graph in graphs]


def test_a_backward_in_two_computes_a_value_again_once() -> None:
    assert counts("recompute", torch.ops.aten.tanh.default) == [1, 1, 0]


def test_a_backward_in_two_gets_a_value_from_the_host_in_each_part() -> None:
    """On the device it would wait for the second part: of up to 2n - 1 microbatches on the last of n ranks."""
    assert counts("host", torch.ops.shardc.to_host.default) == [1, 0, 0]
    assert counts("host", torch.ops.shardc.to_device.default) == [0, 1, 1]


def halves_planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[fx.Graph, fx.Graph], None]) -> None:
    def halves(self: passes.SplitBackward, gm: fx.GraphModule) -> tuple[fx.GraphModule | None, fx.GraphModule | None]:
        inputs, weights = right_halves(self, gm)
        if inputs is not None and weights is not None:
            change(inputs.graph, weights.graph)
        return inputs, weights

    monkeypatch.setattr(passes.SplitBackward, "__call__", halves)
    with pytest.raises(VerifyError, match="(?s)after split_backward.*is not the value that it was in one graph"):
        lowered("blocks", schedule="zb").step()


def test_a_gradient_that_two_backwards_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    halves_planted(monkeypatch, lambda _, weights: results(weights, lambda x, roles: (x.pop(), roles.pop())))


def test_saved_values_that_two_backwards_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(values: list[fx.Node], roles: list[ir.Role]) -> None:
        saved = [at for at, role in enumerate(roles) if role.kind == "saved"]
        values[saved[0]], values[saved[-1]] = values[saved[-1]], values[saved[0]]

    halves_planted(monkeypatch, lambda inputs, _: results(inputs, swap))


def test_a_result_of_both_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_operand(values: list[fx.Node], roles: list[ir.Role]) -> None:
        values[0] = values[0].all_input_nodes[0]

    halves_planted(monkeypatch, lambda inputs, _: results(inputs, take_operand))


def test_blocks_have_their_stage() -> None:
    case = blocks()
    module = shardc.compile(case.model, shardc.Mesh(pp=2), shardc.pp("pp", microbatches=2), loss=case.loss)
    stages = module.lower(*case.args).cut.stages
    assert stages.owners["first.weight"] == 0 and stages.owners["last.weight"] == 1
    assert stages.of_module("blocks.0.1") == 0 and stages.of_module("blocks.3.1") == 1
