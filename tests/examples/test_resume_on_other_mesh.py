"""The resuming example: after the checkpoint, every mesh and plan has the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_losses_are_the_same_everywhere() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "examples/resume_on_other_mesh.py", "--nproc", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = dict(line.split(":") for line in done.stdout.splitlines())
    assert list(rows) == ["trained under fsdp", "resumed on fsdp", "resumed on tp", "resumed on one device"]
    numbers = {name: [float(text) for text in row.split()] for name, row in rows.items()}
    alone = numbers.pop("resumed on one device")
    assert alone[-1] < numbers.pop("trained under fsdp")[0]
    for name, losses in numbers.items():
        assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < 1e-4, name
