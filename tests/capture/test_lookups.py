"""Lookups whose indices are places in order: the same values and gradients, without a pending sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from tests.models.alike import trains_alike

ROWS, COLUMNS = 4, 6
# a lookup, and whether rows stay where they are
CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "all of both dims": (lambda x, at: x[rows()[:, None], columns()], True),
    "turned": (lambda x, at: x[rows(), columns()[:, None]], True),
    "rows, and a choice of columns": (lambda x, at: x[rows()[:, None], at[0]], True),
    "a choice of columns, turned": (lambda x, at: x[rows(), at[0][:, None]], True),
    "rows, in a larger result": (lambda x, at: x[rows()[:, None, None], at[:, :2]], True),
    "a column of each row": (lambda x, at: x[rows(), at[:, 0]], False),
    "columns of each row": (lambda x, at: x[rows()[:, None], at], False),
    "the diagonal": (lambda x, at: x[rows(), rows()], False),
    "rows of a part": (lambda x, at: x[torch.arange(3)[:, None], columns()], False),
    "rows backwards": (lambda x, at: x[rows().flip(0)[:, None], columns()], False),
    "three dims": (lambda x, at: x.view(ROWS, 2, 3)[rows()[:, None], torch.arange(2)], True),
    "three dims, the first and the last": (
        lambda x, at: x.view(ROWS, 2, 3)[rows()[:, None], at[0, :4] % 2, torch.arange(3)[:, None, None]],
        True,
    ),
}


def rows() -> Tensor:
    return torch.arange(ROWS)


def columns() -> Tensor:
    return torch.arange(COLUMNS)


class Net(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.layer, self.case = nn.Linear(COLUMNS, COLUMNS), case

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return torch.tanh(CASES[self.case][0](self.layer(x), at))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 3}])
def test_values_and_gradients_are_the_same(case: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, COLUMNS), torch.randint(0, COLUMNS, (ROWS, COLUMNS))
    plan = shardc.ddp("dp") | shardc.tp("tp", colwise=["layer"]) if "tp" in mesh else shardc.ddp("dp")
    trains_alike(Net(case), inputs, mesh, plan, steps=1)


@pytest.mark.parametrize("case", [case for case, (_, stay) in CASES.items() if stay])
def test_rows_stay_where_they_are(case: str) -> None:
    module = shardc.compile(Net(case), shardc.Mesh(dp=2), shardc.ddp("dp"), loss=lambda x: x.sum(), backend="eager")
    program = module.lower(torch.randn(ROWS, COLUMNS), torch.randint(0, COLUMNS, (ROWS, COLUMNS)))
    assert isinstance(program, shardc.Program)
    forward = program.text("propagate").partition("backward:")[0]
    assert [line for line in forward.splitlines() if "%index" in line.split(":")[0] and "{sum:dp}" in line] == []
