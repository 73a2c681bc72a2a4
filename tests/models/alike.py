"""Training in simulation beside training on one device, for models that the tests of this folder make up."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import shardc


def relative(ours: Tensor, theirs: Tensor, floor: float = 1e-6) -> float:
    """Error relative to the largest element, or to ``floor`` where the whole tensor is smaller."""
    if not theirs.numel():
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(floor)).item()


def trains_alike(
    model: nn.Module, inputs: tuple[Any, ...], mesh: dict[str, int], plan: shardc.Plan, steps: int = 3
) -> shardc.Simulation:
    """Trains ``model`` in float64 on both sides, and compares outputs, gradients, parameters and buffers to 1e-9.

    The loss is the sum of the means of the squares of all outputs; parameters without a gradient have none on both.
    """
    model = copy.deepcopy(model).double().train()
    inputs = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    def loss(out: Any) -> Tensor:
        return sum((x.double().square().mean() for x in (out if isinstance(out, tuple) else (out,))), torch.zeros(()))

    module = shardc.compile(copy.deepcopy(model), shardc.Mesh(mesh), plan, loss=loss, backend="eager")
    sim = shardc.Simulation(module)
    step = sim.optimizers(lambda shards: torch.optim.AdamW(shards, lr=1e-2))
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for at in range(steps):
        value = loss(model(*inputs))
        reference.zero_grad()
        value.backward()
        assert relative(sim(*inputs), value.detach()) < 1e-9, f"loss of step {at}"
        sim.backward()
        for name, param in model.named_parameters():
            assert (name in sim.grads) == (param.grad is not None), f"{name} has a gradient on one side only"
            if param.grad is not None:
                assert relative(sim.grad(name), param.grad) < 1e-9, f"gradient of {name} in step {at}"
        reference.step()
        step()
        for name, buffer in model.named_buffers():
            assert sim.buffer(name).dtype == buffer.dtype
            assert relative(sim.buffer(name), buffer) < 1e-9, f"buffer {name} after step {at}"
    for name, param in model.named_parameters():
        assert relative(sim.param(name), param.detach()) < 1e-9, f"{name} after {steps} steps"
    return sim
