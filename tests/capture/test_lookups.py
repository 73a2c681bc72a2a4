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
    "a column of each row": (lambda x, at: x[rows(), at[:, 0]], True),
    "columns of each row": (lambda x, at: x[rows()[:, None], at], True),
    "the diagonal": (lambda x, at: x[rows(), rows()], True),
    "a column of each row, from the end": (lambda x, at: x[rows(), (at[:, 0] - COLUMNS).int()], True),
    "a column of each row, by Python's range": (lambda x, at: x[range(ROWS), at[:, 0]], True),
    "a column of each row, by a list": (lambda x, at: x[torch.tensor([0, 1, 2, 3]), at[:, 0]], True),
    "columns of each row, turned": (lambda x, at: x[rows(), at.t()], True),
    "a table of each row": (lambda x, at: x[rows()[:, None, None], at[:, :4].view(ROWS, 2, 2)], True),
    "a row of a matrix of each row": (lambda x, at: x.view(ROWS, 3, 2)[rows(), at[:, 0] % 3], True),
    "rows of a matrix of each row": (lambda x, at: x.view(ROWS, 3, 2)[rows()[:, None], at % 3], True),
    "an entry of a matrix of each row": (lambda x, at: x.view(ROWS, 3, 2)[rows(), at[:, 0] % 3, at[:, 1] % 2], False),
    "a matrix of each row": (lambda x, at: x.view(ROWS, 2, 3, 1)[rows(), at[:, 0] % 2], True),
    "written": (lambda x, at: x.index_put((rows(), at[:, 0]), x[:, 1] * 2), True),
    "written, one value for all": (lambda x, at: x.index_put((rows(), at[:, 0]), x.new_ones(())), True),
    "written in two columns": (lambda x, at: x.index_put((rows()[:, None], at[:, :1] % 3 + PAIR), x[:, :2] * 2), True),
    "columns written": (lambda x, at: x.index_put((rows()[:, None], columns()[:3]), x[:, 3:] * 2), True),
    "added": (lambda x, at: x.index_put((rows()[:, None], at), x * 2, accumulate=True), True),
    "added, one row for all": (
        lambda x, at: x.index_put((rows()[:, None], at), x[0, 0].detach(), accumulate=True),
        True,
    ),
    "added to zeros": (lambda x, at: torch.zeros_like(x).index_put((rows(), at[:, 0]), x[:, 0], accumulate=True), True),
    "columns added": (lambda x, at: x.index_put((rows()[:, None], columns()), x * 2, accumulate=True), True),
    "each written several times": (lambda x, at: x.index_put((rows()[:, None, None], at), x[:1, :1] * 2), True),
    "each added several times": (
        lambda x, at: x.index_put((rows()[:, None], at[:1].expand(ROWS, -1)), x * 2, accumulate=True),
        True,
    ),
    "rows of a part": (lambda x, at: x[torch.arange(3)[:, None], columns()], False),
    "rows backwards": (lambda x, at: x[rows().flip(0)[:, None], columns()], False),
    "three dims": (lambda x, at: x.view(ROWS, 2, 3)[rows()[:, None], torch.arange(2)], True),
    "three dims, the first and the last": (
        lambda x, at: x.view(ROWS, 2, 3)[rows()[:, None], at[0, :4] % 2, torch.arange(3)[:, None, None]],
        True,
    ),
}


PAIR = torch.arange(2)


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
    """No lookup, and no gradient of one, is a pending sum."""
    module = shardc.compile(Net(case), shardc.Mesh(dp=2), shardc.ddp("dp"), loss=lambda x: x.sum(), backend="eager")
    program = module.lower(torch.randn(ROWS, COLUMNS), torch.randint(0, COLUMNS, (ROWS, COLUMNS)))
    assert isinstance(program, shardc.Program)
    names = ("index", "gather", "scatter")
    pending = [
        line
        for line in program.text("propagate").splitlines()
        if any(name in line.split(":")[0] for name in names) and "{sum:dp}" in line.split("=")[0]
    ]
    assert pending == []


@pytest.mark.parametrize("case", ["a column of each row", "columns of each row", "rows of a matrix of each row"])
def test_microbatches(case: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, COLUMNS), torch.randint(0, COLUMNS, (ROWS, COLUMNS))
    trains_alike(Net(case), inputs, {"dp": 1}, shardc.ddp("dp") | shardc.microbatches(2), steps=1)


PLACES = torch.arange(ROWS)


class ByGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = list(range(ROWS))

    def forward(self, x: Tensor, at: Tensor, listed: bool) -> Tensor:
        return x[torch.tensor(self.places) if listed else PLACES, at[:, 0]]


@pytest.mark.parametrize("listed", [True, False])
def test_places_that_change_after_capture(listed: bool) -> None:
    x, at = torch.randn(ROWS, COLUMNS), torch.randint(0, COLUMNS, (ROWS, COLUMNS))
    model = ByGlobal()
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.ddp("dp"), backend="eager")
    simulation = shardc.Simulation(module)
    try:
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(simulation(x, at, listed), model(x, at, listed))
            PLACES.copy_(PLACES.flip(0))
            module.places.reverse()
            if module.places is not model.places:
                model.places.reverse()
    finally:
        PLACES.copy_(torch.arange(ROWS))
