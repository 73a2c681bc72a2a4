"""Regions on real gloo ranks: what `local_map` and `torch.utils.checkpoint` say is what one device computes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from tests.models import test_checkpoint, test_local_map
from tests.ranks import run_ranks


def equals_one_device(model: torch.nn.Module, axis: str, plan: shardc.Plan, backend: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    module = shardc.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)), plan, backend=backend)
    module(module.shard_inputs(x)).square().mean().backward()
    model(x).square().mean().backward()
    for name, param in model.named_parameters():
        grad = module.get_parameter(name).grad
        assert isinstance(grad, DTensor) and param.grad is not None
        torch.testing.assert_close(grad.full_tensor(), param.grad, rtol=1e-4, atol=1e-6)


def local_map(name: str, backend: str) -> None:
    """One of the regions of the simulated tests, on the axis ``tp`` alone."""
    function, ins, outs = test_local_map.REGIONS[name]
    ins, outs = tuple(spec.replace("@dp", "_") for spec in ins), outs.replace("@dp", "_")
    torch.manual_seed(0)
    net = test_local_map.Net(shardc.local_map(function, in_layouts=ins, out_layouts=outs))
    equals_one_device(net, "tp", shardc.Plan(params={"up": "@tp, _", "down": "_, @tp"}), backend)


def checkpointed(backend: str) -> None:
    torch.manual_seed(0)
    equals_one_device(test_checkpoint.Net(), "dp", shardc.fsdp("dp", level=3, threshold=0), backend)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        *(partial(local_map, name, "eager") for name in test_local_map.REGIONS),
        partial(local_map, "gather and scatter", "inductor"),
        partial(local_map, "index", "inductor"),
        partial(checkpointed, "eager"),
        partial(checkpointed, "inductor"),
    )
