"""Ranks that start from different values: every rank raises and names the tensor, or takes the first rank's values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import MeshError
from tests.ranks import run_ranks
from tests.state import assert_same

PLANS = {
    "ddp": lambda: shardc.ddp("dp"),
    "fsdp": lambda: shardc.fsdp("dp"),
    "hsdp": lambda: shardc.hsdp(shard="dp", replicate="rep"),
}


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.norm = nn.Linear(4, 8).double(), nn.BatchNorm1d(8).double()
        self.register_buffer("mask", torch.arange(8) > 3)
        self.tied = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)) * self.mask @ self.tied


def compiled(plan: str, model: nn.Module, **options: Any) -> Any:
    ranks = dist.get_world_size()
    shape = {"rep": 2, "dp": ranks // 2} if plan == "hsdp" else {"dp": ranks}
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    return shardc.compile(model, mesh, PLANS[plan](), backend="eager", **options)


def step(module: nn.Module) -> None:
    module(torch.ones(4, 4, dtype=torch.float64)).square().mean().backward()


def raises(module: nn.Module, text: str) -> None:
    with pytest.raises(MeshError) as caught:
        step(module)
    assert caught.value.what == text, caught.value.what
    assert "init_sync=True" in (caught.value.fix or "")


def other_seeds(plan: str) -> None:
    """Shards of different models are of no model, where no rank holds what another one has too."""
    raises(
        compiled(plan, Model(dist.get_rank())),
        "parameter 'tied' has other values on rank 1 than on rank 0, and so has 1 more tensor",
    )


def another_buffer() -> None:
    model = Model()
    if dist.get_rank() == 1:
        model.norm.running_mean[3] += 1e-9
    raises(compiled("fsdp", model), "buffer 'norm.running_mean' has other values on rank 1 than on rank 0")


def changed_after_compile() -> None:
    """And changed back: there is no difference to speak of."""
    module = compiled("ddp", Model())
    with torch.no_grad():
        if dist.get_rank() == 1:
            module.up.bias.to_local()[3] += 1
        raises(module, "parameter 'up.bias' has other values on rank 1 than on rank 0")
        if dist.get_rank() == 1:
            module.up.bias.to_local()[3] -= 1
    step(module)


def loaded() -> None:
    """After a load the ranks compare again."""
    module = compiled("ddp", Model())
    step(module)
    module.load_state_dict(Model(dist.get_rank()).state_dict())
    raises(module, "parameter 'tied' has other values on rank 1 than on rank 0, and so has 1 more tensor")
    module.load_state_dict(Model(3).state_dict())
    step(module)


def loaded_on_one_rank() -> None:
    module = compiled("ddp", Model())
    step(module)
    if dist.get_rank() == 0:
        module.load_state_dict(Model(3).state_dict())
    with pytest.raises(MeshError, match="in new values: rank 0 has some since the last call, rank 1 has none"):
        step(module)
        step(module)


def one_shard_changed() -> None:
    """What only one rank holds it may change; a load makes up for other seeds."""
    module = compiled("fsdp", Model())
    with torch.no_grad():
        if dist.get_rank() == 1:
            module.up.bias.to_local()[1] += 1
    step(module)
    module = compiled("fsdp", Model(dist.get_rank()))
    module.load_state_dict(Model().state_dict())
    step(module)


def first_ranks_values(plan: str) -> None:
    rank, model = dist.get_rank(), Model(dist.get_rank() + 5)
    model.norm.running_mean += rank
    model.mask ^= bool(rank)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    module = compiled(plan, model, init_sync=True)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items()), "the model was changed"
    step(module)
    source = Model(5)
    step(source)
    assert_same(module, source, grads=True)


def one_replica_of_four() -> None:
    module = compiled("hsdp", Model())
    with torch.no_grad():
        if dist.get_rank() == 3:
            module.up.bias.to_local()[0] += 1
    raises(module, "parameter 'up.bias' has other values on rank 3 than on rank 1")


CHECKS: list[Callable[[], None]] = [
    *(partial(other_seeds, plan) for plan in ("ddp", "fsdp")),
    *(partial(first_ranks_values, plan) for plan in ("ddp", "fsdp")),
    another_buffer,
    changed_after_compile,
    loaded,
    loaded_on_one_rank,
    one_shard_changed,
]


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(2, *CHECKS)


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(4, one_replica_of_four, partial(first_ranks_values, "hsdp"))
