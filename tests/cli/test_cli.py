"""The command line: what it prints, what it writes, and one line where the input is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardc
from shardc.__main__ import format_warning, main
from shardc.cli.target import load, mesh_of
from shardc.errors import ShardcWarning
from tests import golden

ROOT = Path(__file__).parents[2]

SMALL = """\
import torch
from torch import nn
import shardc


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32, bias=False)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def mlp_tp(axis):
    return shardc.tp(axis, colwise=["up"], rowwise=["down"])


def example():
    with torch.device("meta"):
        return Mlp(), (torch.empty(16, 8),)


def with_targets():
    model, (x,) = example()
    return model, (x, torch.empty(16, 8, device="meta"))


def either(targets=False):
    return with_targets() if targets else example()


def loss(output, target):
    return (output - target).square().mean()


def fails():
    return 1 / 0


def alone():
    return Mlp()


number = 3
model = Mlp()
"""
PLAN = 'fsdp("dp") | mlp_tp("tp")'


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "small_target.py"
    path.write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return path


def dump(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What ``dump`` prints for the small model; it must succeed, without a word on stderr."""
    code = main(["dump", "--mesh", "dp=2,tp=2", "--plan", PLAN, *arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def lowered(target: str = "example", loss: str | None = None) -> shardc.Program:
    found = load(f"small_target.py:{target}")
    plan = shardc.fsdp("dp") | found.module.mlp_tp("tp")
    objective = None if loss is None else getattr(found.module, loss)
    return shardc.compile(found.model, shardc.Mesh(dp=2, tp=2), plan, loss=objective).lower(*found.args)


def test_dump_prints_the_collectives(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = dump(capsys, "small_target.py:example")
    assert text == lowered().text("collectives")
    golden.check(text, "cli/dump")


def test_dump_prints_the_stage_asked_for(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = lowered()
    printed = {stage: dump(capsys, "small_target.py:example", "--stage", stage) for stage in program.stages}
    assert printed == {stage: program.text(stage) for stage in program.stages}


def test_dump_shows_origins(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dump(capsys, "small_target.py:example", "--origins") == lowered().text("collectives", origins=True)


def test_targets_are_asked_for_where_there_is_a_loss(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = lowered("with_targets", "loss").text("collectives")
    assert dump(capsys, "small_target.py:either", "--loss", "loss") == expected
    assert dump(capsys, "small_target.py:either") == lowered().text("collectives")


def test_dump_puts_the_loss_into_the_graph(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = dump(capsys, "small_target.py:with_targets", "--loss", "loss")
    assert printed == lowered("with_targets", "loss").text("collectives")


def test_a_plan_is_read_from_a_file(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shardc.fsdp("dp") | shardc.tp("tp", colwise=["up"], rowwise=["down"])).save("found.json")
    assert main(["dump", "small_target.py:example", "--mesh", "dp=2,tp=2", "--plan", "found.json"]) == 0
    assert capsys.readouterr().out == lowered().text("collectives")


def test_a_warning_is_one_line() -> None:
    """Pytest records warnings, so that none is printed here."""
    warning = ShardcWarning("x is gathered\n  fix: use sizes that tp divides")
    text = format_warning(warning, ShardcWarning, "request.py", 3)
    assert text == "shardc: warning: x is gathered; use sizes that tp divides\n"
    assert format_warning(UserWarning("x"), UserWarning, "a.py", 3) == "a.py:3: UserWarning: x\n"


def test_dump_writes_every_stage(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = dump(capsys, "small_target.py:example", "--out", "stages")
    program = lowered()
    expected = {f"stages/{at:02d}_{stage}.txt": program.text(stage) for at, stage in enumerate(program.stages)}
    assert printed.splitlines() == list(expected)
    assert {path: Path(path).read_text() for path in expected} == expected


def test_dump_takes_a_module(small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(small.parent))
    assert dump(capsys, "small_target:example") == lowered().text("collectives")


def test_a_target_may_import_its_neighbours(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small.parent / "nested"
    folder.mkdir()
    (folder / "neighbour.py").write_text(SMALL)
    (folder / "shown.py").write_text("from neighbour import example, mlp_tp\n")
    assert dump(capsys, "nested/shown.py:example") == lowered().text("collectives")


# --- bad input

BAD = {
    "a target without a function": (
        ["small_target.py"],
        "target 'small_target.py' names no function; write it as path.py:function or module:function",
    ),
    "a file that is not there": (["other.py:example"], "target: there is no file other.py"),
    "a module that is not there": (
        ["no_such_module:example"],
        "no_such_module fails: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "a function that is not there": (
        ["small_target.py:exampel"],
        "small_target.py has no function 'exampel'; did you mean 'example'?",
    ),
    "a name that is no function": (
        ["small_target.py:number"],
        "small_target.py: number is a int, not a function; write a function without arguments that returns (model, "
        "example_args)",
    ),
    "a model for a function": (
        ["small_target.py:model"],
        "small_target.py: model is a Mlp, not a function; write a function without arguments that returns (model, "
        "example_args)",
    ),
    "a function that needs arguments": (
        ["small_target.py:mlp_tp"],
        "small_target.py: mlp_tp() needs axis; write a function without arguments that returns (model, example_args)",
    ),
    "a plan file that is not there": (
        ["small_target.py:example", "--plan", "found.json"],
        "--plan, the plan found.json cannot be read: No such file or directory; write it with plan.save(path)",
    ),
    "a function that fails": (
        ["small_target.py:fails"],
        "small_target.py:fails() fails: {folder}/small_target.py:39: ZeroDivisionError: division by zero",
    ),
    "a function that returns no pair": (
        ["small_target.py:alone"],
        "small_target.py: alone() does not return a pair; return (model, example_args)",
    ),
    "a mesh that is no mesh": (
        ["small_target.py:example", "--mesh", "dp2"],
        "--mesh dp2: 'dp2' is not an axis and size; write it as dp=2,tp=4",
    ),
    "an axis that comes twice": (
        ["small_target.py:example", "--mesh", "dp=2,dp=4"],
        "--mesh dp=2,dp=4: axis 'dp' occurs twice",
    ),
    "a loss that is not there": (
        ["small_target.py:example", "--loss", "los"],
        "small_target.py has no loss 'los'; did you mean 'loss'?",
    ),
    "a loss without its arguments": (
        ["small_target.py:example", "--loss", "loss"],
        "--loss loss: small_target.py:example returns no target for it; return (model, (..., target)), after forward's "
        "arguments, if the function is called with targets=True",
    ),
    "a stage that is not there": (
        ["small_target.py:example", "--stage", "colectives"],
        "--stage colectives: no such stage; use one of capture, experts, attention, windows, canonicalize, float8, "
        "seed, pad, propagate, objective, precision, reshard, simplify, collectives, keep_part, localize, offload, "
        "hoist_grad_epilogue, chunk_loss, "
        "decompose, partition, partition.backward, skip_regather, skip_regather.backward, offload_saved, "
        "offload_saved.backward, bucket, bucket.backward, "
        "algorithms, algorithms.backward, schedule, schedule.backward, plan_memory, plan_memory.backward",
    ),
    "a name that no plan knows": (
        ["small_target.py:example", "--plan", 'fsdb("dp")'],
        "--plan, column 1: unknown name 'fsdb'; did you mean 'fsdp'?",
    ),
}


@pytest.mark.parametrize("arguments, message", BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    small: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code = main(["dump", "--mesh", "dp=2,tp=2", "--plan", PLAN, *arguments])
    out, err = capsys.readouterr()
    assert (code, out, err) == (2, "", f"shardc: error: {message.format(folder=small.parent)}\n")


def test_what_the_compiler_refuses_is_one_line(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["dump", "small_target.py:example", "--mesh", "dp=2", "--plan", 'tp("dp", colwise=["upp"])'])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("shardc: error: ") and "upp" in err and "up" in err


@pytest.mark.parametrize("arguments, message", [
    (
        ["--rows", "-3"],
        "schedule: argument --rows: '-3' is not a count; write a number such as 40; see shardc schedule --help",
    ),
    (["--order", "late"], "schedule: argument --order: invalid choice: 'late' (choose from 'graph', 'earliest'); "
     "see shardc schedule --help"),
])  # fmt: skip
def test_what_no_argument_can_be_is_one_line(
    small: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["schedule", "small_target.py:example", "--mesh", "dp=2,tp=2", "--plan", PLAN, *arguments])
    assert (ended.value.code, capsys.readouterr()) == (2, ("", f"shardc: error: {message}\n"))


@pytest.mark.parametrize("kind", ["--json", "--html", "--trace"])
def test_a_file_that_cannot_be_written_is_one_line(small: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    folder = str(small.parent)
    code = main(["schedule", "small_target.py:example", "--mesh", "dp=2,tp=2", "--plan", PLAN, kind, folder])
    assert (code, capsys.readouterr().err) == (2, f"shardc: error: {folder}: Is a directory\n")


@pytest.mark.slow
def test_the_command_runs_as_a_process(small: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shardc", *arguments]
        path = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, cwd=small.parent, env=path)

    wrong = run("dump", "small_target.py:exampel", "--mesh", "dp=2", "--plan", "ddp('dp')")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "shardc: error: small_target.py has no function 'exampel'; did you mean 'example'?\n"
    right = run("dump", "small_target.py:example", "--mesh", "dp=2,tp=2", "--plan", PLAN)
    assert (right.returncode, right.stdout) == (0, lowered().text("collectives"))


def test_a_mesh_is_read_in_order() -> None:
    assert mesh_of("tp=4, dp=2") == shardc.Mesh(tp=4, dp=2) != shardc.Mesh(dp=2, tp=4)


def test_one_example_that_is_no_tuple_is_one_argument(tmp_path: Path) -> None:
    path = tmp_path / "one_tensor.py"
    path.write_text("import torch\ndef example():\n    return torch.nn.ReLU(), torch.ones(2)\n")
    found = load(f"{path}:example")
    assert len(found.args) == 1 and torch.equal(found.args[0], torch.ones(2))
