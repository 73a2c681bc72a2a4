"""The predicted step of a program with pipeline stages: its text, sums over stages, memory, and what is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.__main__ import main
from shardc.debug.explain_layout import explain
from shardc.errors import PlanError
from shardc.ir.schedules import COMPUTATIONS
from shardc.report.stage_schedule import PipelineSchedule
from tests import golden

WIDTH, BLOCKS, BATCH, MICROBATCHES = 512, 4, 8192, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(plan: shardc.Plan, mesh: shardc.Mesh, with_loss: bool = True) -> shardc.Program:
    with torch.device("meta"):
        model, args = Model(), (torch.empty(BATCH, WIDTH), torch.empty(BATCH, WIDTH))
    loss = F.mse_loss if with_loss else None
    return shardc.compile(model, mesh, plan, loss=loss).lower(*args[: 1 + with_loss])


@cache
def program(name: str = "1f1b", level: int = 3, with_loss: bool = True) -> shardc.Program:
    plan = shardc.fsdp("dp", level=level) | shardc.pp("pp", schedule=name, microbatches=MICROBATCHES)
    return compiled(plan, shardc.Mesh(dp=2, pp=2), with_loss)


@cache
def schedule(name: str = "1f1b", level: int = 3, with_loss: bool = True) -> PipelineSchedule:
    predicted = program(name, level, with_loss).schedule("h100")
    assert isinstance(predicted, PipelineSchedule)
    return predicted


@cache
def without_stages(level: int = 3) -> shardc.Schedule:
    return compiled(shardc.fsdp("dp", level=level) | shardc.microbatches(MICROBATCHES), shardc.Mesh(dp=2)).schedule()


def flops(predicted: PipelineSchedule) -> int:
    """Operations of the ranks of all stages."""
    total = 0
    for stage, counts in predicted.by_stage:
        for run in stage.runs:
            at = sum(begin <= run.kernel.ops[0] for begin in stage.step.begins) - 1
            total += counts[at] * run.kernel.flops
    return total


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_table(name: str) -> None:
    golden.check(schedule(name).table(5), f"report/stages_{name}")


@pytest.mark.parametrize(("name", "level"), [("1f1b", 3), ("1f1b", 2), ("zbv", 3), ("interleaved", 3)])
def test_all_stages_together_do_the_work_of_a_program_without_stages(name: str, level: int) -> None:
    predicted, whole = schedule(name, level), without_stages(level)
    assert flops(predicted) == whole.flops
    assert sum(rank.parameters for rank in predicted.ranks) == whole.memory.by_owner()["parameters"]
    gathers = [row for rows in predicted.by_node.values() for row in rows if row.kind == "all_gather"]
    assert sum(row.wire for row in gathers) == sum(row.wire for row in whole.collectives if row.kind == "all_gather")
    assert predicted.useful_flops == pytest.approx(whole.useful_flops / 2)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zbv"])
def test_a_rank_runs_its_kernels_in_its_spans(name: str) -> None:
    predicted = schedule(name)
    spans = [(s, e) for x, s, e in predicted.timeline.spans[predicted.rank] if x.kind in COMPUTATIONS]
    spans += predicted.timeline.once[predicted.rank]
    assert all(any(s - 1e-9 <= x.start and x.end <= e + 1e-7 for s, e in spans) for x in predicted.runs)
    assert predicted.ranks[predicted.rank].busy == max(predicted.timeline.busy)
    assert predicted.compute_seconds < predicted.ranks[predicted.rank].busy


def test_memory_follows_the_microbatches_in_flight() -> None:
    """Rank 0 keeps two microbatches under 1F1B and four under GPipe, which has fewer gradients then."""
    few, many = schedule("1f1b"), schedule("gpipe")
    assert [(few.ranks[0].in_flight, many.ranks[0].in_flight), few.ranks[1].in_flight] == [(2, 4), 1]
    more, saved = many.ranks[0].peak - few.ranks[0].peak, few.stages[0].saved
    assert saved < more <= 2 * saved


def test_saved_bytes_are_the_inputs_of_the_products() -> None:
    # Of each block its input, which for the first is the batch, and the activations behind relu; the loss's difference.
    rows, inner = BATCH // MICROBATCHES // 2, 2 * 2 * WIDTH
    assert [stage.saved for stage in schedule().stages] == [4 * rows * (WIDTH + inner), 4 * rows * (3 * WIDTH + inner)]


def test_what_is_gathered_for_all_microbatches_runs_once() -> None:
    once, each = schedule("1f1b", 2), schedule("1f1b", 3)
    first, second = once.stages
    assert first.seconds["first"] > first.seconds["forward"] < each.stages[0].seconds["forward"]
    assert second.seconds["forward"] < each.stages[1].seconds["forward"] and "first" not in second.seconds
    assert sum(row.kind == "all_gather" for row in once.collectives) < MICROBATCHES


def test_a_call_without_a_loss_runs_forwards_first() -> None:
    predicted = schedule(with_loss=False)
    assert predicted.call > 0 and predicted.seconds == predicted.call + predicted.timeline.seconds
    assert "the model returns no loss, so forward runs in the call" in predicted.table()


def test_messages_take_the_link_of_the_axis() -> None:
    plan = shardc.fsdp("dp") | shardc.pp("pp", microbatches=MICROBATCHES)
    inside = schedule().stages[0].up
    across = compiled(plan, shardc.Mesh(pp=2, dp=8)).schedule("h100")
    assert isinstance(across, PipelineSchedule)
    # A quarter of the rows, on a slower link.
    size = BATCH // MICROBATCHES // 8 * WIDTH * 4
    assert across.stages[0].up == pytest.approx(6.6e-6 + 2.7e-6 + size / (50e9 * 0.8))
    assert inside == pytest.approx(6.6e-6 + 0.6e-6 + 4 * size / (450e9 * 0.8))


def test_files(tmp_path: Path) -> None:
    predicted = schedule()
    record = json.loads(predicted.to_json())
    assert record["mesh"] == {"dp": 2, "pp": 2} and record["seconds"] == predicted.seconds
    assert record["memory"]["peak"] == max(rank["peak"] for rank in record["pipeline"]["ranks"])
    assert [row[0] for row in record["pipeline"]["actions"][1]][:3] == ["RF1.0", "F1.0", "B1.0"]
    events = json.loads(predicted.to_trace())["traceEvents"]
    bars = {(event["pid"], event["name"]) for event in events if event["ph"] == "X"}
    assert {(1, "F0.0"), (1, "B0.3"), (2, "B1.3")} <= bars
    page = predicted.to_html()
    assert page.count("<svg") == 1 and "backward of stage 1, microbatch 3" in page
    predicted.plot(tmp_path / "pipeline.png")
    assert (tmp_path / "pipeline.png").stat().st_size > 10_000


def test_before_the_cut_in_buckets() -> None:
    predicted = program().schedule("h100", stage="localize")
    assert isinstance(predicted, PipelineSchedule)
    assert len(predicted.collectives) > len(schedule().collectives) and flops(predicted) == flops(schedule())


def test_explain_counts_all_microbatches() -> None:
    gathers = [m for m in explain(program(), "layers.3.up.weight")._moves() if m.kind == "all_gather"]
    assert len(gathers) == 2 * MICROBATCHES


def test_reports_that_know_no_stages_are_refused() -> None:
    for report in (program().lint, program().advise, program().costs, lambda: program().draw("layers.0.up.weight")):
        with pytest.raises(PlanError, match="does not know the stages of a pipeline\n  plan entry: pp"):
            report()


MODEL = f"""\
import torch
from torch.nn.functional import mse_loss as loss
from tests.report.test_stage_schedule import Model


def example(targets=False):
    with torch.device("meta"):
        x = torch.empty({BATCH}, {WIDTH})
        return Model(), (x, x) if targets else (x,)
"""


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "staged_target.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    call = ["staged_target.py:example", "--loss", "loss"]
    plan = f'fsdp("dp") | pp("pp", microbatches={MICROBATCHES})'
    where = ["--mesh", "dp=2,pp=2", "--plan", plan]
    assert main(["schedule", *call, *where, "--rows", "5", "--html", "page.html"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Model, mesh dp=2 pp=2 on h100, graph order\nstep ") and "\nbubble " in shown
    assert "Pipeline" in Path("page.html").read_text()
    assert main(["sweep", *call, "--ranks", "4", "--set", "pp=2", "--plans", plan]) == 0
    assert "dp=2 pp=2" in capsys.readouterr().out
    assert main(["plan", *call, *where]) == 0
    planned = capsys.readouterr().out
    assert "schedule 1f1b, 2 ranks, 2 stages" in planned and "cut=[" in planned and "of the ranks of pp: " in planned
    assert main(["measure", *call, *where, "--nproc", "4"]) == 2
    assert "measure compares what all ranks run alike" in capsys.readouterr().err
