"""Gradients within forward: by leaves of its own, and by functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import CaptureError


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))


class OwnLeaf(Energy):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return force.square().mean()


class Functional(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.net(x).sum())(x).square().mean()


def test_a_gradient_by_a_leaf_of_forwards_own_is_refused_with_its_line() -> None:
    module = shardc.compile(OwnLeaf(), shardc.Mesh(dp=2), shardc.fsdp("dp"))
    with pytest.raises(
        CaptureError, match=r"requires_grad_\(\)(.|\n)*source: .*order.py:\d+(.|\n)*fix: .*torch.func.grad"
    ):
        module.lower(torch.randn(4, 3))


def test_what_the_fix_says_is_right() -> None:
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
