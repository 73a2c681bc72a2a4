"""Layers that pass a state along a split sequence equal one device, and send no more of the sequence than is said."""

from __future__ import annotations

import pytest
import torch

import shardc
from tests.models.alike import trains_alike
from tests.sequence.state_space import LAYERS, WIDTH, build

MESHES = (({"cp": 2}, 16), ({"cp": 3}, 12), ({"cp": 4}, 16), ({"dp": 2, "cp": 2}, 16), ({"cp": 2}, 20), ({"cp": 3}, 16))


@pytest.mark.parametrize("order", ["contiguous", "striped"])
@pytest.mark.parametrize(("mesh", "length"), MESHES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_equals_one_device(layer: str, mesh: dict[str, int], length: int, order: str) -> None:
    cp = shardc.cp("cp", order=order)
    plan = shardc.fsdp(("dp", "cp")) | cp if "dp" in mesh else cp
    trains_alike(build(layer), (torch.randn(2, length, WIDTH),), mesh, plan, steps=1)
