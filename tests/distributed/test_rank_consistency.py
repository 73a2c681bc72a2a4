"""Ranks that compiled different programs raise, on every rank, before they communicate."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import MeshError
from shardc.runtime.events import difference
from shardc.runtime.gloo.listen import interrupt
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


def first_difference(plan: shardc.Plan, width: int = 8) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(Two(width), mesh, plan, backend="eager")
    with pytest.raises(MeshError) as caught:
        module(torch.ones(2, 4))
    return caught.value.what


def another_plan_is_named() -> None:
    where = "ranks differ at a first use of the values of Two (module 1 of the mesh), in parameters and buffers: "
    assert first_difference(shardc.fsdp("dp") if dist.get_rank() == 0 else shardc.ddp("dp")) == (
        f"{where}rank 0 has up.weight of shape [8, 4], torch.float32, stored as [8@dp,4], "
        "rank 1 has up.weight of shape [8, 4], torch.float32, stored as [8,4]"
    )


def another_level_is_named() -> None:
    """Parameters lie where they do, and the collectives differ."""
    found = first_difference(shardc.fsdp("dp", level=3 - dist.get_rank()))
    assert found.startswith("ranks differ at a compiled program, in collectives: rank 0 has backward: all_gather(dp) ")


def another_width_is_named() -> None:
    found = first_difference(shardc.ddp("dp"), 8 + 2 * dist.get_rank())
    assert "rank 0 has up.weight of shape [8, 4]" in found
    assert "rank 1 has up.weight of shape [10, 4]" in found


class Scaled(torch.nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by, self.up = by, torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.by


def another_number_is_named() -> None:
    """The collectives are the same, and what is between them is not."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(Scaled(2.0 + dist.get_rank()), mesh, shardc.ddp("dp"), backend="eager")
    with pytest.raises(MeshError, match="in the forward graph: rank 0 has .*2.0.*, rank 1 has .*3.0"):
        module(torch.ones(2, 4))


def another_constant_tensor_is_named() -> None:
    class Shifted(torch.nn.Linear):
        by = torch.full((3,), float(dist.get_rank()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.by

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(Shifted(4, 3), mesh, shardc.ddp("dp"), backend="eager")
    with pytest.raises(MeshError, match="in the forward graph"):
        module(torch.ones(2, 4))


def a_rank_that_does_not_come_is_named() -> None:
    """Rank 1 never calls the module, as one that died would not."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(Two(), mesh, shardc.fsdp("dp"), backend="eager")
    if dist.get_rank() == 0:
        c10d._get_default_store().set_timeout(timedelta(seconds=1))
        with pytest.raises(MeshError) as caught:
            module(torch.ones(2, 4))
        assert caught.value.what == ("rank 1 of [0, 1] did not come to compare what they run within 1 seconds")
        assert caught.value.fix is not None and caught.value.fix.startswith("look at rank 1 first")
        c10d._get_default_store().set_timeout(timedelta(seconds=300))


def an_interrupt_reaches_ranks_that_go_on() -> None:
    """Rank 0 waits for rank 2, which is not interrupted; its next rank, 1, has closed its connections already."""
    group, store = dist.group.WORLD, c10d._get_default_store()
    store.set(f"connected {dist.get_rank()}", "")
    store.wait([f"connected {rank}" for rank in range(3)])
    if dist.get_rank() == 0:
        waited = group.recv([torch.empty(1)], 2, 7)
        store.wait(["closed"])
        interrupt([group])
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            waited.wait(timedelta(seconds=20))
        assert time.monotonic() - start < 10, "it was not interrupted"
    elif dist.get_rank() == 1:
        interrupt([group])
        store.set("closed", "")


def test_three_ranks() -> None:
    run_ranks(3, an_interrupt_reaches_ranks_that_go_on)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        same_program_agrees,
        another_plan_is_named,
        another_level_is_named,
        another_width_is_named,
        another_number_is_named,
        another_constant_tensor_is_named,
        a_rank_that_does_not_come_is_named,
    )


@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n"])
def test_texts_that_differ_in_how_they_end(end: str) -> None:
    lines, other_lines = ([["event", "step"], ["graph", text]] for text in ("a\nb", f"a\nb{end}"))
    assert "ranks differ at a step, in graph" in difference(0, lines, 1, other_lines).what
