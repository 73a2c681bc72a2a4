"""Models and plans that do not run in microbatches are refused with the op, its line and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import PlanError
from tests.microbatches.programs import batch_norm

PLAN = shardc.fsdp("dp") | shardc.microbatches(2)


def test_batch_norm() -> None:
    case = batch_norm()
    module = shardc.compile(case.model, shardc.Mesh(dp=2), PLAN, loss=case.loss)
    with pytest.raises(PlanError, match=r"of module 'norm'.*needed, one after the other") as error:
        module.lower(*case.args)
    text = str(error.value)
    assert "plan entry: microbatches(2)" in text and "convnet.py:" in text and "GroupNorm" in text


def test_a_sequence_in_the_place_of_the_batch() -> None:
    """Attention is refused if microbatches split its sequence; a plan says which dim is the batch."""
    layer, x = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).double(), torch.randn(8, 4, 4, dtype=torch.float64)
    sequence = shardc.compile(layer, shardc.Mesh(dp=2), PLAN, backend="eager")
    with pytest.raises(PlanError, match="which split dim 0 of 'src': .*needed, one after the other") as error:
        sequence.lower(x)
    assert "if that is not the batch, say which dim is, as by Plan(inputs={'src': '_, @dp, _'})" in str(error.value)
    sim = shardc.Simulation(
        shardc.compile(layer, shardc.Mesh(dp=2), PLAN | shardc.Plan(inputs={"src": "_, @dp, _"}), backend="eager")
    )
    torch.testing.assert_close(sim(x), layer(x).detach(), rtol=1e-9, atol=1e-12)


class Counts(nn.Module):
    """Writes what it last saw to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.copy_(x)
        return self.linear(x).square().mean()


def test_a_buffer_of_the_batch() -> None:
    """It is gathered whole, from the microbatches too."""
    torch.manual_seed(0)
    model = Counts()
    x = torch.randn(8, 4)
    sim = shardc.Simulation(shardc.compile(model, shardc.Mesh(dp=2), PLAN, backend="eager"))
    loss = sim(x)
    torch.testing.assert_close(loss, model(x).detach())
    torch.testing.assert_close(sim.buffer("seen"), x)


def test_a_count_below_one() -> None:
    with pytest.raises(PlanError, match="count"):
        shardc.microbatches(0)


def test_an_axis_of_that_name() -> None:
    with pytest.raises(PlanError, match="'micro' is the axis of microbatches"):
        shardc.compile(nn.Linear(4, 4), shardc.Mesh(micro=2), shardc.ddp("micro") | shardc.microbatches(2))


def test_an_ordinary_axis_may_be_called_micro() -> None:
    sim = shardc.Simulation(shardc.compile(nn.Linear(4, 4), shardc.Mesh(micro=2), shardc.ddp("micro"), backend="eager"))
    assert sim(torch.randn(4, 4)).shape == (4, 4)
