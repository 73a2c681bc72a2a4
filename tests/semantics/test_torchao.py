"""Layers that torchao has quantised, with adapters beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardc
from tests.semantics.quantised import Adapted, loss

CONFIGS = {
    "Int8WeightOnlyConfig": {"version": 2},
    "Int8DynamicActivationInt8WeightConfig": {"version": 2},
    "Float8WeightOnlyConfig": {},
    "IntxWeightOnlyConfig": {},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_adapters_train(config: str) -> None:
    torchao: Any = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(64, 128), nn.ReLU(), Adapted(128, 64))
    made = getattr(torchao, config)(**CONFIGS[config])
    torchao.quantize_(model, made, filter_fn=lambda module, name: name.endswith("base"))
    for layer in (model[0], model[2]):
        layer.base.requires_grad_(False)
    x, target = torch.rand(8, 64), torch.rand(8, 64)
    expected = loss(model(x), target)
    expected.backward()
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp", 3), loss=loss, backend="eager")
    run = shardc.Simulation(module)
    torch.testing.assert_close(run(x, target), expected.detach())
    run.backward()
    for name, param in model.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(run.ranks.assemble(run.grads[name], run.storages[name]), param.grad)
