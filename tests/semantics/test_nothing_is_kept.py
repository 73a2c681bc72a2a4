"""Forwards without a backward keep nothing: what was saved is freed with the outputs, its place in the arena too."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from benchmarks import soak
from shardc.runtime.border import Border
from tests.ranks import run_ranks


class Net(nn.Module):
    """Backward reads outputs, views of them, and what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.body(x).tanh()
        return hidden, hidden.flatten(1), *(head(hidden).tanh() for head in self.heads), hidden


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compiled(backend: str, plan: shardc.Plan) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return shardc.compile(Net(), mesh, plan, backend=backend)


def saved_alive(module: Any, x: Tensor) -> int:
    """How many tensors that a forward saves for its backward live when its outputs are gone."""
    alive: list[Any] = []
    apart = Border.split_results

    def noting(border: Border, results: Sequence[Any], feed: Sequence[Any]) -> Any:
        outputs, saved = apart(border, results, feed)
        held = {y.untyped_storage().data_ptr() for y in (*feed, *module.parameters()) for y in [_local(y)]}
        for y in saved:
            if isinstance(y, Tensor) and y.untyped_storage().data_ptr() not in held:
                alive.append(weakref.ref(y.untyped_storage()))
        return outputs, saved

    with patch.object(Border, "split_results", noting):
        out = module(x)
    assert any(ref() is not None for ref in alive)
    del out
    gc.collect()
    return sum(ref() is not None for ref in alive)


def _local(x: Any) -> Tensor:
    return x._local_tensor if hasattr(x, "_local_tensor") else x


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.usefixtures("alone")
def test_activations(backend: str) -> None:
    module = compiled(backend, shardc.fsdp("dp"))
    for _ in range(3):
        assert saved_alive(module, torch.randn(4, 3, 6)) == 0


def places_in_the_arena(backend: str) -> None:
    """What is gathered and kept for backward gets its place again, so that no forward finds it in use."""
    module = compiled(backend, shardc.fsdp("dp", level=2))
    x = module.shard_inputs(torch.randn(8, 3, 6))
    for _ in range(5):
        module(x)
    assert module.memory().strays == 0
    sum(y.sum() for y in module(x)).backward()
    module(x)
    assert module.memory().strays == 0


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(2, partial(places_in_the_arena, "eager"), partial(places_in_the_arena, "inductor"))


@pytest.mark.slow
def test_the_soak_runs() -> None:
    """In short; how flat memory is shows in a long run alone."""
    soak.run("eager", count=10, switches=3, most=float("inf"))
