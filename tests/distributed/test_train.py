"""Training on real gloo ranks equals one device: losses, gradients, the state after three AdamW steps, in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from tests.models.test_matrix import MODELS, PLANS, batch_of, largest_relative
from tests.ranks import run_ranks

STEPS = 3
CLOSE = 1e-4


def trains_as_one_device(model_name: str, plan: str, mesh: dict[str, int], backend: str) -> None:
    source, tp, loss = MODELS[model_name]
    torch.manual_seed(0)
    model, args = source.tiny()
    drafts = [batch_of(model_name, args, model.double()) for _ in range(STEPS)]
    batches = [tuple(x.float() if x.is_floating_point() else x for x in batch) for batch in drafts]
    torch.manual_seed(1)
    model, _ = source.tiny()
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    module = shardc.compile(model, device_mesh, PLANS[plan](tp), loss=loss, backend=backend)
    assert isinstance(module, type(model))
    ours = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    for at, (x, y) in enumerate(batches):
        value = module(*module.shard_inputs(x, y))
        value.backward()
        expected = loss(model(x), y)
        expected.backward()
        assert largest_relative(value.detach(), expected.detach()) < CLOSE, f"loss of step {at}"
        floor = 1e-4 * max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
        for name, p in model.named_parameters():
            _equal(module.get_parameter(name).grad, p.grad, f"gradient of {name} in step {at}", floor)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    assert list(module.state_dict()) == list(model.state_dict())
    for name, p in model.named_parameters():
        _equal(module.get_parameter(name), p, f"{name} after {STEPS} steps")
    for name, buffer in model.named_buffers():
        _equal(module.get_buffer(name), buffer, f"buffer {name}")
    x, _ = batches[0]
    with torch.no_grad():
        logits = module.eval()(module.shard_inputs(x))
        rows = module.shard_inputs(model.eval()(x))
    assert largest_relative(logits, rows) < CLOSE, "evaluation without the loss"


def _equal(ours: Any, theirs: Any, what: str, floor: float = 1e-12) -> None:
    assert (ours is None) == (theirs is None), f"{what}: on one side only"
    if ours is None:
        return
    whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
    assert largest_relative(whole.detach().float(), theirs.detach().float(), floor) < CLOSE, what


def check(model: str, plan: str, mesh: dict[str, int], backend: str = "eager") -> Any:
    return partial(trains_as_one_device, model, plan, mesh, backend)


def test_two_ranks() -> None:
    run_ranks(
        2,
        check("mlp", "ddp", {"dp": 2}),
        check("llama", "fsdp1", {"dp": 2}),
        check("llama", "fsdp3", {"dp": 2}),
        check("gpt2", "tp", {"tp": 2}),
        check("gpt2", "tp+sp", {"tp": 2}),
        check("vit", "fsdp2", {"dp": 2}),
        check("convnet", "ddp", {"dp": 2}),
        check("convnet", "tp", {"tp": 2}),
    )


@pytest.mark.slow
def test_two_ranks_through_inductor() -> None:
    run_ranks(
        2,
        check("mlp", "fsdp3", {"dp": 2}, "inductor"),
        check("llama", "fsdp3", {"dp": 2}, "inductor"),
        check("gpt2", "tp+sp", {"tp": 2}, "inductor"),
        check("convnet", "fsdp3", {"dp": 2}, "inductor"),
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(
        4,
        check("llama", "fsdp+tp", {"dp": 2, "tp": 2}),
        check("gpt2", "fsdp+tp+sp", {"dp": 2, "tp": 2}),
        check("vit", "hsdp", {"rep": 2, "dp": 2}),
        check("convnet", "fsdp3", {"dp": 4}),
        check("mlp", "fsdp+tp", {"dp": 2, "tp": 2}, "inductor"),
    )


@pytest.mark.long
def test_four_ranks_through_inductor() -> None:
    run_ranks(
        4,
        check("llama", "fsdp+tp", {"dp": 2, "tp": 2}, "inductor"),
        check("convnet", "hsdp", {"rep": 2, "dp": 2}, "inductor"),
    )
