"""The search knows pipeline stages: parts priced on a few blocks, cuts that are played, plans that compile as found."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import shardc
from examples.models import llama
from shardc.cost.hardware import H100
from shardc.ir.mesh import Mesh
from shardc.ir.schedules import Kind, clock, schedule
from shardc.plan.expression import parse_plan
from shardc.report.stage_schedule import PipelineSchedule
from shardc.search.captured_model import CapturedModel, ModelCall
from shardc.search.meshes import with_stages
from shardc.search.result import SearchResult
from shardc.search.stage_cost import Part, Player, parts_of
from tests.pipeline.programs import Blocks

OPTIONS = shardc.Options(bucket_size=H100)


def model(layers: int = 6) -> nn.Module:
    with torch.device("meta"):
        return Blocks(layers=layers, dim=1024)


X, Y = torch.empty(4096, 1024, device="meta"), torch.empty(4096, 4, device="meta")
PP = shardc.pp("pp", schedule="zbv", microbatches=4)
MESH = Mesh(pp=2, dp=2)


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return shardc.find_plan(model(), MESH, X, Y, loss=mse_loss, plan=PP)


def test_the_cut_of_a_given_pipeline_is_found(found: SearchResult) -> None:
    entry = found.plan.setting("pp")
    assert entry.schedule == "zbv" and len(entry.cut) == 3 and isinstance(found.schedule, PipelineSchedule)
    assert found.mesh == MESH and "dp" in found.plan.axes


def test_a_found_pipeline_compiles_from_its_text_as_predicted(found: SearchResult) -> None:
    plan = parse_plan(str(found.plan))
    assert plan == found.plan
    again = shardc.compile(model(), MESH, plan, loss=mse_loss, options=OPTIONS).lower(X, Y).schedule("h100")
    assert again.seconds == found.schedule.seconds and again.peak == found.memory


def test_it_is_no_slower_than_the_cut_by_weights(found: SearchResult) -> None:
    rest = shardc.Plan.of(entry for entry in found.plan.entries if entry.key != ("pp",))
    plain = shardc.compile(model(), MESH, rest | PP, loss=mse_loss, options=OPTIONS).lower(X, Y)
    assert found.schedule.seconds <= plain.schedule("h100").seconds


@pytest.mark.parametrize(
    "stored", [shardc.fsdp("dp", level=2), shardc.ddp("dp")], ids=["gathered once", "not gathered"]
)
def test_estimates_are_near_the_schedules(stored: shardc.Plan) -> None:
    """Where nothing is gathered once, the first microbatch runs the forward of the others."""
    config = llama.LlamaConfig(vocab=1024, dim=512, layers=6, heads=4, kv_heads=4, hidden=2048)
    llama6, args = llama.build(config, "meta", size=16, length=512, targets=True)
    source = ModelCall(llama6.train(), args, {}, llama.loss, torch.device("cpu"))
    mesh, options = Mesh(dp=2), shardc.Options(cost=H100, bucket_size=H100, verify=False)
    captured_model = CapturedModel.of(source, shardc.Plan(), mesh)
    assert captured_model.repeats, "six blocks are captured as four"
    plan = stored | shardc.microbatches(4)
    few = captured_model.program(mesh, plan, options, few=True)
    whole = captured_model.program(mesh, plan, options).schedule(H100)
    estimate = captured_model.estimate(few.schedule(H100))
    assert estimate.seconds == pytest.approx(whole.seconds, rel=0.05)
    assert estimate.memory == pytest.approx(whole.peak, rel=0.05)
    assert captured_model.floor(H100) / 2 <= whole.seconds
    parts = parts_of(captured_model, few, H100)
    forward = captured_model.floor(H100, "forward")
    assert 0 < forward < captured_model.floor(H100) == pytest.approx(forward + captured_model.floor(H100, "backward"))
    assert forward / 2 / 4 <= sum(x.seconds[Kind.FORWARD] for x in parts), (
        "no schedule runs a microbatch's forward faster"
    )
    inside = ("attn_norm", "attn", "mlp_norm", "mlp")
    assert [x.name for x in parts] == ["embed", *(f"layers.{k}.{c}" for k in range(6) for c in inside), "norm", "head"]
    total = sum(4 * x.total + x.before + x.behind for x in parts)
    assert total == pytest.approx(whole.seconds, rel=0.05)
    memory = sum(x.lasting + x.saved for x in parts)
    assert memory <= whole.peak


def part(name: str, forward: float, size: int = 0) -> Part:
    seconds = {
        Kind.FORWARD: forward, Kind.BACKWARD: 2 * forward, Kind.BACKWARD_INPUT: forward, Kind.BACKWARD_WEIGHT: forward,
    }  # fmt: skip
    return Part(name, seconds, lasting=size)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_a_play_is_that_of_the_clock(name: str) -> None:
    order = schedule(name, 2, 4)
    parts = [part(f"blocks.{at}", at + 1.0) for at in range(6)]
    player = Player(order, parts, (0.25, 0.0), 1.0)
    starts = (0, 3) if order.stages == 2 else (0, 2, 3, 5)
    ends = (*starts, 6)
    stages = [parts[a:b] for a, b in pairwise(ends)]
    times = clock(order, lambda kind, at: sum(x.seconds[kind] for x in stages[at]), lambda *_: 0.25)
    assert player.play(starts).seconds == pytest.approx(times.seconds, rel=1e-12)


def test_the_cut_is_where_the_step_is_fastest_and_fits() -> None:
    """A last part that takes as long as two blocks, as a head with its loss."""
    parts = [*(part(f"{at}", 1.0, 10) for at in range(6)), part("6", 2.0, 10)]
    order = schedule("1f1b", 2, 8)
    fastest = Player(order, parts, (0.0, 0.0), 1e9).fastest()
    assert fastest is not None and fastest.starts == (0, 4)
    small = Player(order, parts, (0.0, 0.0), 40.0).fastest()
    assert small is not None and small.memory == 40 and small.starts in ((0, 3), (0, 4))
    assert min(Player(order, parts, (0.0, 0.0), 1e9).play((0, at)).seconds for at in range(1, 7)) == fastest.seconds


def test_meshes_have_stages_in_front() -> None:
    assert list(with_stages(8, 8, 4, axes=1)) == [Mesh(pp=2, dp=4), Mesh(pp=4, dp=2)]


def test_an_axis_of_that_name_is_any_axis_without_an_entry_of_stages() -> None:
    args: dict[str, Any] = {"loss": mse_loss, "plan": shardc.fsdp("pp")}
    assert str(shardc.find_plan(model(2), Mesh(pp=2), X, Y, **args).plan).startswith('fsdp("pp"')
    found = shardc.find_plan(model(2), 2, X, Y, axes=1, **args)
    assert found.mesh == Mesh(pp=2) and found.plan.setting("pp") is None


def test_the_axis_of_stages_has_the_name_in_the_plan() -> None:
    plan = shardc.pp("stage", microbatches=4)
    assert shardc.find_plan(model(2), 2, X, Y, loss=mse_loss, plan=plan, axes=1).mesh == Mesh(stage=2, dp=1)


def test_what_cannot_be_faster_is_left_out_by_its_bound() -> None:
    found = shardc.find_plan(model(), 2, X, Y, loss=mse_loss, axes=1)
    assert found.mesh == Mesh(dp=2), "a pipeline of two ranks has a bubble"
    played = [trial for trial in found.trials if "pp" in trial.mesh]
    assert played or found.left_out
    assert all("no layout takes less than" in text or "no plan takes less than" in text for text in found.left_out)
    best = found.schedule.seconds
    assert all(trial.seconds > best for trial in played)
