"""The sweep: a row a mesh and plan, as `schedule` predicts it, from one capture; one line where the input is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardc
from shardc.__main__ import main
from shardc.capture import CaptureOnce
from shardc.cli.sweep import Row, _meshes, _ranks, draw
from shardc.cli.target import load
from shardc.ir.mesh import Mesh
from tests.cli.test_cli import SMALL

FSDP, BOTH = 'fsdp("dp")', 'fsdp("dp") | mlp_tp("tp")'


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "sweep_target.py").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return "sweep_target.py:example"


def test_rows_are_what_schedule_predicts(target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["sweep", target, "--ranks", "4..8", "--plans", FSDP, BOTH, "--json", "out/rows.json"]
    assert main([*arguments, "--plot", "out/rows.png"]) == 0
    rows = json.loads((tmp_path / "out/rows.json").read_text())
    found = load(target)
    fsdp = shardc.fsdp("dp")
    plans = {FSDP: fsdp, BOTH: fsdp | found.module.mlp_tp("tp")}
    meshes = [(4, FSDP, Mesh(dp=4)), (4, BOTH, Mesh(dp=2, tp=2)), (4, BOTH, Mesh(dp=1, tp=4)), (8, FSDP, Mesh(dp=8))]
    meshes += [(8, BOTH, Mesh(dp=8 // tp, tp=tp)) for tp in (2, 4, 8)]
    assert [(row["ranks"], row["plan"], row["mesh"]) for row in rows] == [(n, p, str(m)) for n, p, m in meshes]
    for row, (_, plan, mesh) in zip(rows, meshes, strict=True):
        schedule = shardc.compile(found.model, mesh, plans[plan]).lower(*found.args).schedule()
        assert (row["seconds"], row["exposed"], row["memory"], row["wire"], row["mfu"]) == (
            schedule.seconds, schedule.exposed, schedule.memory.peak.total, schedule.wire, schedule.mfu,
        )  # fmt: skip
        assert row["tokens_per_second"] == schedule.tokens_per_second
    first, *lines = capsys.readouterr().out.splitlines()
    best = min(rows, key=lambda row: row["seconds"])
    assert first.startswith("fastest: ") and first.endswith(f" on {best['mesh']} with {best['plan']}")
    table = [line for line in lines if "dp=" in line]
    assert len(table) == len(rows) and max(map(len, lines)) <= 120
    assert (tmp_path / "out/rows.png").read_bytes().startswith(b"\x89PNG")


def test_one_capture_serves_all_plans(target: str) -> None:
    found = load(target)
    once = CaptureOnce()
    options = shardc.Options(capture=once)
    for mesh, plan in (
        (Mesh(dp=4), shardc.fsdp("dp")),
        (Mesh(dp=2), shardc.ddp("dp")),
        (Mesh(dp=4), shardc.fsdp("dp")),
    ):
        again = shardc.compile(found.model, mesh, plan, options=options).lower(*found.args)
        alone = shardc.compile(found.model, mesh, plan).lower(*found.args)
        assert [again.text(stage) for stage in again.stages] == [alone.text(stage) for stage in alone.stages]
    assert once.count == 1
    found.model.eval()
    shardc.compile(found.model, Mesh(dp=4), shardc.fsdp("dp"), options=options).lower(*found.args)
    assert once.count == 2


class Scaled(nn.Module):
    """Multiplies by a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(4, 4), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.by


def test_a_model_that_changed_is_captured_again() -> None:
    once, model = CaptureOnce(), Scaled()
    for by, count in ((2.0, 1), (3.0, 2), (2.0, 2)):
        model.by = by
        options = shardc.Options(capture=once)
        program = shardc.compile(model, Mesh(dp=2), shardc.ddp("dp"), options=options).lower(torch.empty(4, 4))
        assert f", {by})" in program.text("capture") and once.count == count


def test_what_cannot_be_is_one_line(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = 'tp("tp", colwise=["upp"])'
    assert main(["sweep", target, "--ranks", "2", "--plans", FSDP, plan]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("cannot be: tp=2")]) == 1


def test_counts_and_meshes() -> None:
    assert _ranks("8..100") == [8, 16, 32, 64]
    described = shardc.cost.hardware.H100
    assert list(_meshes(["dp", "tp"], 16, {"tp": 8}, described)) == [Mesh(dp=2, tp=8)]
    assert list(_meshes(["dp", "cp", "tp"], 8, {}, described)) == [
        Mesh(dp=2, cp=2, tp=2), Mesh(dp=1, cp=2, tp=4), Mesh(dp=1, cp=4, tp=2),
    ]  # fmt: skip


WRONG = {
    "8...64": ("--ranks 8...64", ["--ranks", "8...64"]),
    "none": ("--ranks 0", ["--ranks", "0"]),
    "backwards": ("the last is below", ["--ranks", "64..8"]),
    "hardware": ("no hardware is called 'h10'", ["--hardware", "h10"]),
    "too many": ("32768 ranks; h100 is described for at most 24576", ["--ranks", "32768"]),
    "plan": ("--plans, ", ["--plans", "fsdp(dp"]),
    "axis": ("--set cp: no plan has axis 'cp'", ["--set", "cp=2"]),
    "axes": ("the plan has no axis", ["--plans", "Plan()"]),
    "not one": ("no combination", ["--plans", 'tp("tp", colwise=["upp"])']),
    "ending": ("plot rows.xyz", ["--plot", "rows.xyz"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_is_one_line_and_exit_code_2(what: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected, arguments = WRONG[what]
    assert main(["sweep", target, "--ranks", "2", "--plans", FSDP, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("shardc: error: ") and expected in err


def test_a_target_that_is_not_there(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "nowhere.py:example", "--ranks", "2", "--plans", FSDP]) == 2
    assert capsys.readouterr().err == "shardc: error: target: there is no file nowhere.py\n"


def test_the_picture_names_meshes_and_chooses_units() -> None:
    small = [Row(8, "dp=8", "a", 2e-4, memory=3_000_000), Row(8, "dp=4 tp=2", "a", 3e-4, memory=2_000_000)]
    large = [Row(8, "dp=8", "a", 20.0, memory=30 * 10**9), Row(16, "dp=16", "a", 12.0, memory=20 * 10**9)]
    for rows, labels, names in (
        (small, ["step, ms", "memory at the peak, MB a rank"], ["dp=8"]),
        (large, ["step, s", "memory at the peak, GB a rank"], ["dp=8", "dp=16"]),
    ):
        drawn = draw(rows)
        assert [axes.get_ylabel() for axes in drawn.axes] == labels
        assert [text.get_text() for text in drawn.axes[0].texts] == names
        measured, ideal = ([float(y) for y in line.get_ydata()] for line in drawn.axes[0].lines)
        assert ideal == [measured[0] * 8 / row.ranks for row in rows][: len(measured)]
    assert list(drawn.axes[0].lines[0].get_ydata()) == [20.0, 12.0]
    tokens = draw([replace(row, tokens_per_second=1e5 * row.ranks / 2) for row in large]).axes[1]
    assert tokens.get_ylabel() == "tokens/s a GPU"
    assert [list(line.get_ydata()) for line in tokens.lines] == [[5e4, 5e4], [5e4, 5e4]]
