"""``python -m shardc plan``: what it prints and writes, and that what it prints compiles the same plan."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import shardc
from shardc.__main__ import main
from shardc.cli.target import load
from shardc.cost.hardware import H100

TARGET = """\
import torch
from torch import nn
import shardc


def loss(output, target):
    return (output - target).square().mean()


def given():
    return shardc.Plan(params={"0.weight": ("tp", None)})


def example():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
        return model, (torch.empty(8192, 1024), torch.empty(8192, 1024))
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "plan_target.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    return "plan_target.py:example"


def test_the_plan_that_it_prints_is_the_one_that_it_writes(
    target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["plan", target, "--ranks", "4", "--loss", "loss", "--memory", "190MB", "--json", "out/plan.json"]
    assert main(asked) == 0
    printed = capsys.readouterr()
    found = load(target)
    plan = shardc.Plan.load(tmp_path / "out/plan.json")
    lines = printed.out.splitlines()
    best = next(line for line in lines if line.startswith("found "))
    first, _, mesh = lines[0].partition(" a rank, on mesh ")
    assert first.startswith("found: ")
    assert best.endswith(str(plan)) and mesh in best
    assert plan.describe() in printed.out
    assert any(line.startswith("best form") for line in lines)
    assert any(line.startswith("problem: ") and "gap" in line for line in lines)
    came = printed.err.splitlines()
    assert len(came) == int(lines[1].split()[0])  # a line for each plan, as they came
    step = best.partition(mesh)[2].split()[0]
    assert any(line.startswith(f"{mesh}: {step} ms a step, ") for line in came)
    assert all((" ms exposed, " in line or ": ~" in line) and " GB a rank" in line for line in came)

    again = shlex.split(lines[-2])
    assert again[:3] == ["python", "-m", "shardc"] and main(again[3:]) == 0
    schedule = capsys.readouterr().out
    sizes = {name: int(size) for name, _, size in (axis.partition("=") for axis in mesh.split())}
    options = shardc.Options(bucket_size=H100)  # as ranks on GPUs have by default
    module = shardc.compile(found.model, shardc.Mesh(sizes), plan, loss=found.named("loss", "loss"), options=options)
    predicted = module.lower(*found.args).schedule()
    assert schedule == predicted.table()
    assert f"{predicted.seconds * 1e3:.3f}" in best.split()
    compiled = f"shardc.compile(model, shardc.{shardc.Mesh(sizes)!r}, shardc.Plan.load('out/plan.json'), loss=loss)"
    assert lines[-1] == compiled


@pytest.mark.slow
def test_another_start_finds_the_same_plan(target: str, tmp_path: Path) -> None:
    """In another process, under another hash seed."""
    asked = ["plan", target, "--ranks", "4", "--loss", "loss", "--memory", "190MB", "--json"]
    assert main([*asked, "here.json"]) == 0
    root = str(Path(__file__).parents[2])
    around = {**os.environ, "PYTHONHASHSEED": "3", "PYTHONPATH": root}
    subprocess.run([sys.executable, "-m", "shardc", *asked, "there.json"], cwd=tmp_path, env=around, check=True)
    assert (tmp_path / "there.json").read_text() == (tmp_path / "here.json").read_text()


def test_a_mesh_and_a_part_by_hand(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", target, "--loss", "loss", "--mesh", "dp=2,tp=2", "--plan", "given()", "--hardware", "a100"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "plans scheduled, meshes: 1; a100, 80 GB a rank" in out.splitlines()[1]
    assert ["param", "0.weight", '("tp",', "None)"] in [line.split() for line in out.splitlines()]
    assert "as given" in out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "a plan is found for a mesh or for a number of ranks; pass one of --mesh and --ranks"),
        (["--ranks", "4", "--mesh", "dp=4"],
         "a plan is found for a mesh or for a number of ranks; pass one of --mesh and --ranks"),
        (["--ranks", "4", "--memory", "much"],
         'auto: memory is \'much\', not a number of bytes; write an integer, or a size with a unit, like "8 MiB" or '
         '"1.5GB"'),
        (["--ranks", "4", "--hardware", "h1000"], "no hardware is called 'h1000'; did you mean 'h100'?"),
        (["--ranks", "100000"], "the mesh ranks=100000 has 100000 ranks; h100 is described for at most 24576; use a "
         "smaller mesh, or dataclasses.replace(hardware, largest=...)"),
        (["--ranks", "4", "--plan", 'fsdp("pp"'], None),
        (["--ranks", "4", "--plan", 'fsdp("dp") | ddp("x") | ddp("y")'], "no mesh"),
        (["--mesh", "dp=4", "--plan", 'fsdp("tp")'], "unknown mesh axis 'tp'; the mesh is dp=4"),
        (["--mesh", "dp=4", "--memory", "1MB"], "no plan on dp=4 fits in 0.001 GB a rank"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(
    target: str, arguments: list[str], what: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", target, "--loss", "loss", *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"shardc: error: {what or ''}")
