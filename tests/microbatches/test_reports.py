"""Reports on programs with microbatches: schedule, lint, texts, bisect, and what says that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardc
from shardc.__main__ import main
from shardc.debug import bisect
from shardc.errors import InputError, PlanError
from tests.cli.test_cli import SMALL

FSDP, PLAN = 'fsdp("dp")', 'fsdp("dp") | microbatches(4)'


def masked() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).double()
    x, target = torch.randn(64, 8, dtype=torch.float64), torch.randint(4, (64,))
    target[:16] = -100
    return model, (x, target)


@cache
def program(count: int, loss: Callable[..., torch.Tensor] | None = F.cross_entropy, level: int = 3) -> shardc.Program:
    model, args = masked()
    plan = shardc.fsdp("dp", level=level) | shardc.microbatches(count)
    module = shardc.compile(model, shardc.Mesh(dp=2), plan, loss=loss, backend="eager")
    return module.lower(*args[: 1 if loss is None else 2])


def counted(schedule: shardc.Schedule) -> dict[tuple[str, str], int]:
    out: dict[tuple[str, str], int] = {}
    for row in schedule.collectives:
        out[row.kind, row.phase] = out.get((row.kind, row.phase), 0) + 1
    return out


def test_collectives_are_those_of_all_microbatches() -> None:
    schedule = program(4).schedule("h100")
    assert counted(schedule) == {
        ("all_reduce", "forward"): 1,  # the count of targets
        ("all_gather", "forward"): 4,
        ("all_gather", "backward"): 4,
        ("all_reduce", "backward"): 1,  # the loss
        ("reduce_scatter", "backward"): 1,
    }
    once = counted(program(4, level=2).schedule("h100"))
    assert once["all_gather", "forward"] == once["reduce_scatter", "backward"] == 1
    assert ("all_gather", "backward") not in once


def test_a_model_without_a_loss_runs_forward_twice() -> None:
    schedule = program(4, None).schedule("h100")
    assert counted(schedule)["all_gather", "forward"] == 8
    assert "the model returns no loss, so forward runs in the call, and again in the backward" in str(schedule.table())


def test_memory_is_that_of_one_microbatch_and_the_sums() -> None:
    whole, parts = (program(count).schedule("h100").memory for count in (1, 8))
    assert parts.peak.total < whole.peak.total
    assert parts.by_owner()["activations"] < whole.by_owner()["activations"] / 4
    assert parts.by_owner()["gradients"] >= 4 * (8 * 32 + 32 * 4)  # a sum is whole, in float64, of half the parameters


def test_the_table_says_so() -> None:
    assert "\n4 microbatches, one after the other: times, kernels and collectives are those of all" in str(
        program(4).schedule("h100").table()
    )
    assert "microbatches" not in str(program(1).schedule("h100").table())
    assert "microbatches(4)" in program(4).schedule("h100").to_html()


def test_lint_and_advice() -> None:
    assert {finding.rule for finding in program(4).lint()} == {"exposed-axis", "small-messages"}
    assert all(one.gain > 0 for one in program(4).advise())


def test_text_of_every_stage(tmp_path: Path) -> None:
    shown = program(4)
    assert "schedule.last_backward" in shown.stages and "schedule.opening_1" in shown.stages
    paths = shown.write_stages(tmp_path)
    assert [path.read_text() for path in paths] == [shown.text(stage) for stage in shown.stages]
    assert shown.text("collectives").startswith("mesh dp=2 micro=4\n")
    assert shown.text("schedule.last_backward").startswith("mesh dp=2\n")


def test_dump_of_each_compile(tmp_path: Path) -> None:
    model, args = masked()
    options = shardc.Options(dump=str(tmp_path))
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp") | shardc.microbatches(2), options=options)
    module.lower(args[0])
    assert any(path.name.endswith("schedule.last_backward.txt") for path in tmp_path.iterdir())


def test_tiles_are_those_of_ranks() -> None:
    text = str(program(4).draw("0.weight"))
    assert text.startswith("0.weight [32@dp,8] on mesh dp=2;")


def test_formulas_are_refused() -> None:
    with pytest.raises(PlanError, match=r"no formula: a step in microbatches.*\n  plan entry: microbatches\(4\)"):
        program(4).costs()


def test_bisect_looks_up_to_the_cut() -> None:
    model, args = masked()
    verdict = bisect(program(4), model, *args, loss=F.cross_entropy)
    assert verdict.stage is None and verdict.checked[-1].stage == "decompose"
    with pytest.raises(InputError, match="stage bucket of a plan with microbatches is cut in time"):
        bisect(program(4), model, *args, loss=F.cross_entropy, stages=["bucket"])


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "small_target.py").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return "small_target.py:either"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, ""), err
    return out


def test_commands(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = (target, "--loss", "loss", "--mesh", "dp=2", "--plan", PLAN)
    text = run(capsys, "schedule", *call, "--html", "page.html")
    assert "4 microbatches, one after the other" in text and Path("page.html").stat().st_size > 10_000
    assert "unread-collective" not in run(capsys, "lint", *call)
    assert "add" in run(capsys, "dump", *call, "--stage", "schedule.last_backward")
    assert "up.weight" in run(capsys, "explain", *call, "--tensor", "up.weight")
    rows = run(capsys, "sweep", target, "--loss", "loss", "--ranks", "2", "--plans", FSDP, PLAN)
    assert PLAN in rows
    assert main(["cost", *call]) == 2
    assert "no formula: a step in microbatches" in capsys.readouterr().err
