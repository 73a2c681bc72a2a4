"""What a call with microbatches returns beside its loss, and backwards that use it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc

DP = shardc.Mesh(dp=2)
PLAN = shardc.fsdp("dp") | shardc.microbatches(4)


class Several(nn.Module):
    """Returns a loss, rows of results, a second loss and a number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        hidden = torch.relu(self.first(x))
        out = self.second(hidden)
        return {
            "loss": F.mse_loss(out, target),
            "out": out,
            "rows": x.shape[0] * torch.ones((), dtype=torch.long),
            "sparsity": hidden.abs().mean(),
        }


def setup(plan: shardc.Plan = PLAN) -> tuple[nn.Module, shardc.Simulation, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Several().double()
    batch = torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)
    return model, shardc.Simulation(shardc.compile(model, DP, plan, backend="eager")), batch


def gradients_agree(model: nn.Module, sim: shardc.Simulation) -> None:
    for name, p in model.named_parameters():
        if p.grad is None:
            assert name not in sim.grads
        else:
            torch.testing.assert_close(sim.grad(name), p.grad, rtol=1e-9, atol=1e-14)


def test_outputs_are_of_the_whole_batch() -> None:
    model, sim, batch = setup()
    expected, results = model(*batch), sim(*batch)
    for key, value in expected.items():
        torch.testing.assert_close(results[key], value.detach() if value.requires_grad else value, rtol=1e-12, atol=0)
    assert sim.buffer("calls") == 1
    sim.backward(torch.ones((), dtype=torch.float64), None, None)
    expected["loss"].backward()
    gradients_agree(model, sim)


def test_a_factor_on_the_loss() -> None:
    model, sim, batch = setup()
    sim(*batch)
    sim.backward(torch.tensor(0.25, dtype=torch.float64), None, None)
    (model(*batch)["loss"] / 4).backward()
    gradients_agree(model, sim)


@pytest.mark.filterwarnings("ignore:a backward uses")
def test_two_losses() -> None:
    model, sim, batch = setup()
    sim(*batch)
    half = torch.tensor(0.5, dtype=torch.float64)
    sim.backward(torch.ones((), dtype=torch.float64), None, half)
    expected = model(*batch)
    (expected["loss"] + 0.5 * expected["sparsity"]).backward()
    gradients_agree(model, sim)


def test_a_loss_outside_of_the_module_runs_again_and_says_so() -> None:
    model, sim, batch = setup()
    weight = torch.randn(16, 4, dtype=torch.float64)
    sim(*batch)
    with pytest.warns(shardc.ShardcWarning, match="a backward uses outputs 1 of a module with microbatches"):
        sim.backward(torch.ones((), dtype=torch.float64), weight, None)
    expected = model(*batch)
    (expected["loss"] + (expected["out"] * weight).sum() / 2).backward()  # the mean over two ranks
    gradients_agree(model, sim)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_a_model_without_a_loss() -> None:
    """Its call runs forward alone; its backward runs the microbatches with their parts of the gradient."""
    torch.manual_seed(0)
    model, x = Features().double(), torch.randn(16, 8, dtype=torch.float64)
    sim = shardc.Simulation(shardc.compile(model, DP, PLAN | shardc.Plan(reduce="sum"), backend="eager"))
    weight = torch.randn(16, 4, dtype=torch.float64)
    torch.testing.assert_close(sim(x), model(x).detach(), rtol=1e-12, atol=0)
    sim.backward(weight)
    (model(x) * weight).sum().backward()
    gradients_agree(model, sim)


def test_without_gradients_only_forward_runs() -> None:
    model, sim, batch = setup()
    results = sim(*batch, grad=False)
    torch.testing.assert_close(results["loss"], model(*batch)["loss"].detach(), rtol=1e-12, atol=0)
    with pytest.raises(shardc.ShardcError, match="no forward"):
        sim.backward()


class Alike(nn.Module):
    """Parameters whose gradients are one tensor, or one number, before anybody scales them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.first, self.second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.summed = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.first + self.second).square().mean() + self.summed.sum()


def test_a_factor_scales_each_gradient_once() -> None:
    torch.manual_seed(0)
    model, x = Alike().double(), torch.randn(16, 8, dtype=torch.float64)
    sim = shardc.Simulation(shardc.compile(model, DP, PLAN, backend="eager"))
    sim(x)
    sim.backward(torch.tensor(3.0, dtype=torch.float64))
    (3 * model(x)).backward()
    gradients_agree(model, sim)


class Averages(nn.Module):
    """Reads a buffer, and changes it for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) * self.scale.clone()
        self.scale.mul_(2.0)
        return out


def test_a_second_run_reads_the_buffers_of_the_call() -> None:
    torch.manual_seed(0)
    model, x = Averages().double(), torch.randn(16, 8, dtype=torch.float64)
    sim = shardc.Simulation(shardc.compile(model, DP, PLAN | shardc.Plan(reduce="sum"), backend="eager"))
    for _ in range(2):
        sim.grads.clear()
        model.zero_grad()
        out = sim(x)
        sim.backward(2 * out)
        model(x).square().sum().backward()
        gradients_agree(model, sim)
    torch.testing.assert_close(sim.buffer("scale"), model.scale)
