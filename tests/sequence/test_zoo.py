"""Attention as people write it, by every method: loss and gradients equal one device, to 1e-9 in float64."""

from __future__ import annotations

import pytest
import torch

import shardc
from tests.sequence.zoo import HEADS, MODELS, build

MESHES = (({"cp": 2}, 12), ({"cp": 3}, 10), ({"dp": 2, "cp": 2}, 11))
METHODS = ("gather", "ring", "ulysses", "auto")
CASES = [(*case, way) for case in MESHES for way in METHODS if way != "ulysses" or HEADS % case[0]["cp"] == 0]


@pytest.mark.parametrize(("mesh", "length", "method"), CASES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::shardc.ShardcWarning")
@pytest.mark.long
def test_equals_one_device(name: str, method: str, mesh: dict[str, int], length: int) -> None:
    plan = shardc.cp("cp", method=method)
    if "dp" in mesh:
        plan = shardc.fsdp(("dp", "cp")) | plan
    x, y = torch.randn(2, 4, length, 16, dtype=torch.float64)
    model = build(name)
    loss = model(x, y)
    loss.backward()
    sim = shardc.Simulation(shardc.compile(build(name), shardc.Mesh(mesh), plan, backend="eager"))
    assert abs(sim(x, y) - loss.detach()) < 1e-9
    sim.backward()
    for key, param in model.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(sim.grad(key), param.grad, rtol=0, atol=1e-9)
