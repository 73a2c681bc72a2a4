"""The example of custom code runs, sends no scores and computes nothing whole."""

from __future__ import annotations

import torch

import shardc
from examples import custom_code
from shardc.ir import graph as ir
from shardc.ir import ops


def test_gradients_are_those_of_one_device() -> None:
    """Which the example itself asserts."""
    found = custom_code.gradients(shardc.Mesh(dp=2, tp=2))
    assert set(found) == {"classes.weight", "classes.bias", "gate.weight", "gate.bias"}
    assert all(grad.abs().max() > 0 for grad in found.values())


def test_scores_stay_where_they_are() -> None:
    module = shardc.compile(
        custom_code.Model(),
        shardc.Mesh(dp=2, tp=2),
        shardc.fsdp("dp", threshold=0) | shardc.tp("tp", colwise=["classes"]),
        options=shardc.Options(strict=True),
    )
    graph = module.lower(torch.empty(8, 16)).graph("collectives")
    moved = [ir.value(x.args[0]).shape for x in graph.nodes if x.target in ops.COLLECTIVES]
    assert moved and (8, 32) not in moved
