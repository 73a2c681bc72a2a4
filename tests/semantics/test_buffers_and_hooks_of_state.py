"""Buffers that do not lie contiguously in memory, and hooks of state dicts that the model had before compile."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.mesh import Mesh
from tests.ranks import device_mesh, run_ranks


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("basis", torch.randn(4, 4).t())
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex64).conj())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.basis.relu() + self.phase.imag


def buffers_at_odd_strides(backend: str) -> None:
    model = Transposed()
    module = shardc.compile(copy.deepcopy(model), device_mesh(Mesh(dp=2)), shardc.fsdp("dp"), backend=backend)
    x = module.shard_inputs(torch.randn(8, 6))
    for change in (
        lambda m: None,
        lambda m: setattr(m, "basis", torch.arange(16.0).view(4, 4)),
        lambda m: setattr(m, "basis", torch.arange(32.0).view(4, 8)[:, ::2]),
    ):
        change(model), change(module)
        assert module.basis.stride() == model.basis.stride()
        ours, theirs = module(x), model(x)
        torch.testing.assert_close(ours, theirs)
        ours.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_buffers_at_odd_strides(backend: str) -> None:
    run_ranks(2, partial(buffers_at_odd_strides, backend))


@pytest.mark.parametrize("alive", [False, True])
def test_hooks_of_state_dicts_get_the_compiled_module(alive: bool) -> None:
    """Also if the original is gone."""
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    model[0].register_load_state_dict_post_hook(lambda module, _: seen.append(module))
    model.register_state_dict_pre_hook(lambda module, *_: seen.append(module))
    part, original = model[0], model
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    if not alive:
        del model, part, original
    module.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict())
    module.state_dict()
    assert module[0] in seen and module in seen
    assert not alive or not {id(part), id(original)} & set(map(id, seen))
