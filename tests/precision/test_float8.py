"""Products in float8 on simulated ranks: the numbers of one device, whatever the mesh."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardc
from shardc import Mesh, ddp, fsdp, hsdp, precision, tp
from tests.precision.float8 import case, on_one_device

SPLIT = tp("tp", colwise=["layers.*.gate", "layers.*.up"], rowwise=["layers.*.down"])
SEQUENCE = SPLIT | shardc.Plan(activations={"layers.*": "_, @tp, _", "layers.*.norm": "_, @tp, _"})
PLANS = {
    "ddp2": (Mesh(dp=2), ddp("dp")),
    "fsdp2 level 1": (Mesh(dp=2), fsdp("dp", 1)),
    "fsdp2 level 2": (Mesh(dp=2), fsdp("dp", 2)),
    "fsdp2": (Mesh(dp=2), fsdp("dp")),
    "fsdp3": (Mesh(dp=3), fsdp("dp")),
    "tp2": (Mesh(tp=2), SPLIT),
    "tp3": (Mesh(tp=3), SPLIT),
    "tp+sp": (Mesh(tp=2), SEQUENCE),
    "fsdp+tp": (Mesh(dp=2, tp=2), fsdp("dp") | SPLIT),
    "fsdp+tp+sp": (Mesh(dp=2, tp=2), fsdp("dp") | SEQUENCE),
    "hsdp": (Mesh(rep=2, dp=2), hsdp(shard="dp", replicate="rep")),
}


def float8(scaling: str) -> shardc.Plan:
    return precision(matmul="float8", scaling=scaling, modules="layers")


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_that_of_one_device(name: str, scaling: str) -> None:
    (mesh, plan), (model, x, target) = PLANS[name], case()
    expected = on_one_device(model, scaling, lambda name: name.startswith("layers."))
    loss = F.mse_loss(expected(x), target)
    loss.backward()
    run = shardc.Simulation(shardc.compile(model, mesh, plan | float8(scaling), loss=F.mse_loss, backend="eager"))
    torch.testing.assert_close(run(x, target), loss.detach(), rtol=1e-9, atol=0)
    run.backward()
    for name, p in expected.named_parameters():
        torch.testing.assert_close(run.grad(name), p.grad, rtol=1e-9, atol=1e-12, msg=lambda text: f"{name}: {text}")
