"""Gradients that are held back, and what else happens meanwhile: freezing, steps of optimizers, zero_grad."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import BackwardError
from tests.ranks import run_ranks
from tests.state import assert_same, batch, model

PLANS = {"ddp": shardc.ddp("dp"), "fsdp3": shardc.fsdp("dp", level=3)}


def compiled(source: nn.Module, name: str) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(source, mesh, PLANS[name], loss=F.mse_loss, backend="eager")


def micro(module: Any, source: nn.Module, seed: int) -> None:
    """The gradient of one micro-batch, on both."""
    x, y = batch(seed)
    module(*module.shard_inputs(x, y)).backward()
    F.mse_loss(source(x), y).backward()


def held(module: Any, source: nn.Module, seed: int) -> None:
    with module.no_sync():
        micro(module, source, seed)


def frozen_while_held(name: str, all_of_it: bool) -> None:
    """What was held back of a parameter reaches its .grad, though it is frozen when that is reduced."""
    source = model()
    module = compiled(source, name)
    held(module, source, 1)
    for net in (module, source):
        net.mid.requires_grad_(False)
        if all_of_it:
            net.odd.requires_grad_(False)
    micro(module, source, 2)
    assert_same(module, source, grads=True)
    held(module, source, 3)
    for net in (module, source):
        net.requires_grad_(True)
    micro(module, source, 4)
    assert_same(module, source, grads=True)


ZERO: dict[str, Callable[[Any, torch.optim.Optimizer], None]] = {
    "optimizer": lambda module, optimizer: optimizer.zero_grad(),
    "optimizer, zeros": lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
    "module": lambda module, optimizer: module.zero_grad(),
}


def dropped(name: str, how: str, wrapped: bool) -> None:
    """A micro-batch that is thrown away takes no part in what comes later."""
    source = model()
    module = compiled(source, name)
    theirs = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    make = (
        partial(shardc.optim.wrap, torch.optim.SGD, module)
        if wrapped
        else partial(torch.optim.SGD, module.parameters())
    )
    ours = make(lr=0.1, momentum=0.9)
    for at in range(2):
        held(module, source, 10 * at + 1)
        ZERO[how](module, ours)
        ZERO[how](source, theirs)
        assert not module.shardc.params.sync.sums
        held(module, source, 10 * at + 2)
        micro(module, source, 10 * at + 3)
        assert_same(module, source, grads=how == "module" or "zeros" not in how)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(module, source)


def only_what_the_optimizer_has(name: str) -> None:
    """zero_grad of an optimizer drops what is held back of its own parameters; other optimizers may step."""
    source = model()
    module = compiled(source, name)
    heads = [torch.optim.SGD(net.mid.parameters(), lr=0.1) for net in (module, source)]
    held(module, source, 1)
    for optimizer in heads:
        optimizer.zero_grad()
    other = nn.Linear(2, 2)
    apart = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(2)).sum().backward()
    apart.step()
    micro(module, source, 2)
    assert_same(module, source, grads=True)


def a_step_on_what_is_held_back(name: str, wrapped: bool) -> None:
    source = model()
    module = compiled(source, name)
    if wrapped:
        optimizer = shardc.optim.wrap(torch.optim.AdamW, module, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    before, zero_grad = {k: v.clone() for k, v in module.state_dict().items()}, torch.optim.Optimizer.zero_grad
    held(module, source, 1)
    with pytest.raises(BackwardError, match=r"AdamW\.step\(\) while the gradient of .* is held back"):
        optimizer.step()
    with pytest.raises(BackwardError, match="clip_grad_norm_"):
        module.clip_grad_norm_(1.0)
    assert not optimizer.state
    assert all(torch.equal(v.to_local() if hasattr(v, "to_local") else v,
                           before[k].to_local() if hasattr(v, "to_local") else before[k])
               for k, v in module.state_dict().items())  # fmt: skip
    micro(module, source, 2)
    optimizer.step()
    assert torch.optim.Optimizer.zero_grad is zero_grad


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        *(partial(frozen_while_held, name, all_of_it) for name in PLANS for all_of_it in (False, True)),
        *(partial(dropped, "ddp", how, False) for how in ZERO),
        partial(dropped, "fsdp3", "optimizer", True),
        *(partial(only_what_the_optimizer_has, name) for name in PLANS),
        partial(a_step_on_what_is_held_back, "ddp", False),
        partial(a_step_on_what_is_held_back, "fsdp3", True),
    )
