"""Storage split over some ranks of an axis: the same as one device, and reduced over both parts of the axis."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardc
from shardc.cost.model import CostModel
from shardc.ir.comm_volume import tally
from tests.models.alike import trains_alike
from tests.state import model

PLANS = {
    "half": ({"dp": 4}, shardc.fsdp("dp", shard_size=2)),
    "level 1": ({"dp": 4}, shardc.fsdp("dp", level=1, shard_size=2)),
    "none": ({"dp": 4}, shardc.fsdp("dp", shard_size=1)),
    "mixed": ({"dp": 4}, shardc.fsdp("dp", shard_size=2, threshold=200, overrides={"mid.bias": 4, "fused": 1})),
    "of two axes": ({"a": 4, "b": 2}, shardc.fsdp(("a", "b"), shard_size=4)),
    "beside tp": (
        {"dp": 4, "tp": 2},
        shardc.fsdp("dp", shard_size=2) | shardc.tp("tp", colwise=["mid"], rowwise=["back"]),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_as_one_device(name: str) -> None:
    mesh, plan = PLANS[name]
    trains_alike(model(), (torch.randn(8, 5),), mesh, plan)


def test_reduced_over_both_parts() -> None:
    """Where no message costs anything by itself: scattered over the part that splits, summed over the rest."""
    plan = shardc.fsdp("dp", shard_size=2)
    options = shardc.Options(cost=CostModel(latency=0.0))
    module = shardc.compile(
        nn.Linear(64, 64, bias=False), shardc.Mesh(dp=4), plan, loss=F.mse_loss, options=options, backend="eager"
    )
    program = module.lower(torch.empty(8, 64), torch.empty(8, 64))
    assert program.backward is not None
    assert [str(row) for row in tally(program.backward, program.mesh)] == [
        "all_reduce(dp:1x2) x1 8192 B/rank",
        "reduce_scatter(dp:2x2) x1 8192 B/rank",
    ]
