"""The page "Works with": each line says yes or no, and names tests that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?!---|library)(.+?) \| (yes|no) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def rows() -> list[tuple[str, ...]]:
    return ROW.findall((ROOT / "docs/works_with.md").read_text())


def test_every_line_is_complete() -> None:
    text = (ROOT / "docs/works_with.md").read_text()
    lines = [x for x in text.splitlines() if x.startswith("| ") and not x.startswith(("| ---", "| library"))]
    assert len(lines) == len(rows()) >= 40
    assert sum(works == "yes" for _, works, *_ in rows()) >= 34
    assert len({what for what, *_ in rows()}) == len(rows())


def test_every_line_names_tests_that_there_are() -> None:
    for what, _, _, shown in rows():
        named = re.findall(r"(tests/\S+\.py)::(\w+)", shown)
        assert named, what
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{what}: {path}::{name}"


def test_a_line_of_a_library_that_need_not_be_there_has_its_version_and_day() -> None:
    """Such a test is skipped without its library."""
    for what, _, _, shown in rows():
        path, name = re.findall(r"(tests/\S+\.py)::(\w+)", shown)[0]
        source = (ROOT / path).read_text()
        body = source[source.index(f"def {name}(") :].split("\n\n\n")[0]
        is_skipped = "importorskip(" in body and not what.startswith(("Adafactor", "schedules of"))
        assert is_skipped == bool(re.search(r"\([\w-]+ [\d.]+, \d{4}-\d\d-\d\d\)$", shown)), what


def test_the_readme_has_the_number_of_lines() -> None:
    assert f"for {len(rows())} libraries and habits" in (ROOT / "README.md").read_text()


def test_the_script_for_lightning_runs_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (script,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/works_with.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [*ranks, "--nproc-per-node=2", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(tmp_path.glob("lightning_logs/*/checkpoints/*.ckpt"))
