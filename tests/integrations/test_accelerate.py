"""A loop written with `Accelerator`, on two ranks: gradients, norms and rows equal one process without it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import shardc
from shardc.errors import InputError
from shardc.integrations.accelerate import Accelerator
from tests.ranks import run_ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def dataset() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(16, n, generator=draws, dtype=torch.float64) for n in (4, 2)))


def plain() -> list[tuple[float, float]]:
    """Losses and norms of two steps, each on two batches of four rows."""
    model, out = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for at, (x, y) in enumerate(DataLoader(dataset(), batch_size=4)):
        loss = mse_loss(model(x), y)
        (loss / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if at % 2 else torch.zeros(())
        if at % 2:
            optimizer.step()
            optimizer.zero_grad()
        out.append((loss.item(), norm.item()))
    return out


def loops(axis: str, rows: int) -> None:
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # unused
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    plan = shardc.fsdp("dp") if axis == "dp" else shardc.tp("tp", colwise=["0"], rowwise=["2"])
    module = shardc.compile(build(), mesh, plan, loss=mse_loss, backend="eager")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    loader = DataLoader(dataset(), batch_size=rows)
    prepared, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    assert prepared is module
    out = []
    for x, y in loader:
        assert len(x) == rows
        with accelerator.accumulate(module):
            loss, norm = module(x, y), torch.zeros(())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        out.append((loss.item(), norm.item()))
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.testing.assert_close(torch.tensor(out), torch.tensor(plain()))
    with pytest.raises(InputError, match="float16|fp16"):
        Accelerator(cpu=True, mixed_precision="fp16").prepare(module)
    module = shardc.compile(build(), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), shardc.cp("cp"))
    with pytest.raises(InputError, match="splits the sequence"):
        Accelerator(cpu=True).prepare(module)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def over_dp() -> None:
    loops("dp", 2)


def over_tp() -> None:
    loops("tp", 4)


def test_a_loop_equals_one_process() -> None:
    run_ranks(2, over_dp, over_tp)
