"""`shardc.optim.wrap`: the same updates as the plain optimizer, and state that looks like its."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import shardc
from shardc.errors import InputError
from tests.distributed.test_checkpoint import STEPS, state_of, train, trained
from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model, sharded, step

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05}),
    "looped": (torch.optim.AdamW, {"lr": 0.05, "fused": False, "foreach": False}),
}


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Vectors without decay, matrices at their own rate, a frozen parameter among them."""
    params = list(module.parameters())
    return [
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in params if p.dim() >= 2], "lr": 0.02},
    ]


def updates_are_the_plain_ones(plan: str, kind: str) -> None:
    cls, options = OPTIMIZERS[kind]
    source = model()
    source.fused.requires_grad_(False)
    module = sharded(source, plan)
    ours = shardc.optim.wrap(cls, module, groups(module), **options)
    theirs = cls(groups(source), **options)
    assert isinstance(ours, cls) and [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    hooked: list[int] = []
    ours.register_step_post_hook(lambda *_: hooked.append(1))
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (ours, theirs)]
    for at in range(4):
        losses = step(module, source, *batch(at))
        close(*losses, f"loss of step {at}")
        close(module.clip_grad_norm_(0.5), clip_grad_norm_(source.parameters(), 0.5), "norm")
        for one, schedule in zip((ours, theirs), schedules, strict=True):
            one.step()
            schedule.step()
            one.zero_grad(set_to_none=at % 2 == 0)
        assert_same(module, source)
    assert len(hooked) == 4, "hooks run once a step"
    for name, param in source.named_parameters():
        mine, state = module.get_parameter(name), theirs.state.get(param, {})
        assert ours.state.get(mine, {}).keys() == state.keys(), name
        for key, x in state.items():
            found = ours.state[mine][key]
            if (
                isinstance(x, torch.Tensor)
                and x.shape == param.shape
                and key not in ("step", "mu_product", "eta", "mu")
            ):
                assert isinstance(found, DTensor) and found.placements == mine.placements, f"{key} of {name}"
    again = shardc.optim.wrap(cls, module, groups(module), **options)
    again.load_state_dict(ours.state_dict())
    step(module, source, *batch(9))
    for one in (again, theirs):
        one.step()
    assert_same(module, source)


def checkpoints_are_the_plain_ones() -> None:
    """Saved from either kind of optimizer, either kind goes on, on another mesh, and so does one device."""
    plain = partial(torch.optim.AdamW, lr=0.05)

    def build(module: nn.Module, wrapped: bool) -> Any:
        return shardc.optim.wrap(torch.optim.AdamW, module, lr=0.05) if wrapped else plain(module.parameters())

    source = trained()
    theirs = plain(source.parameters())
    train(source, theirs, 0)
    saved: list[str] = []
    for wrapped in (True, False):
        shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(shared)
        module = sharded(trained(), "fsdp")
        ours = build(module, wrapped)
        train(module, ours, 0)
        dcp.save(state_of(module, ours), checkpoint_id=shared[0])
        saved += shared
    losses = train(source, theirs, STEPS)
    for folder, plan, wrapped in ((saved[0], "tp", True), (saved[0], "ddp", False), (saved[1], "tp", True)):
        module = sharded(trained(7), plan)
        ours = build(module, wrapped)
        state = state_of(module, ours)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(module, ours, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for mine, right in zip(train(module, ours, STEPS), losses, strict=True):
            close(mine, right, f"loss under {plan}")
        assert_same(module, source)


def steps_survive_changes() -> None:
    """Accumulation, a closure, state and values loaded and dtypes changed between steps."""
    source = model()
    module = sharded(source, "fsdp")
    ours, theirs = (
        shardc.optim.wrap(torch.optim.AdamW, module, lr=0.05),
        torch.optim.AdamW(source.parameters(), lr=0.05),
    )
    for at in range(2):
        step(module, source, *batch(at))
    for one in (ours, theirs):
        one.step()
        one.zero_grad(set_to_none=False)
    step(module, source, *batch(2))
    assert ours.step(lambda: torch.tensor(3.0)).item() == 3.0
    theirs.step()
    assert_same(module, source)
    kept = [deepcopy(one.state_dict()) for one in (ours, theirs)]
    for at in (6, 7):
        step(module, source, *batch(at))
        for one in (ours, theirs):
            one.step()
    for one, state in zip((ours, theirs), kept, strict=True):
        one.load_state_dict(state)
    step(module, source, *batch(8))
    for one in (ours, theirs):
        one.step()
    assert_same(module, source)
    loaded = model(5)
    for one in (module, source):
        one.load_state_dict(loaded.state_dict())
        one.zero_grad()
    step(module, source, *batch(3))
    for one in (ours, theirs):
        one.step()
    assert_same(module, source)
    module.float()
    module.zero_grad()
    module(*(x.float() for x in module.shard_inputs(*batch(4)))).backward()
    before = module.mid.weight.detach().clone()
    shardc.optim.wrap(torch.optim.SGD, module, lr=0.5).step()
    assert not torch.equal(module.mid.weight.to_local(), before.to_local())


def low_precision_gradients_update_as_they_do() -> None:
    """Gradients of another dtype than their parameters: the fused kernel takes none, the loop does."""
    low = shardc.precision(param=torch.bfloat16, keep_low_precision_grads=True)
    plain, wrapped = (sharded(model().float(), "fsdp", more=low) for _ in range(2))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
    ours = shardc.optim.wrap(torch.optim.SGD, wrapped, lr=0.05)
    for at in range(3):
        for module, optimizer in ((plain, theirs), (wrapped, ours)):
            module(*(x.float() for x in module.shard_inputs(*batch(at)))).backward()
            assert module.mid.weight.grad.dtype == torch.bfloat16
            optimizer.step()
            optimizer.zero_grad()
    for mine, right in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.to_local(), right.to_local())


