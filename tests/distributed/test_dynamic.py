"""Dynamic sizes on real ranks: what is compiled once serves other sizes, through Inductor too."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import shardc
from examples.models import llama
from shardc.lower import inductor as lower
from tests.ranks import run_ranks

DYNAMIC = {"tokens": {0: "b", 1: "t"}, "target": {0: "b", 1: "t"}}
PLANS = {
    "fsdp": ("dp", shardc.fsdp("dp")),
    "tp+sp": ("tp", shardc.ddp("dp") | llama.llama_tp("tp", sequence=True)),
}
SIZES = [(4, 8), (8, 16), (6, 24)]


def trains_at_many_sizes(name: str, backend: str) -> None:
    """A step of SGD at each size, beside one device; what each half was compiled for."""
    axis, plan = PLANS[name]
    shape = {"dp": 2} if axis == "dp" else {"dp": 1, "tp": 2}
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    torch.manual_seed(0)
    source = llama.Llama(llama.LlamaConfig(layers=1)).double()
    module = shardc.compile(source, mesh, plan, loss=llama.loss, backend=backend, dynamic=DYNAMIC)
    compiled: list[Any] = []
    inner = lower.compile_fx_inner
    lower.compile_fx_inner = lambda *args, **kwargs: compiled.append(1) or inner(*args, **kwargs)  # type: ignore
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, source))
    try:
        for b, t in SIZES:
            x, y = torch.randint(64, (2, b, t), generator=torch.Generator().manual_seed(b * t))
            loss = module(*module.shard_inputs(x, y))
            loss.backward()
            expected = llama.loss(source(x), y)
            expected.backward()
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-7, atol=1e-9)
            for (param, p), q in zip(module.named_parameters(), source.parameters(), strict=True):
                torch.testing.assert_close(
                    p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-7, msg=lambda s, n=param: f"{n}: {s}"
                )
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    finally:
        lower.compile_fx_inner = inner
    (families,) = module.shardc.cache.build.families._families.values()
    assert len(families) == 1, "one program serves all sizes"
    if backend == "inductor":
        assert len(compiled) == 2, "one forward and one backward for all sizes"


def marked_dims_are_dynamic() -> None:
    """`mark_dynamic` on a shard does as ``dynamic=`` does, and holds for later calls."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    source = nn.Linear(4, 3).double()
    module = shardc.compile(source, mesh, shardc.fsdp("dp"), loss=F.mse_loss, backend="eager")
    for at, size in enumerate((6, 4, 10)):
        x, y = torch.randn(size, 4).double(), torch.randn(size, 3).double()
        shards = module.shard_inputs(x, y)
        if at == 0:
            for shard in shards:
                torch._dynamo.mark_dynamic(shard, 0)
        torch.testing.assert_close(module(*shards).detach(), F.mse_loss(source(x), y).detach())
    (families,) = module.shardc.cache.build.families._families.values()
    assert len(families) == 1


class Cut(nn.Linear):
    """Pads by less than nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(super().forward(x), (1, -3)).sin()


def cuts_off() -> None:
    """Inductor's trace of sizes that are symbols takes no such pad."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    source = Cut(8, 8).double()
    module = shardc.compile(
        source, mesh, shardc.fsdp("dp"), loss=F.mse_loss, dynamic={"x": {0: "b"}, "target": {0: "b"}}
    )
    for size in (4, 6, 8):
        x, y = torch.randn(size, 8).double(), torch.randn(size, 6).double()
        torch.testing.assert_close(module(*module.shard_inputs(x, y)).detach(), F.mse_loss(source(x), y).detach())


def test_negative_padding() -> None:
    run_ranks(2, cuts_off)


@pytest.mark.slow
def test_dynamic_sizes_on_two_ranks() -> None:
    run_ranks(
        2,
        partial(trains_at_many_sizes, "tp+sp", "eager"),
        partial(trains_at_many_sizes, "fsdp", "inductor"),
        marked_dims_are_dynamic,
    )
