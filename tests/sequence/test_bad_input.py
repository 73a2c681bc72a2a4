"""What cannot be split is refused, or said, with the plan entry and the line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import PlanError
from tests.sequence.models import batch, build

MESH = shardc.Mesh(cp=4)


def lower(plan: shardc.Plan, mesh: shardc.Mesh = MESH, **options: object) -> shardc.Program:
    return shardc.compile(build("own", **options), mesh, plan, backend="eager").lower(**batch())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "rings"}, "method"),
        ({"order": "zigzag"}, "order"),
        ({"dim": 0}, "has the batch"),
        ({"dim": "1"}, "dim"),
    ],
)
def test_unknown_options(options: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        shardc.cp("cp", **options)


def test_heads_that_the_axis_does_not_divide() -> None:
    with pytest.raises(PlanError, match="has 2 heads, which cp of 4 ranks does not divide") as caught:
        lower(shardc.cp("cp", method="ulysses"), heads=2)
    assert "models.py:" in str(caught.value) and 'cp("cp", method="ulysses")' in str(caught.value)


def test_a_dim_that_no_input_has() -> None:
    with pytest.raises(PlanError, match="no input has a dim 2"):
        lower(shardc.cp("cp", dim=2))


def test_an_axis_that_there_is_not() -> None:
    with pytest.raises(PlanError, match="unknown mesh axis 'sp'"):
        lower(shardc.cp("sp"))


def test_an_axis_of_tensor_parallelism() -> None:
    with pytest.raises(PlanError, match="cp"):
        lower(shardc.cp("cp") | shardc.tp("cp", colwise=["layers.*.q"]))


class Plain(nn.Module):
    """Attention that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return ((q @ k.transpose(1, 2)).softmax(-1) @ v).square().mean()


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_that_is_written_out(method: str) -> None:
    """It is right all the same, and a warning says what the method is not applied to."""
    torch.manual_seed(0)
    model, x = Plain().double(), torch.randn(2, 8, 8, dtype=torch.float64)
    module = shardc.compile(model, MESH, shardc.cp("cp", method=method), backend="eager")
    sim = shardc.Simulation(module)
    with pytest.warns(shardc.ShardcWarning, match=rf"(?s)method '{method}' is not applied: .*test_bad_input.py:"):
        made = sim(x)
    assert abs(made - model(x)) < 1e-9


def test_a_model_without_attention() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.linear(x)).mean()

    module = shardc.compile(Rows(), MESH, shardc.cp("cp", method="ring"), backend="eager")
    with pytest.raises(PlanError, match="no attention is computed"):
        module.lower(torch.randn(2, 8, 8))
    shardc.compile(Rows(), MESH, shardc.cp("cp"), backend="eager").lower(torch.randn(2, 8, 8))
