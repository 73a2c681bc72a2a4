"""A Triton kernel in an op of `torch.library.triton_op`, on a GPU: compiled by Inductor, beside the plain model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from benchmarks.gpu.ranks import World, mesh_of

pytestmark = pytest.mark.gpu

triton = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")


@triton.jit
def _scale(x, weight, out, columns, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    product = tl.load(x + at, mask=inside) * tl.load(weight + at % columns, mask=inside)
    tl.store(out + at, product, mask=inside)


@torch.library.triton_op("shardc_gpu::scale", mutates_args={})
def scale(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 128),)
    torch.library.wrap_triton(_scale)[grid](x, weight, out, x.shape[1], x.numel(), BLOCK=128)
    return out


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return scale(grad.contiguous(), weight), (grad * x).sum(0)


scale.register_autograd(_gradients, setup_context=_setup)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 48))

    def forward(self, x: Tensor) -> Tensor:
        return scale(self.linear(x), self.weight).square().mean()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_it_equals_the_plain_model(backend: str, tmp_path: Path) -> None:
    shardc.register_rule("shardc_gpu::scale", "b d, d -> b d")
    world = World("cuda", 0, 1, str(tmp_path))
    world.enter("one")
    try:
        torch.manual_seed(0)
        plain, x = Net().cuda(), torch.randn(40, 48, device="cuda")
        module = shardc.compile(copy.deepcopy(plain), mesh_of("cuda", 1, ("dp",)), shardc.fsdp("dp"), backend=backend)
        module(x).backward()
        plain(x).backward()
        for (name, param), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), theirs.grad, msg=name, rtol=1e-4, atol=1e-6)
    finally:
        world.leave()
