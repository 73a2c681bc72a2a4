"""Libraries that look at a model's signature see the model's own."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

import shardc


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return self.linear(x if mask is None else x * mask) * scale


def test_a_compiled_module_has_the_signature_of_its_model() -> None:
    module = shardc.compile(Scorer(), shardc.Mesh(dp=2), shardc.fsdp("dp"))
    plain = inspect.signature(Scorer().forward)
    assert list(plain.parameters) == ["x", "mask", "scale"]
    assert inspect.signature(module.forward) == plain
    assert inspect.signature(module) == plain
    assert inspect.signature(type(module).forward) == inspect.signature(Scorer.forward)
    same = shardc.compile(lambda x, y: x * y, shardc.Mesh(dp=2), shardc.ddp("dp"))
    assert list(inspect.signature(same.forward).parameters) == ["x", "y"]


def test_calls_go_through_the_program_as_before() -> None:
    source = Scorer()
    module = shardc.Simulation(shardc.compile(source, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager"))
    x = torch.randn(4, 4)
    torch.testing.assert_close(module(x, scale=2.0), source(x, scale=2.0))
