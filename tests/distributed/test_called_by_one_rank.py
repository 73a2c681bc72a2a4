"""Methods that all ranks call, called by one: it raises at once, and nothing is lost on the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import MeshError
from shardc.runtime.comparing import Meeting
from tests.ranks import run_ranks


def summoned(module: Any) -> None:
    with module.summon_full_params():
        pass


def waits_in_barrier(module: Any) -> None:
    dist.barrier()


def norm_of_weight(module: Any) -> None:
    module[0].weight.norm().item()


METHODS: dict[str, Callable[[Any], Any]] = {
    "full_state_dict": lambda module: module.full_state_dict(),
    "full_state_dict for the first": lambda module: module.full_state_dict(rank0_only=True),
    "summon_full_params": summoned,
}


def trained() -> tuple[Any, Callable[[], float]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    module = shardc.compile(net, mesh, shardc.fsdp("dp"), loss=F.mse_loss, backend="eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> float:
        loss = module(torch.ones(2, 4), torch.zeros(2, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    step()
    return module, step


def alone(name: str, between: str, caller: int) -> None:
    """While others go on to a step, or wait in a barrier; then all train and call it together."""
    module, step = trained()
    if dist.get_rank() == caller:
        with pytest.raises(MeshError, match=rf"{name.split()[0]}\(\) is for all ranks of the mesh. Rank {caller}"):
            METHODS[name](module)
    if between == "barrier":
        dist.barrier()
    assert step() > step()
    METHODS[name](module)
    step()


def clips_alone(steps: int, between: str) -> None:
    """Clipping is part of a step, and costs nothing there: a rank that does so alone raises, and the others too."""
    module, step = trained()
    for _ in range(steps):
        module.clip_grad_norm_(1.0)
        step()
    if between == "step" or dist.get_rank():
        with pytest.raises(
            MeshError, match=r"clip_grad_norm_\(\)" if between == "step" else r"rank 0 waits in .*barrier"
        ):
            if dist.get_rank():
                module.clip_grad_norm_(1.0)
            step()
    if between == "barrier":
        with nullcontext() if not steps else pytest.raises(RuntimeError):  # rank 1 was in a collective
            dist.barrier()


def elsewhere(waits: Callable[[Any], Any], says: str) -> None:
    """Rank 1 waits for the others in what they do not come to; they are in a step, and all raise."""
    module, step = trained()
    for _ in range(3):
        step()
    with pytest.raises(RuntimeError if dist.get_rank() else MeshError, match=None if dist.get_rank() else says):
        if dist.get_rank():
            waits(module)
        step()
        step()


def by_most(name: str, late: float) -> None:
    """Of three ranks, two come.

    Args:
        late: seconds after which the last of them comes, when the first has gone on, and hears of it before rank 1.
    """
    module, step = trained()
    on_attempt = Meeting.on_attempt

    def on_attempt_late(*args: Any) -> None:
        time.sleep(late / 2 if dist.get_rank() == 1 else 0)
        on_attempt(*args)

    with patch.object(Meeting, "on_attempt", on_attempt_late):
        if dist.get_rank() != 1:
            time.sleep(late * dist.get_rank() / 2)
            with pytest.raises(MeshError, match="but rank 1 went on"):
                METHODS[name](module)
        step()
        METHODS[name](module)


def another_method() -> None:
    module, step = trained()
    with pytest.raises(MeshError, match="where others call"):
        METHODS["summon_full_params" if dist.get_rank() else "full_state_dict"](module)
    step()


def test_a_step_comes_instead() -> None:
    run_ranks(2, partial(alone, "full_state_dict", "step", 0))


@pytest.mark.slow
def test_each_method() -> None:
    run_ranks(
        2,
        *(partial(alone, name, between, 0) for name in METHODS for between in ("step", "barrier")),
        partial(alone, "full_state_dict", "barrier", 1),
        another_method,
    )
    run_ranks(3, partial(by_most, "full_state_dict", 0.0), partial(by_most, "full_state_dict", 1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waits", "says"),
    [
        (waits_in_barrier, r"rank 1 waits in torch.distributed.barrier \(.*test_called_by_one_rank.py:\d+\)"),
        (norm_of_weight, r"rank 1 waits in norm\(\) of a DTensor"),
    ],
    ids=["barrier", "norm"],
)
def test_others_are_in_a_step(waits: Callable[[Any], Any], says: str) -> None:
    run_ranks(2, partial(elsewhere, waits, says), timeout=timedelta(seconds=60))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("between", ["step", "barrier"])
def test_clipping(steps: int, between: str) -> None:
    run_ranks(2, partial(clips_alone, steps, between), timeout=timedelta(seconds=60))
