"""Targets of a loss in the graph: by position or by name, and forgotten ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import InputError
from tests.ranks import run_ranks


def loss(output: Tensor, target: Tensor, weight: Tensor, smoothing: float = 0.0) -> Tensor:
    return (F.cross_entropy(output, target, reduction="none", label_smoothing=smoothing) * weight).mean()


class Scaled(nn.Module):
    """Its forward has a keyword of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.inner(x) if scale is None else self.inner(x) * scale


class TakesMore(Scaled):
    """Its forward takes any keyword, as those of transformers do, and may be called without arguments."""

    def forward(self, x: Tensor | None = None, **more: Any) -> Tensor:
        assert x is not None and not more
        return self.inner(x)


def test_a_model_that_takes_any_keyword() -> None:
    model, x, target = TakesMore(), torch.randn(8, 6), torch.randint(4, (8,))
    module: Any = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=F.cross_entropy, backend="eager")
    simulation = shardc.Simulation(module)
    for value in (simulation(x, target=target), simulation(x=x, target=target), simulation(x, target)):
        torch.testing.assert_close(value, F.cross_entropy(model(x), target).detach())


def check_by_name() -> None:
    torch.manual_seed(0)
    model = Scaled()
    x, target, weight, scale = torch.randn(8, 6), torch.randint(4, (8,)), torch.rand(8), torch.rand(8, 1)
    module: Any = shardc.compile(model, shardc.mesh(device="cpu"), loss=loss, backend="eager")
    shard = module.shardc.shard_inputs
    args, kwargs = shard(x, target=target, scale=scale, weight=weight)
    assert len(args) == 3 and list(kwargs) == ["scale"]
    expected = loss(model(x, scale), target, weight)
    rows = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
    for value in (
        module(*args, **kwargs),
        module(x[rows], weight=weight[rows], target=target[rows], scale=scale[rows]),
        module(*shard(x, scale, target, weight)),
    ):
        torch.testing.assert_close(value, expected)
    assert len(module.shardc.programs) == 2  # the scale by name, and by position

    with pytest.raises(InputError, match="needs target, weight, and a call in training mode passes none(.|\n)*eval"):
        module(shard(x))
    with torch.no_grad():
        torch.testing.assert_close(module(shard(x)), model(x)[rows])
    torch.testing.assert_close(module.eval()(shard(x)), model(x)[rows])
    with pytest.raises(InputError, match="unexpected keyword argument 'target'(.|\n)*2 for the loss"):
        module(shard(x), target=target[rows])


def test_by_name() -> None:
    run_ranks(2, check_by_name)
