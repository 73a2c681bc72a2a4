"""Random draws do not depend on the mesh: the same masks and the same training on any of them, in float64."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.runtime.sim.training import Simulation

BATCH, WIDTH, STEPS = 12, 12, 3

PLANS = {
    "one": ({"dp": 1}, lambda: shardc.ddp("dp")),
    "ddp of 2": ({"dp": 2}, lambda: shardc.ddp("dp")),
    "fsdp of 3": ({"dp": 3}, lambda: shardc.fsdp("dp", threshold=0)),
    "fsdp and tp": ({"dp": 2, "tp": 2}, lambda: shardc.fsdp("dp", threshold=0) | tp("tp")),
    "tp of 3": ({"tp": 3}, lambda: tp("tp")),
}


def tp(axis: str) -> shardc.Plan:
    return shardc.tp(axis, colwise=["up"], rowwise=["down"])


class Net(nn.Module):
    """Dropout before, between and after two linear layers, and noise of other kinds."""

    def __init__(self, region: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.region = region

    def hidden(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.up(F.dropout(x, 0.1))), 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = checkpoint(self.hidden, x, use_reentrant=False) if self.region else self.hidden(x)
        y = self.down(h) + 0.01 * torch.randn_like(x)
        return F.dropout(y, 0.3), torch.bernoulli(torch.sigmoid(x))


def trained(mesh: dict[str, int], plan: shardc.Plan, region: bool = False) -> list[Tensor]:
    """The outputs of each step, then the parameters."""
    torch.manual_seed(0)
    model = Net(region).double()
    x, target = torch.randn(BATCH, WIDTH, dtype=torch.float64), torch.randn(BATCH, WIDTH, dtype=torch.float64)
    module = shardc.compile(model, shardc.Mesh(mesh), plan, loss=lambda out, target: (out[0] - target).square().mean())
    sim = Simulation(module)
    step = sim.optimizers(lambda params: torch.optim.SGD(params, lr=0.1))
    seen = []
    for _ in range(STEPS):
        seen.append(sim(x, target))
        sim.backward()
        step()
    return [*seen, *(sim.param(name) for name, _ in model.named_parameters())]


def drawn(mesh: dict[str, int], plan: shardc.Plan) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net().double()
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    return Simulation(shardc.compile(model, shardc.Mesh(mesh), plan))(x, grad=False)


@pytest.mark.parametrize("name", [name for name in PLANS if name != "one"])
def test_masks_are_the_same_bit_for_bit(name: str) -> None:
    reference, ours = (drawn(mesh, plan()) for mesh, plan in (PLANS["one"], PLANS[name]))
    assert 0 < (reference[0] == 0).sum() < reference[0].numel()
    assert torch.equal(reference[0] == 0, ours[0] == 0)
    assert torch.equal(reference[1], ours[1])
    torch.testing.assert_close(ours[0], reference[0], rtol=1e-12, atol=1e-12)


@lru_cache
def trained_on_one() -> list[Tensor]:
    return trained(PLANS["one"][0], PLANS["one"][1]())


@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("name", [name for name in PLANS if name != "one"])
def test_training_is_the_same(name: str, region: bool) -> None:
    """On one rank without a checkpoint region, on several with one too."""
    reference, ours = trained_on_one(), trained(PLANS[name][0], PLANS[name][1](), region)
    assert len({x.item() for x in reference[:STEPS]}) == STEPS, "each step draws anew"
    for got, want in zip(ours, reference, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class Scaled(nn.Module):
    """Its output shows the mask of forward, the gradient of its parameter that of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(BATCH, WIDTH))

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.dropout(x * self.scale, 0.5)), 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.dropped, x, use_reentrant=False)


SCALED = {
    "ddp of 2": (shardc.Mesh(dp=2), shardc.ddp("dp")),
    "fsdp of 3": (shardc.Mesh(dp=3), shardc.fsdp("dp", threshold=0)),
    "fsdp and tp": (shardc.Mesh(dp=2, tp=2), shardc.fsdp("dp", threshold=0) | shardc.Plan(params={"scale": "_, @tp"})),
}


@pytest.mark.parametrize("name", SCALED)
def test_backward_draws_the_masks_of_forward(name: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(BATCH, WIDTH, dtype=torch.float64) + 1
    module = shardc.compile(Scaled().double(), *SCALED[name])
    program = module.lower(x)
    sim = Simulation(module)
    out = sim(x)
    sim.backward(torch.ones_like(out))
    assert program.backward is not None
    assert any("tanh" in str(node.target) for node in program.backward.graph.nodes), "it is computed again"
    assert 0 < (out == 0).sum() < out.numel()
    assert torch.equal(out == 0, sim.grad("scale") == 0)


def test_a_step_repeats_with_its_seed() -> None:
    again = trained(PLANS["one"][0], PLANS["one"][1]())
    assert all(torch.equal(a, b) for a, b in zip(trained_on_one(), again, strict=True))
