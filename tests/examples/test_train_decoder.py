"""The training example end to end: real ranks, every plan, against one device."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULT = re.compile(r"difference from one device: (\S+) in loss, (\S+) in parameters")
EXACT = ("--backend", "eager", "--dtype", "float64", "--steps", "5", "--check")
LOSSES = re.compile(r"loss (\S+) -> (\S+) in (\d+) steps, ([\d,]+) tokens/s")


def train(*flags: str, timeout: float = 500) -> str:
    """Run the example at its smallest size; what it prints."""
    command = [sys.executable, "examples/train_decoder.py", "--size", "tiny", *flags]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "timed out" not in done.stderr, "ranks that wait for nothing say so all the time"
    return done.stdout


def assert_equals_one_device(output: str, *, steps: int, tolerance: float) -> None:
    in_loss, in_parameters = (float(number) for number in RESULT.search(output).groups())
    assert in_loss < tolerance and in_parameters < tolerance, output
    first, last, ran, _ = LOSSES.search(output).groups()
    assert int(ran) == steps and float(last) < float(first), output


@pytest.mark.long
@pytest.mark.parametrize("plan", ["ddp", "fsdp", "fsdp1", "fsdp2", "hsdp", "tp", "tp+sp", "fsdp+tp"])
def test_plan_on_two_ranks_equals_one_device(plan: str) -> None:
    output = train("--plan", plan, "--nproc", "2", *EXACT)
    assert_equals_one_device(output, steps=5, tolerance=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "mesh"), [("fsdp+tp", "dp=2,tp=2"), ("hsdp", "rep=2,dp=2")])
def test_two_axes_on_four_ranks_equal_one_device(plan: str, mesh: str) -> None:
    output = train("--plan", plan, "--mesh", mesh, "--nproc", "4", *EXACT)
    assert_equals_one_device(output, steps=5, tolerance=1e-9)


@pytest.mark.slow
def test_microbatches_equal_one_device() -> None:
    output = train("--plan", "fsdp", "--microbatches", "4", "--nproc", "2", *EXACT)
    assert_equals_one_device(output, steps=5, tolerance=1e-9)


@pytest.mark.slow
def test_pipeline_stages_equal_one_device() -> None:
    output = train("--plan", "fsdp+pp", "--mesh", "dp=2,pp=2", "--microbatches", "4", "--nproc", "4", *EXACT)
    assert_equals_one_device(output, steps=5, tolerance=1e-9)


@pytest.mark.slow
def test_inductor_equals_one_device_and_samples() -> None:
    output = train("--plan", "fsdp", "--nproc", "2", "--steps", "5", "--check")
    assert_equals_one_device(output, steps=5, tolerance=1e-4)
    assert "sampled: def " in output


@pytest.mark.slow
def test_ranks_that_die_resume_with_the_same_losses(tmp_path: Path) -> None:
    flags = ("--plan", "fsdp", "--backend", "eager", "--dtype", "float64", "--steps", "24")
    killed = train(*flags, "--checkpoint", str(tmp_path), "--kill-at", "7,15")
    assert {path.name for path in tmp_path.iterdir()} == {"step_10", "step_20", "killed_at_7", "killed_at_15"}
    whole = train(*flags)
    assert LOSSES.search(killed).groups()[:3] == LOSSES.search(whole).groups()[:3]
    assert killed.split("sampled:")[1] == whole.split("sampled:")[1]


@pytest.mark.long
def test_soak_of_random_kills(tmp_path: Path) -> None:
    """200 steps in which a rank dies ten times end with the losses of a run in which none does."""
    seed = random.SystemRandom().randrange(1 << 32)
    kills = sorted(random.Random(seed).sample(range(1, 200), 10))
    print(f"seed {seed}: killed after steps {kills}")
    flags = ("--plan", "fsdp", "--backend", "eager", "--dtype", "float64", "--steps", "200")
    listed = ",".join(map(str, kills))
    killed = train(*flags, "--checkpoint", str(tmp_path), "--kill-at", listed, timeout=1800)
    assert {f"killed_at_{step}" for step in kills} <= {path.name for path in tmp_path.iterdir()}
    whole = train(*flags, timeout=1800)
    assert LOSSES.search(killed).groups()[:3] == LOSSES.search(whole).groups()[:3]
    assert killed.split("sampled:")[1] == whole.split("sampled:")[1]
