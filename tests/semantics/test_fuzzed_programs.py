"""Saved programs with random damage: refused with one kind of error, or loaded; nothing runs, nothing else is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.semantics.forged import saved


def fuzzed(tmp_path: Path, seed: int, count: int) -> list[str]:
    folder = saved(tmp_path / "program")
    (tmp_path / "mutated").mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "tests.semantics.fuzz", str(folder), str(tmp_path / "mutated")]
    done = subprocess.run([*command, str(seed), str(count)], capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_some(tmp_path: Path) -> None:
    assert fuzzed(tmp_path, 1, 300) == []


@pytest.mark.long
def test_many(tmp_path: Path) -> None:
    assert fuzzed(tmp_path, 2, 10_000) == []
