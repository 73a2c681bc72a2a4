"""What the tests of libraries and habits share: a model, and a comparison of two ranks with one device."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import shardc
from tests.ranks import run_ranks
from tests.state import assert_same, close

PLANS = {"fsdp": shardc.fsdp("dp"), "tp": shardc.tp("dp", colwise=["0"], rowwise=["2"])}
Habit = Callable[[nn.Module, Callable[[], Tensor]], Any]  # of (model, a call that returns its loss) -> what to compare


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def rows() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, n, generator=draws, dtype=torch.float64) for n in (6, 4))  # type: ignore[return-value]


def compiled(plan: str = "fsdp", model: nn.Module | None = None, **options: Any) -> Any:
    mesh = shardc.mesh(device="cpu")
    return shardc.compile(model or build(), mesh, PLANS[plan], backend="eager", **{"loss": mse_loss, **options})


def same_on_ranks(habit: Habit, plan: str) -> None:
    """Checks that ``habit`` returns the same for a compiled module as for the model on one device, and trains alike."""
    x, y = rows()
    source, module = build(), compiled(plan)
    mine = module.shard_inputs(x, y)
    torch.manual_seed(7)
    theirs = habit(source, lambda: mse_loss(source(x), y))
    torch.manual_seed(7)
    ours = habit(module, lambda: module(*mine))
    if theirs is not None:
        torch.testing.assert_close(ours, theirs)
    assert_same(module, source)


def as_torchrun() -> None:
    """Sets what torchrun sets in a rank's environment."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # unused
    os.environ |= {"GROUP_RANK": "0", "NODE_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}


def check_habits(*habits: Habit) -> None:
    """Runs `same_on_ranks` for each habit on two ranks, under FSDP and under tensor parallelism."""
    run_ranks(2, *(partial(same_on_ranks, habit, plan) for habit in habits for plan in PLANS))


def steps(optimizer: Any, loss: Callable[[], Tensor], count: int = 3) -> list[float]:
    """Trains for ``count`` steps; returns the losses."""
    out = []
    for _ in range(count):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        out.append(value.item())
    return out


__all__ = ["as_torchrun", "build", "check_habits", "close", "compiled", "rows", "same_on_ranks", "steps"]
