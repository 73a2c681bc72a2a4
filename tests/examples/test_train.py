"""The training script that people copy: under torchrun, resumed on other ranks, of a Hugging Face model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[2]
SMALL = ("--steps", "6", "--rows", "4", "--length", "16", "--dim", "32", "--layers", "1", "--every", "3")


def train(ranks: int, *flags: str | Path) -> list[str]:
    """What ``examples/train.py`` prints on so many ranks; a plain process for 1."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), "examples/train.py", *map(str, flags)]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        command, cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if not line.startswith("USDT")]


def last_loss(lines: list[str]) -> float:
    found = re.search(r"step 6: loss ([\d.]+), norm [\d.]+, [\d,]+ tokens/s$", lines[-1])
    assert found is not None, lines
    return float(found[1])


def test_two_ranks_and_resumed_on_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first = train(2, *SMALL, "--checkpoint", folder)
    assert re.match(r'[\d,]+ parameters on 2 ranks of cpu, fsdp\("dp", level=3\), from step 0', first[0]), first
    assert {path.name for path in folder.iterdir()} == {"step_3", "step_6"}
    shutil.rmtree(folder / "step_6")
    again = train(1, *SMALL, "--checkpoint", folder)
    assert again[0].endswith("from step 3")
    assert last_loss(again) == pytest.approx(last_loss(first), abs=2e-3)


@pytest.mark.slow
def test_tensor_parallelism_in_bfloat16_profiled(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    lines = train(4, *SMALL[2:], "--steps", "18", "--tp", "2", "--bf16", "--profile", trace)
    assert 'tp("tp"' in lines[0] and "bfloat16" in lines[0] and trace.stat().st_size > 10_000


@pytest.mark.slow
def test_microbatches() -> None:
    whole, parts = (last_loss(train(2, *SMALL, "--microbatches", count)) for count in ("1", "2"))
    assert parts == pytest.approx(whole, abs=2e-3)


@pytest.mark.slow
def test_a_hugging_face_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    losses = [
        last_loss(train(ranks, *SMALL, "--hf", tmp_path / "model", *tp)) for ranks, *tp in ((1,), (2, "--tp", "2"))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
