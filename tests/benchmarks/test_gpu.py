"""What `make gpu` runs, at its smallest on CPU ranks; and that neither a failure nor a hanging job ends the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import HALVES, SHORT, Section, perform, sections
from benchmarks.gpu.correct import FORMS, VARIANTS
from benchmarks.gpu.rows import Row, Skipped, append, read, table, tried

ROOT = Path(__file__).parents[2]
BEGINS = """
from pathlib import Path
from benchmarks.gpu.rows import append
append(Path({path!r}), dict(section="s", case="began"))
"""


def rows_of(folder: Path, device: str, *arguments: str) -> list[Row]:
    """The rows that `benchmarks.gpu.correct` writes."""
    path = folder / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu.correct", "--device", device, "--rows", str(path), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return read(path)[0]


def test_what_a_case_raises_is_its_row(tmp_path: Path) -> None:
    def wrong() -> tuple[str, dict[str, float]]:
        raise AssertionError("off by\n2")

    def absent() -> tuple[str, dict[str, float]]:
        raise Skipped("not here")

    def endless() -> tuple[str, dict[str, float]]:
        while True:
            pass

    path = tmp_path / "rows.jsonl"
    for name, run in (("a", wrong), ("b", absent), ("c", endless), ("d", lambda: ("fine", {"x": 1}))):
        tried(path, "s", name, 1, run)
    rows, left = read(path)
    assert [(row.case, row.result) for row in rows] == [("a", "wrong"), ("b", "skipped"), ("c", "stopped"), ("d", "ok")]
    assert rows[0].note == "AssertionError: off by 2" and rows[3].numbers == {"x": 1} and left == []
    append(path, {"section": "s", "case": "e"})
    assert read(path)[1] == [("s", "e")]
    assert [line.split("|")[2].strip() for line in table(rows).splitlines()[2:]] == ["a", "b", "c", "d"]


def test_a_failing_and_a_hanging_job_are_rows_and_the_rest_goes_on(tmp_path: Path) -> None:
    begins = BEGINS.format(path=str(tmp_path / "jobs" / "2.jsonl"))
    jobs = (
        ("-c", "import sys; sys.exit('no such thing')"),
        ("-c", "print('fine')"),
        ("-c", f"{begins}\nimport time; time.sleep(600)"),
        ("-c", "never begun"),
    )
    found = [row for rows in perform(Section("jobs", jobs, 0, 1), 6.0, str(tmp_path), tmp_path / "log") for row in rows]
    assert [(row.case, row.result) for row in found] == [
        ("-c import sys; sys.exit('no such thing')", "failed"), ("began", "stopped"), ("1 jobs", "stopped"),
    ]  # fmt: skip
    assert "exit code 1: no such thing" in found[0].note and "fine" in (tmp_path / "log").read_text()


def test_every_form_is_a_job_on_a_gpu() -> None:
    """So that one that ends the process takes no other with it."""
    jobs = sections("cuda", False, Path("out"))[0].jobs
    forms = [(command[command.index("--ranks") + 1], command[-1]) for command in jobs if "--forms" in command]
    assert sorted(forms) == sorted((ranks, form) for ranks in "12" for form in FORMS)
    assert sorted(sum(HALVES.values(), ())) == sorted(VARIANTS)


@pytest.mark.slow
def test_the_short_form_runs_every_section(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--short", "--minutes", "20"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=1300, check=False
    )
    rows, _ = read(tmp_path / "rows.jsonl")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(tmp_path / 'log.txt').read_text()}"
    assert done.stdout == (tmp_path / "table.md").read_text() == f"{table(rows)}\n"
    assert {row.section for row in rows} == {
        "machine", "2 ranks", "1 rank", "CUDA graph", "profile", "pytest", "step",
    }  # fmt: skip
    assert [(row.case, row.result, row.note) for row in rows if row.result != "ok" and row.section == "step"] == [
        ("micro, fsdp2/flex/bf16", "skipped", "torch's flex_attention has no backward on a CPU")
    ]
    assert [(row.case, row.result) for row in rows if row.result != "ok" and row.section != "step"] == [
        ("fsdp3, eager", "skipped")
    ]
    for ranks, section in ((1, "1 rank"), (2, "2 ranks")):
        cases = {row.case: row for row in rows if row.section == section}
        assert set(cases) == {f"{form}, eager/f32" for form in SHORT[ranks]}
        assert all(0 <= row.numbers["difference"] < 1e-4 for row in cases.values())
    exposed = {row.case: row.numbers for row in rows if row.section == "profile"}
    assert exposed["fsdp3, 1 rank, eager"]["communication"] == 0 < exposed["fsdp3, 2 ranks, eager"]["exposed"]
    steps = {row.case: row.numbers for row in rows if row.section == "step"}
    assert abs(steps["micro, ddp/eager"]["loss"] - steps["micro, shardc/ddp"]["loss"]) < 1e-4
    assert (tmp_path / "trace.json.gz").stat().st_size > 1000
