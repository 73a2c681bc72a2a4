"""FSDP2's ``reshard_after_forward=n`` beside ours, on four ranks: parameters stay split over two of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardc
from shardc.runtime.full_params import unshard
from tests.ranks import run_ranks
from tests.state import close


def model() -> nn.Sequential:
    """Sizes that neither four nor two ranks divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 9), nn.Tanh(), nn.Linear(9, 5)).double()


def trains_as_fsdp2(backend: str, level: int = 3) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    theirs, rank = model(), dist.get_rank()
    for layer in theirs:
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    fully_shard(theirs, mesh=mesh)
    plan = shardc.fsdp("dp", reshard_after_forward=2)
    ours = shardc.compile(model(), mesh, plan, loss=F.mse_loss, backend=backend)
    program = ours.lower(torch.empty(8, 7).double(), torch.empty(8, 5).double())
    assert "shardc:dp:2x2" in program.text("schedule.backward")
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (theirs, ours)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(8, n, generator=generator, dtype=torch.float64).chunk(4)[rank] for n in (7, 5))
        F.mse_loss(theirs(x), y).backward()
        ours(x, y).backward()
        for name, param in theirs.named_parameters():
            close(
                unshard(ours.get_parameter(name).grad, ours.shardc.spec.storages[name]), param.grad.full_tensor(), name
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, param in theirs.named_parameters():
            close(unshard(ours.get_parameter(name), ours.shardc.spec.storages[name]), param.full_tensor(), name)


def a_change_between_is_refused() -> None:
    """The part that a rank keeps is of values that are no longer there."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    ours = shardc.compile(model(), mesh, shardc.fsdp("dp", reshard_after_forward=2), loss=F.mse_loss, backend="eager")
    loss = ours(torch.ones(2, 7).double(), torch.ones(2, 5).double())
    with torch.no_grad():
        ours.get_parameter("2.weight").mul_(2)
    with pytest.raises(shardc.ShardcError, match="2.weight"):
        loss.backward()


@pytest.mark.slow
def test_four_ranks() -> None:
    checks = (partial(trains_as_fsdp2, "eager"), partial(trains_as_fsdp2, "inductor"), a_change_between_is_refused)
    run_ranks(4, *checks)
