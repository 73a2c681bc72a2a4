"""What the cut into forward and backward leaves behind is a graph that the passes after it take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardc


class Sum(nn.Module):
    """Two layers that are added up: the gradients of their biases are one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x.tanh())


@pytest.mark.parametrize("direct", [False, True])
def test_equal_sums_are_reduced_once(direct: bool) -> None:
    model, x = Sum().double(), torch.randn(4, 6, dtype=torch.float64)
    options = shardc.Options(direct=direct, bucket_size=0)
    plan = shardc.ddp("dp")
    module = shardc.compile(
        model, shardc.Mesh(dp=2), plan, loss=lambda y: y.square().mean(), backend="eager", options=options
    )
    sim = shardc.Simulation(module)
    sim(x)
    sim.backward()
    model(x).square().mean().backward()
    for name, param in model.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(sim.grad(name), param.grad, rtol=1e-9, atol=1e-12)
    backward = module.shardc.program_for((x,), {}).backward
    assert len([node for node in backward.graph.nodes if "wait_tensor" in str(node.target)]) == 3  # two weights, a sum
