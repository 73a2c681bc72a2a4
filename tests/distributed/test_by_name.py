"""What a plan says by name, on real ranks: level, threshold, shard size, and the dtype of reductions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardc
from shardc import ddp, fsdp, hsdp, precision
from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model

REDUCED = precision(reduce=torch.bfloat16) | precision(reduce=torch.float32, modules="single")
REDUCED |= precision(reduce=torch.float64, modules="wide")


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


class Sums(nn.Module):
    """The gradient of each weight is the column sum of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.single, self.wide = Scale(), Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x) + self.single(x) + self.wide(x)


def value_of(out: Tensor) -> Tensor:
    return out


def reduces_by_module(plan: shardc.Plan, mesh: dict[str, int], held: bool) -> None:
    """257 needs nine bits, bfloat16 has eight: what is reduced in it shows."""
    made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    module = shardc.compile(Sums(), made, plan | REDUCED, loss=value_of, backend="eager")
    x = torch.tensor([[254.0], *[[1.0]] * 3]).expand(4, 4).clone()
    if held:
        with module.no_sync():
            module(module.shard_inputs(torch.zeros(4, 4))).backward()
    module(module.shard_inputs(x)).backward()
    grads = {name: param.grad.full_tensor() for name, param in module.named_parameters()}
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    found = {name.removesuffix(".weight"): set(grad.tolist()) for name, grad in grads.items()}
    assert found == {"low": {256.0}, "single": {257.0}, "wide": {257.0}}


PLANS = {"ddp": ddp("dp"), **{f"fsdp{level}": fsdp("dp", level=level) for level in (1, 2, 3)}}


def test_two_ranks_reduce_by_module() -> None:
    run_ranks(
        2, *(partial(reduces_by_module, plan, {"dp": 2}, held) for plan in PLANS.values() for held in (False, True))
    )


def test_four_ranks_reduce_by_module() -> None:
    plans = [hsdp("dp", "rep", level=level) for level in (1, 2, 3)]
    run_ranks(4, *(partial(reduces_by_module, plan, {"rep": 2, "dp": 2}, False) for plan in plans))


def of_cells(hybrid: bool) -> None:
    """Cells with their own level, threshold and size: each is stored as it says, and training is one device's."""
    mesh: Any = init_device_mesh("cpu", (2, 2) if hybrid else (2,), mesh_dim_names=("rep", "dp") if hybrid else ("dp",))
    said: dict[str, Any] = {
        "levels": {"mid.*": 3, "back.*": 2}, "thresholds": {"odd.*": "1 KiB", "back.weight": 0},
    }  # fmt: skip
    plan = (
        hsdp("dp", "rep", level=1, threshold=200, **said)
        if hybrid
        else shardc.hsdp_plan(
            threshold=0, grad_scale=0.5, comm_async=True, cells={
                "mid": {"optimizer_level": "level3", "threshold": 0},
                "back": {"optimizer_level": "level2", "threshold": 0, "shard_size": 2},
                "odd": {"threshold": 1},
            },
        )
    )  # fmt: skip
    source = model()
    module = shardc.compile(source, mesh, plan, backend="eager")
    levels = {name: module.shardc.params.sync.levels[name] for name in ("mid.weight", "back.weight", "odd.weight")}
    assert levels == {"mid.weight": 3, "back.weight": 2, "odd.weight": 1}
    stored = {name: module.get_parameter(name).placements[-1] for name in levels}
    assert stored == {"mid.weight": Shard(0), "back.weight": Shard(1), "odd.weight": Replicate()}
    ours = torch.optim.AdamW(module.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(source.parameters(), lr=0.01)
    for seed in range(3):
        x, y = batch(seed)
        mine = y.chunk(dist.get_world_size())[dist.get_rank()]
        F.mse_loss(module(module.shard_inputs(x)), mine).backward()
        F.mse_loss(source(x), y).backward()
        assert_same(module, source, grads=True)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(module, source)


def as_shard_module(local: list[str] | None) -> None:
    """hyper-parallel's plan: outputs are DTensors, or local where a module returns local tensors; values are one's."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = shardc.Plan.from_sharding_plan(
        plan={"mid.weight": ("tp", "None"), "back.weight": ("None", "tp")},
        input_plan={"input": ("None", "None")},
        output_plan={"output": ("tp", "None"), "mid.output": ("None", "tp")},
        return_local_tensor=local,
    )
    source = model()
    module = shardc.compile(source, mesh, plan, backend="eager")
    x, y = batch()
    out, expected = module(x), source(x)
    assert isinstance(out, DTensor) == (local is None)
    whole = out.full_tensor() if isinstance(out, DTensor) else None
    mine = (whole, expected) if whole is not None else (out, expected.chunk(2)[dist.get_rank()])
    close(mine[0].detach(), mine[1].detach())
    if whole is not None:
        F.mse_loss(whole, y).backward()
        F.mse_loss(expected, y).backward()
        assert_same(module, source, grads=True)


def test_two_ranks_as_shard_module() -> None:
    run_ranks(2, partial(as_shard_module, None), partial(as_shard_module, ["head"]))


def test_two_ranks_with_cells() -> None:
    run_ranks(2, partial(of_cells, False))


@pytest.mark.slow
def test_four_ranks_with_levels_and_thresholds() -> None:
    run_ranks(4, partial(of_cells, True))
