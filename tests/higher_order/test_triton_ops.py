"""Ops of `torch.library.triton_op`: one op of the graph, whose function runs at the shapes of a rank.

A kernel's grid and its sizes are numbers of the function that launches it, so a graph of the kernels that it launches
at global shapes would be wrong on a shard. There is no Triton on a CPU: the function here runs ops of torch, and counts
rows as a launch does.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcWarning
from tests.models.alike import trains_alike
from tests.ranks import run_ranks

ROWS: list[int] = []


@torch.library.triton_op("shardc_triton::scale", mutates_args={})
def scale(x: Tensor, weight: Tensor) -> Tensor:
    rows = int(x.shape[0])
    ROWS.append(rows)
    return torch.empty_like(x).copy_(x[:rows]) * weight


@torch.library.triton_op("shardc_triton::scale_backward", mutates_args={})
def scale_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad * weight, (grad * x).sum(0)


@torch.library.triton_op("shardc_triton::add_", mutates_args={"out"})
def add_(out: Tensor, x: Tensor) -> None:
    out.add_(x)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


scale.register_autograd(lambda ctx, grad: scale_backward(grad, *ctx.saved_tensors), setup_context=_setup)


def with_rules() -> None:
    shardc.register_rule("shardc_triton::scale", "b d, d -> b d")
    shardc.register_rule("shardc_triton::scale_backward", "b d, b d, d -> b d, d")
    shardc.register_rule("shardc_triton::add_", "b d, b d -> b d")


@pytest.fixture(autouse=True)
def _rules() -> None:
    with_rules()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = scale(self.linear(x), self.weight)
        with torch.no_grad():
            add_(y.detach().clone(), y)
        return y.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_it_equals_one_device(mesh: dict[str, int]) -> None:
    trains_alike(net(), (torch.randn(6, 6).double(),), mesh, shardc.fsdp("dp"))


def test_it_is_one_op_that_runs_on_a_shard() -> None:
    module = shardc.compile(net(), shardc.Mesh(dp=2), shardc.fsdp("dp"))
    x = torch.randn(8, 6).double()
    text = module.lower(x).text()
    assert "shardc_triton.scale(" in text and "shardc_triton.scale_backward(" in text, text
    assert "f64[8@dp,6] = shardc_triton.scale(" in text, text
    ROWS.clear()
    shardc.Simulation(module)(x)
    assert set(ROWS) == {4}


def test_without_a_rule_it_runs_whole_with_a_warning() -> None:
    @torch.library.triton_op("shardc_triton::unknown", mutates_args={})
    def unknown(x: Tensor) -> Tensor:
        return x * 2

    module = shardc.compile(lambda x: unknown(x), shardc.Mesh(dp=2), shardc.Plan(inputs=[("dp", None)]))
    with pytest.warns(ShardcWarning, match="shardc_triton.unknown"):
        text = module.lower(torch.empty(8, 4)).text()
    assert "f32[8,4] = shardc_triton.unknown(" in text, text


def _on_ranks() -> None:
    with_rules()
    warnings.simplefilter("error", ShardcWarning)
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(net(), mesh, shardc.fsdp("dp"))
    x, alone = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double(), net()
    for model in (module, alone):
        model(module.shard_inputs(x) if model is module else x).backward()
    for name, param in alone.named_parameters():
        torch.testing.assert_close(dict(module.named_parameters())[name].grad.full_tensor(), param.grad)


@pytest.mark.medium
def test_on_two_ranks_with_inductor() -> None:
    run_ranks(2, _on_ranks)
