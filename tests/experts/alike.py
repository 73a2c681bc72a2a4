"""Two steps of training in simulation beside one device, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import shardc
from tests.models.alike import relative
from tests.models.zoo import in_float64


def trains_alike(
    make: Callable[[], nn.Module], given: dict[str, Tensor], mesh: dict[str, int], plan: shardc.Plan, **options: Any
) -> shardc.Simulation:
    """Compares loss, gradients and parameters of two steps of AdamW to 1e-9."""
    with in_float64():
        model = make()
        module = shardc.compile(make(), shardc.Mesh(mesh), plan, backend="eager", **options)
        sim = shardc.Simulation(module)
        step = sim.optimizers(lambda shards: torch.optim.AdamW(shards, lr=1e-2))
        reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for at in range(2):
            loss = model(**given)["loss"]
            reference.zero_grad()
            loss.backward()
            made = sim(**given)
            outputs = sum(isinstance(x, Tensor) for x in pytree.tree_leaves(made))
            assert relative(made["loss"], loss.detach()) < 1e-9, f"loss of step {at}"
            sim.backward(torch.ones((), dtype=torch.float64), *[None] * (outputs - 1))
            for name, param in model.named_parameters():
                if param.grad is not None:
                    assert relative(sim.grad(name), param.grad) < 1e-9, f"gradient of {name} in step {at}"
            reference.step()
            step()
        for name, param in model.named_parameters():
            assert relative(sim.param(name), param.detach()) < 1e-9, name
    return sim
