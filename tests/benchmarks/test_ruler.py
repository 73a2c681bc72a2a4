"""The ruler runs: rows in turn on two ranks, cut to what memory holds, their losses beside that of one device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.rows import groups
from benchmarks.stage import room

ROOT = Path(__file__).parents[2]
GLOBS = ["limit", "ddp/*", "shardc/ddp"]


def test_a_family_is_cut_to_the_rows_that_memory_holds() -> None:
    """Every part has what its peers are compared with, and at least one of them."""
    whole = [row.name for row in groups(GLOBS)["ddp"]]
    peers = [name for name in whole if name.startswith("ddp/")]
    assert whole == ["limit", *peers, "shardc/ddp"] and len(peers) > 1
    for at_once in (0, 3):
        cut = groups(GLOBS, at_once)
        assert list(cut) == [f"ddp {n} of {len(peers)}" for n in range(1, len(peers) + 1)]
        assert [[row.name for row in rows] for rows in cut.values()] == [["limit", p, "shardc/ddp"] for p in peers]


@pytest.mark.parametrize("available, rows", [(24_000, 10), (4_800, 2), (1_000, 0)])
def test_all_workers_of_the_rows_fit_into_memory(available: int, rows: int) -> None:
    assert room(available, taken=1_000, ranks=2) == rows


@pytest.mark.slow
def test_rows_train_as_one_device(tmp_path: Path) -> None:
    arguments = ["--size", "micro", "--steps", "2", "--warmup", "1", "--json", str(tmp_path / "made.json")]
    done = subprocess.run(
        [sys.executable, "benchmarks/train_step.py", *arguments, "--rows", "limit,ddp/eager,shardc/ddp"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "## micro, ddp" in done.stdout
    made = json.loads((tmp_path / "made.json").read_text())
    rows = {row["name"]: row for row in made["rows"]}
    assert list(rows) == ["limit", "ddp/eager", "shardc/ddp"]
    for name in ("ddp/eager", "shardc/ddp"):
        assert not rows[name]["error"] and len(rows[name]["seconds"]) == 2
        assert abs(rows[name]["loss"] - made["single_device_loss"]["micro"]) < 1e-4
