"""Gradients within forward, by functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardc


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))


class Functional(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.net(x).sum())(x).square().mean()


def test_a_gradient_by_a_function() -> None:
    model, x = Functional().double(), torch.randn(4, 3, dtype=torch.float64)
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    module.lower(x)
    simulation = shardc.Simulation(module)
    simulation(x)
    simulation.backward()
    model(x).backward()
    for name, param in model.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(simulation.grad(name), param.grad, rtol=1e-9, atol=1e-12)
