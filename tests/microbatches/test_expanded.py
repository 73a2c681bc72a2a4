"""Parameters that the model repeats for each row of its batch: their values are split over microbatches, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from tests.models.alike import trains_alike

ROWS, LENGTH, WIDTH = 8, 3, 4


class Model(nn.Module):
    """Rows of tokens beside ``token``, which is one for all rows, then two layers."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.token = case, nn.Parameter(torch.randn(1, 1, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(CASES[self.case](self.token, self.first(x)))


def attended(token: Tensor, x: Tensor) -> Tensor:
    query = token.expand(len(x), 2, -1) * torch.tensor([[1.0], [2.0]])
    return F.scaled_dot_product_attention(query, x, x)


def recurrent(token: Tensor, x: Tensor) -> Tensor:
    state = token[0].expand(len(x), -1)
    for at in range(LENGTH):
        state = torch.tanh(state + x[:, at])
    return state


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a class token": lambda token, x: torch.cat([token.expand(len(x), -1, -1), x], 1),
    "a class token, repeated": lambda token, x: torch.cat([x, token.repeat(len(x), 2, 1)], 1),
    "a class token in a dtype": lambda token, x: torch.cat([x, token.to(x.dtype).expand(len(x), -1, -1)], 1),
    "added": lambda token, x: x + token.expand_as(x),
    "in place of tokens": lambda token, x: torch.where(x[..., :1] > 0, x, token.expand(len(x), LENGTH, -1)),
    "stacked": lambda token, x: torch.stack([token[0, 0].expand(len(x), -1), x[:, 0]], 1),
    "the query of an attention": attended,
    "the first state": recurrent,
}


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}, {"pp": 2}])
@pytest.mark.parametrize("case", CASES)
def test_training(case: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    plan = shardc.pp("pp", microbatches=2) if "pp" in mesh else shardc.fsdp("dp") | shardc.microbatches(2)
    trains_alike(Model(case), (torch.randn(ROWS, LENGTH, WIDTH),), mesh, plan, steps=1)


@pytest.mark.parametrize("solver", ["greedy", "exact"])
@pytest.mark.parametrize("case", CASES)
def test_microbatches_compute_their_rows_alone(case: str, solver: str) -> None:
    options = shardc.Options(layout_solver=solver)
    plan = shardc.ddp("dp") | shardc.microbatches(2)
    module = shardc.compile(Model(case), shardc.Mesh(dp=1), plan, loss=lambda x: x.sum(), options=options)
    program = module.lower(torch.randn(ROWS, LENGTH, WIDTH))
    assert isinstance(program, shardc.Program)
    assert "partition.opening" not in " ".join(program.stages), program.text("propagate")
