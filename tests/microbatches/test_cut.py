"""The graphs of a step in microbatches, as text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from tests import golden


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def masked(out: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return ((out - target).square() * mask[:, None]).sum() / mask.sum()


def test_text() -> None:
    plan = shardc.fsdp("dp", level=2) | shardc.microbatches(4)
    module = shardc.compile(Perceptron(), shardc.Mesh(dp=2), plan, loss=masked)
    program = module.lower(torch.empty(16, 8), torch.empty(16, 8), torch.empty(16))
    stages = [stage for stage in program.stages if stage.startswith("partition")]
    text = "\n".join(f"--- {stage}\n\n{program.text(stage)}" for stage in ("localize", *stages))
    golden.check(text, "microbatch/perceptron")
