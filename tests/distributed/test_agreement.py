"""Ranks that compiled different programs raise, on every rank, before they communicate."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import MeshError
from tests.ranks import run_ranks


class Two(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, width)
        self.down = torch.nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def same_program_agrees() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(Two(), mesh, shardc.fsdp("dp"), backend="eager")
    module(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        module(torch.ones(2, 4))


def another_plan_is_named() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    plan = shardc.fsdp("dp") if dist.get_rank() == 0 else shardc.ddp("dp")
    module = shardc.compile(Two(), mesh, plan, backend="eager")
    with pytest.raises(MeshError) as caught:
        module(torch.ones(2, 4))
    gather = "forward: all_gather(dp) f32[8,4], f32[8], f32[4,8], f32[4] %up.weight.full.all_gather_into_tensor.bucket"
    reduce = "backward: all_reduce(dp) f32[4,8], f32[4], f32[8,4], f32[8] %d.down.mm.1.summed.all_reduce.bucket"
    mine, other = (gather, reduce) if dist.get_rank() == 0 else (reduce, gather)
    here, there = dist.get_rank(), 1 - dist.get_rank()
    first = f"ranks {here} and {there} compiled different programs: "
    assert caught.value.what == first + f"rank {here} has {mine!r} where rank {there} has {other!r}"


def another_width_is_named() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(Two(8 + 2 * dist.get_rank()), mesh, shardc.ddp("dp"), backend="eager")
    with pytest.raises(MeshError, match="compiled different programs"):
        module(torch.ones(2, 4))


def a_rank_that_does_not_come_is_named() -> None:
    """Rank 1 never calls the module, as one that died would not."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(Two(), mesh, shardc.fsdp("dp"), backend="eager")
    if dist.get_rank() == 0:
        c10d._get_default_store().set_timeout(timedelta(seconds=1))
        with pytest.raises(MeshError) as caught:
            module(torch.ones(2, 4))
        assert caught.value.what == (
            "rank 1 of [0, 1] did not come to compare programs, before the first step, within 1 seconds"
        )
        assert caught.value.fix is not None and caught.value.fix.startswith("look at rank 1 first")
        c10d._get_default_store().set_timeout(timedelta(seconds=300))


def test_two_ranks() -> None:
    run_ranks(2, same_program_agrees, another_plan_is_named, another_width_is_named, a_rank_that_does_not_come_is_named)
