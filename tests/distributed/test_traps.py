"""Traps of training by ranks that only real ranks have; the others are in tests/runtime/test_traps.py."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc.runtime.storage import cut, padded_local
from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model, sharded


def poison_pads(module: nn.Module) -> int:
    """Fills the pad of every parameter with NaN; how many elements that were, of all parameters."""
    found = 0
    for name, param in module.named_parameters():
        assert isinstance(param, DTensor)
        padded = padded_local(param, module.shardc.spec.storages[name])
        local = param._local_tensor.detach().clone()
        if padded.shape != local.shape:
            with torch.no_grad():
                padded.fill_(float("nan"))
                cut(padded, local.shape).copy_(local)
            found += padded.numel() - local.numel()
    return found


def pads_are_in_nothing() -> None:
    """Neither in losses, gradients and norms nor in what an optimizer, a state dict or a whole view has."""
    source = model()
    module = sharded(source, "fsdp")
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (module, source))
    poisoned = torch.tensor(0)
    for at in range(2):
        poisoned += poison_pads(module)
        x, y = batch(at)
        value = module(*module.shard_inputs(x, y))
        value.backward()
        expected = F.mse_loss(source(x), y)
        expected.backward()
        close(value.detach(), expected.detach())
        assert_same(module, source, grads=True)
        close(module.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(source.parameters(), 0.1))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(module, source)
    assert all(value.isfinite().all() for value in module.full_state_dict().values())
    torch.distributed.all_reduce(poisoned)
    assert poisoned > 0, "no rank had a pad"


def an_accumulator_that_is_kept(plan: str, sums: bool) -> None:
    """What was reduced is not reduced again with what comes later: ``.grad`` is kept over three reductions."""
    source = model()
    module = sharded(source, plan)
    for at in range(3):
        if sums:
            with module.no_sync():
                module(*module.shard_inputs(*batch(10 + at))).backward()
            F.mse_loss(source(batch(10 + at)[0]), batch(10 + at)[1]).backward()
        module(*module.shard_inputs(*batch(at))).backward()
        F.mse_loss(source(batch(at)[0]), batch(at)[1]).backward()
        assert_same(module, source, grads=True)


class Twins(nn.Module):
    """Two layers whose gradients are equal, and a parameter whose gradient is the one that came in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) + self.c


def equal_gradients_are_their_own(plan: shardc.Plan) -> None:
    """What is added to one parameter's ``.grad``, or scales it, does so to no other's, nor to what the caller holds."""
    torch.manual_seed(0)
    source = Twins().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(deepcopy(source), mesh, plan, backend="eager")
    x, tangent = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    module.lower(x)
    came = 2 * module.shard_inputs(tangent)  # the objective is the mean of both ranks' own
    for _ in range(2):
        module(module.shard_inputs(x)).backward(came)
        source(x).backward(tangent)
    assert_same(module, source, grads=True)
    assert torch.equal(came, 2 * module.shard_inputs(tangent))
    norms = [nn.utils.clip_grad_norm_(source.parameters(), 0.1), module.clip_grad_norm_(0.1)]
    close(norms[1], norms[0])
    assert_same(module, source, grads=True)


@pytest.mark.slow
def test_two_ranks() -> None:
    kept = (
        partial(an_accumulator_that_is_kept, plan, sums)
        for plan, sums in (("fsdp", True), ("fsdp", False), ("ddp", True), ("tp", True))
    )
    alike = (partial(equal_gradients_are_their_own, plan) for plan in (shardc.ddp("dp"), shardc.fsdp("dp")))
    run_ranks(2, pads_are_in_nothing, *kept, *alike)
