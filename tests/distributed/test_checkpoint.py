"""Checkpoints through torch.distributed.checkpoint: saved on one mesh and plan, model and AdamW resume on others."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model, sharded

STEPS = 2


def trained(seed: int = 0) -> nn.Module:
    """The model without gradients for what it does not use: DCP cannot load state that no optimizer has had."""
    made = model(seed)
    made.unused.requires_grad_(False)
    return made


def train(module: Any, optimizer: torch.optim.Optimizer, first: int) -> list[torch.Tensor]:
    losses = []
    for at in range(first, first + STEPS):
        x, y = batch(at)
        value = module(*module.shard_inputs(x, y)) if hasattr(module, "shardc") else F.mse_loss(module(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))


def resumes(module: Any, folder: str, source: nn.Module, losses: list[torch.Tensor]) -> None:
    """``module`` goes on from the checkpoint as ``source``, which is ``STEPS`` further, did."""
    optimizer = adamw(module)
    state = state_of(module, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for ours, theirs in zip(train(module, optimizer, STEPS), losses, strict=True):
        close(ours, theirs, "loss")
    if hasattr(module, "shardc"):
        assert_same(module, source)


def saved_on_one_mesh_resumes_on_others() -> None:
    source = trained()
    module = sharded(source, "fsdp")
    theirs = adamw(source)
    train(source, theirs, 0)
    folders: dict[str, str] = {}
    for plan in ("fsdp", "tp"):
        shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(shared)
        folders[plan] = shared[0]
        module = sharded(trained(), plan)
        ours = adamw(module)
        train(module, ours, 0)
        assert_same(module, source)
        dcp.save(state_of(module, ours), checkpoint_id=folders[plan])
    losses = train(source, theirs, STEPS)
    for folder in folders.values():
        for plan in ("fsdp", "tp", "ddp"):
            resumes(sharded(trained(7), plan), folder, source, losses)
        resumes(trained(7), folder, source, losses)


def unsharded_checkpoint_resumes() -> None:
    """What one device saved with torch.save, read whole on each rank.

    Torch leaves the whole state of a 0-dim parameter a plain tensor, which AdamW cannot add a DTensor to.
    """
    source = trained()
    source.scale.requires_grad_(False)
    theirs = adamw(source)
    train(source, theirs, 0)
    saved = deepcopy(get_optimizer_state_dict(source, theirs, options=StateDictOptions(full_state_dict=True)))
    weights = {name: value.clone() for name, value in source.state_dict().items()}
    losses = train(source, theirs, STEPS)
    for plan in ("fsdp", "tp"):
        other = trained(7)
        other.scale.requires_grad_(False)
        module = sharded(other, plan)
        ours = adamw(module)
        module.load_state_dict(weights)
        set_optimizer_state_dict(module, ours, deepcopy(saved), options=StateDictOptions(full_state_dict=True))
        for mine, right in zip(train(module, ours, STEPS), losses, strict=True):
            close(mine, right, f"loss under {plan}")
        assert_same(module, source)


def whole_state_of_the_first_rank_resumes() -> None:
    """What one rank has, read by all; set_state_dict of both at once hangs in torch, whatever the module."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    source = trained()
    source.scale.requires_grad_(False)
    theirs = adamw(source)
    train(source, theirs, 0)
    values = deepcopy(get_state_dict(source, theirs, options=StateDictOptions(full_state_dict=True)))
    weights, saved = values if dist.get_rank() == 0 else ({}, {})
    losses = train(source, theirs, STEPS)
    for plan in ("fsdp", "tp"):
        other = trained(7)
        other.scale.requires_grad_(False)
        module = sharded(other, plan)
        ours = adamw(module)
        set_model_state_dict(module, deepcopy(weights), options=options)
        set_optimizer_state_dict(module, ours, deepcopy(saved), options=options)
        for mine, right in zip(train(module, ours, STEPS), losses, strict=True):
            close(mine, right, f"loss under {plan}")
        assert_same(module, source)


def test_two_ranks() -> None:
    run_ranks(
        2,
        saved_on_one_mesh_resumes_on_others,
        unsharded_checkpoint_resumes,
        whole_state_of_the_first_rank_resumes,
    )
