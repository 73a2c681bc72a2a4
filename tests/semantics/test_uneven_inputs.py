"""Inputs whose batch does not divide: a call reads what `shard_inputs` cut as it was cut, on real ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from tests.ranks import run_ranks


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        last = x * self.weight
        last[-1] *= 2  # of the batch's rows, not of a rank's
        return last.sum() + (x[:1] * y).sum()


def check(module: nn.Module, model: nn.Module, rows: int) -> None:
    x, y = (torch.randn(rows, 3, dtype=torch.float64) for _ in range(2))
    ours, theirs = module(*module.shard_inputs(x, y)), model(x, y)
    torch.testing.assert_close(ours, theirs)
    grads = []
    for each, value in ((model, theirs), (module, ours)):
        each.zero_grad()
        value.backward()
        grads.append(each.weight.grad)
    torch.testing.assert_close(grads[1].full_tensor(), grads[0])


def whole_on_every_rank() -> None:
    warnings.simplefilter("ignore", shardc.ShardcWarning)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Total()
    module = shardc.compile(model, mesh, shardc.fsdp("dp", threshold=0), backend="eager")
    for rows in (4, 5, 8, 3, 5):
        check(module, model, rows)


def shards_that_look_alike() -> None:
    """Five rows could be the half of ten, or five that do not divide."""
    warnings.simplefilter("ignore", shardc.ShardcWarning)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = torch.randn(10, 3, dtype=torch.float64)
    for first, second in ((x, x[:5]), (x[:5], x)):
        model = Total()
        module = shardc.compile(model, mesh, shardc.fsdp("dp", threshold=0), backend="eager")
        torch.testing.assert_close(module(*module.shard_inputs(first, first)), model(first, first))
        with pytest.raises(shardc.errors.InputError, match=r"inputs of \[5, 3\] and of \[10, 3\]"):
            module.shard_inputs(second, second)
        torch.testing.assert_close(module(*module.shard_inputs(first, first)), model(first, first))


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scaled = x * self.weight
        return torch.stack([scaled, scaled * 2], -1), torch.cat([scaled, scaled]) + 1


def outputs_lie_as_on_one_device() -> None:
    """A split dim of five is filled up to six, and an output is cut of that: it is contiguous all the same."""
    warnings.simplefilter("ignore", shardc.ShardcWarning)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Columns()
    plan = shardc.Plan(inputs={"x": (None, "dp")}, outputs="...")
    module = shardc.compile(model, mesh, plan, backend="eager")
    x = torch.randn(4, 5, dtype=torch.float64)
    for ours, theirs in zip(module(module.shard_inputs(x)), model(x), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.view(-1), theirs.view(-1))


def test_outputs_of_padded_values() -> None:
    run_ranks(2, outputs_lie_as_on_one_device)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(2, whole_on_every_rank, shards_that_look_alike)
