"""The example that trains a mixture of experts: real ranks against one device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gather", "send"])
def test_it_equals_one_device(way: str) -> None:
    flags = ["--plan", "fsdp+ep", "--mesh", "dp=2,ep=2", "--nproc", "4", "--check", "--steps", "4"]
    command = [sys.executable, "examples/train_moe.py", *flags, "--way", way, "--backend", "eager"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"difference from one device: (\S+) in loss", done.stdout)
    assert found is not None and float(found[1]) < 1e-5, done.stdout
    assert len(re.findall(r"tokens of each expert in \S+: \[", done.stdout)) == 2
