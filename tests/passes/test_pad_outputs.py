"""Constants beside outputs of padded rows: numbers, strings and None are returned as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc


class Counted(nn.Module):
    """Returns its loss beside what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"loss": self.layers(x).square().mean(), "rows": x.shape[0], "more": ["text", None, 2.5, True]}


PLANS = {
    "fsdp": ({"dp": 2}, shardc.fsdp("dp")),
    "microbatches": ({"dp": 2}, shardc.fsdp("dp") | shardc.microbatches(3)),
    "stages": ({"pp": 2}, shardc.pp("pp", microbatches=3)),
}


@pytest.mark.parametrize("name", PLANS)
def test_constants(name: str) -> None:
    mesh, plan = PLANS[name]
    model, x = Counted().double(), torch.randn(7, 4, dtype=torch.float64)
    sim = shardc.Simulation(shardc.compile(model, shardc.Mesh(mesh), plan, backend="eager"))
    results, expected = sim(x), model(x)
    torch.testing.assert_close(results.pop("loss"), expected.pop("loss").detach())
    assert results == expected
