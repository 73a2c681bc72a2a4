"""The fine-tuning of `finetune_hf` by the library alone, in one process, and how far a sharded run is from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers as hf
from tiny_hf import history, llama, training


def run(steps: int) -> tuple[list[float], list[float]]:
    """`history` of float64 training in a process that torchrun did not start."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "ROLE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    command = [sys.executable, __file__, str(steps)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(losses: list[float], again: list[float], scores: list[float]) -> str:
    """Raises SystemExit where a loss is further than 1e-5 from one process's."""
    expected, expected_scores = run(len(losses))
    pairs = [*zip(losses, expected, strict=True), *zip(again, expected, strict=True)]
    pairs += zip(scores, expected_scores, strict=True)
    apart = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    if apart > 1e-5:
        raise SystemExit(f"losses differ from one process by {apart:.1e}")
    return f"largest relative difference from one process: {apart:.1e} in losses"


def generated(folder: Path, prompt: torch.Tensor, asked: dict, tokens: torch.Tensor) -> str:
    """Raises SystemExit where the saved files do not give ``tokens`` on one device."""
    loaded = hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if not torch.equal(loaded.generate(prompt, **asked), tokens):
        raise SystemExit("the saved files generate another text")
    return "one device generates the same from the saved files"


def main(steps: int) -> None:
    torch.set_num_threads(1)
    hf.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        trainer = hf.Trainer(llama(torch.float64), **training(Path(folder), steps))
        trainer.train()
    print(json.dumps(history(trainer)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
