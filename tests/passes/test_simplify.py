"""One reshard for several views of a value."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc import Mesh, Plan, fsdp
from tests.semantics.random_programs import objective


class Views(nn.Module):
    """A value with views of views, and gradients with as many, that ask for the same layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(1, dtype=torch.float64))
        self.gain, self.offset = (nn.Parameter(torch.full((1,), x, dtype=torch.float64)) for x in (1.5, 0.5))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        least = x.amin(1, keepdim=True)
        normed = F.group_norm(x, 1, self.scale)
        flat = normed.flatten()
        ranked = flat.gather(-1, flat.argsort(-1, descending=True))
        centred = F.batch_norm(least, self.mean, self.variance.abs_(), self.gain, self.offset, training=True)
        chosen = (normed[1:], normed.take(ids), centred, ranked)
        return objective(chosen), *(out.detach() for out in chosen)


def test_a_shared_reshard_of_a_shared_reshard() -> None:
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ids = torch.tensor([3, 11, 4, 1, 5])
    model = Views()
    model(x, ids)[0].backward()
    plan = fsdp("dp", level=2) | Plan(params={"scale": ("dp",)}, inputs={"x": ("dp", "tp"), "ids": ("dp",)})
    sim = shardc.Simulation(shardc.compile(model, Mesh(dp=2, tp=2), plan, backend="eager"))
    sim(x.detach(), ids)
    sim.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(sim.grad(name), p.grad, rtol=1e-9, atol=1e-12)