def a_step_is_one_call() -> None:
    """`shardc.train_step` does what the loop does, micro-batches and all, and leaves no gradients."""
    source = model()
    module = sharded(source, "fsdp")
    theirs = torch.optim.AdamW(source.parameters(), lr=0.05)
    train_step = shardc.train_step(module, shardc.optim.wrap(torch.optim.AdamW, module, lr=0.05), max_norm=0.5)
    for at in range(3):
        with module.no_sync():
            first = train_step(*module.shard_inputs(*batch(at)))
        second = train_step(*module.shard_inputs(*batch(at + 10)))
        for value, seed in ((first, at), (second, at + 10)):
            x, y = batch(seed)
            expected = F.mse_loss(source(x), y)
            expected.backward()
            close(value, expected.detach(), f"loss of step {at}")
        clip_grad_norm_(source.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        assert_same(module, source)
        assert all(param.grad is None for param in module.parameters())
    with pytest.raises(InputError, match="the loss that Net was compiled with needs target, and a call in training"):
        train_step(module.shard_inputs(batch()[0]))
    without = sharded(model(), "fsdp", loss=None)
    train_step = shardc.train_step(without, shardc.optim.wrap(torch.optim.AdamW, without))
    with pytest.raises(InputError, match=r"the module returns a tensor of shape \[2, 9\], and a step needs a loss"):
        train_step(without.shard_inputs(batch()[0]))
    with pytest.raises(InputError, match=r"a parameter of shape \[12, 9\] that is none of the module's"):
        shardc.train_step(module, theirs)
    with pytest.raises(InputError, match="the module is not from shardc.compile"):
        shardc.train_step(source, theirs)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).square().mean()


def a_step_counts_its_tokens() -> None:
    """Of the global batch, from the second call on, between two calls of `tokens_per_second`."""
    module = shardc.compile(Scores(), DeviceMesh("cpu", range(2), mesh_dim_names=("dp",)), shardc.fsdp("dp"))
    train_step = shardc.train_step(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert train_step.tokens_per_second() == 0
    with patch("shardc.train.perf_counter", side_effect=[1.0, 3.0, 4.0, 7.0]):
        train_step(module.shard_inputs(torch.arange(16).view(2, 8)))
        for _ in range(2):
            train_step(module.shard_inputs(torch.arange(16).view(4, 4)))
        assert train_step.tokens_per_second() == 32 / (3.0 - 1.0)
        assert train_step.tokens_per_second() == 0
        train_step(module.shard_inputs(torch.arange(16).view(2, 8)))
        assert train_step.tokens_per_second() == 16 / (7.0 - 3.0)


def what_cannot_be_is_refused() -> None:
    module = sharded(model(), "fsdp")
    with pytest.raises(InputError, match="LBFGS takes all parameters for one vector"):
        shardc.optim.wrap(torch.optim.LBFGS, module)
    with pytest.raises(InputError, match=r"a parameter of shape \[3\] is none of the module's"):
        shardc.optim.wrap(torch.optim.SGD, module, [nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(InputError, match="the module is not from compile"):
        shardc.optim.wrap(torch.optim.SGD, model(), lr=0.1)


@pytest.mark.slow
def test_two_ranks() -> None:
    checks = [partial(updates_are_the_plain_ones, "fsdp", kind) for kind in OPTIMIZERS]
    more = [partial(updates_are_the_plain_ones, "tp", "adamw"), steps_survive_changes, what_cannot_be_is_refused]
    more += [low_precision_gradients_update_as_they_do, a_step_is_one_call, a_step_counts_its_tokens]
    run_ranks(2, *checks, *more, checkpoints_are_the_plain_ones)
