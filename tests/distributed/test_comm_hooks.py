"""A user's functions around gathers and reductions: int8 parameters and fp16 gradients, on two gloo ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import shardc
from shardc.ir.comm_volume import tally
from shardc.passes import OnTheWire
from shardc.runtime.full_params import unshard
from tests.ranks import run_ranks

RANKS = 2


def quantize(shard: Tensor) -> tuple[Tensor, Tensor]:
    scale = shard.abs().amax().clamp(min=1e-12) / 127
    return (shard / scale).round().to(torch.int8), scale


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    return values * scales.view(-1, *(1 for _ in values.shape[1:]))


INT8 = OnTheWire(quantize, dequantize, "*weight")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def compiled(plan: shardc.Plan, *passes: OnTheWire, mesh: Any = None, backend: str = "eager", **more: Any) -> Any:
    mesh = mesh or init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    options = shardc.Options(pipeline=lambda made: made.before("bucket", *passes), **more)
    return shardc.compile(model(), mesh, plan, loss=F.mse_loss, backend=backend, options=options)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)


def gathers_int8(backend: str, plan: shardc.Plan) -> None:
    """Values and gradients are those of one device whose weights were rounded, shard by shard."""
    ours, source = compiled(plan, INT8, backend=backend), model()
    rounded = model()
    with torch.no_grad():
        for name, param in source.named_parameters():
            shards = param.chunk(RANKS)
            if "weight" not in name:
                continue
            back = torch.cat([dequantize(q[None], s[None])[0] for q, s in map(quantize, shards)])
            rounded.get_parameter(name).copy_(back)
            for shard, approximate in zip(shards, back.chunk(RANKS), strict=True):
                error = (shard - approximate).abs().max()
                assert 0 < error <= shard.abs().max() / 254 * 1.0001
    loss = ours(*ours.shard_inputs(*rows()))
    loss.backward()
    expected = F.mse_loss(rounded(rows()[0]), rows()[1])
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    for name, param in rounded.named_parameters():
        grad = unshard(ours.get_parameter(name).grad, ours.shardc.spec.storages[name])
        torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-6)
    assert (F.mse_loss(source(rows()[0]), rows()[1]) - expected).abs() > 1e-6  # it was not sent as it was


def reduces_fp16_as_ddp() -> None:
    theirs = DistributedDataParallel(model())
    theirs.register_comm_hook(None, fp16_compress_hook)
    hook = OnTheWire(lambda term: term.to(torch.float16), lambda term: term.to(torch.float32), of="reduce")
    x, y = (t.chunk(RANKS)[dist.get_rank()] for t in rows())
    F.mse_loss(theirs(x), y).backward()
    for plan in (shardc.ddp("dp"), shardc.fsdp("dp")):
        ours = compiled(plan, hook)
        ours(x, y).backward()
        assert "f16" in ours.lower(*rows()).text("schedule.backward")
        for name, param in theirs.module.named_parameters():
            grad = unshard(ours.get_parameter(name).grad, ours.shardc.spec.storages[name])
            torch.testing.assert_close(grad, param.grad, rtol=2e-3, atol=1e-4)


def test_bytes_on_the_wire() -> None:
    """A quarter of the bytes, and four for each rank's scale, in forward and in backward."""
    mesh = shardc.Mesh(dp=RANKS)
    with_it, without = (
        compiled(shardc.fsdp("dp"), *passes, mesh=mesh, bucket_size=0).lower(*rows()) for passes in ((INT8,), ())
    )
    sent = [
        [sum(r.bytes for r in tally(half, mesh) if r.kind == "all_gather") for half in (p.forward, p.backward)]
        for p in (with_it, without)
    ]
    weights, biases = [2 * 16 * 32 * 4 // 2, 16 * 32 * 4 // 2], [(32 + 16) * 4 // 2, 0]
    assert sent[1] == [w + b for w, b in zip(weights, biases, strict=True)]
    assert sent[0] == [w // 4 + 4 * n + b for w, n, b in zip(weights, (2, 1), biases, strict=True)]
    assert "i8" in with_it.text("on_the_wire")
    # What is kept for backward is no gathered weight.
    assert all("weight.full" not in line for line in with_it.text("schedule").splitlines() if " saved" in line)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (OnTheWire(quantize, lambda q, s: q), "after makes .* where .*float32 is needed"),
        (OnTheWire(quantize, lambda q, s: (q * s.view(-1, *(1 for _ in q.shape[1:])))[0]), "after makes"),
        (OnTheWire(lambda x: x[0], lambda x: x, of="reduce"), "before makes"),
        (OnTheWire(lambda x: x * torch.tensor([2.0]), lambda x: x / 2), "uses a tensor"),
    ],
)
def test_what_does_not_fit(hook: OnTheWire, said: str) -> None:
    program = compiled(shardc.fsdp("dp"), hook, mesh=shardc.Mesh(dp=RANKS)).lower(*rows())
    with pytest.raises(shardc.ShardcError, match=said):
        program.text("bucket.backward")


def test_two_ranks() -> None:
    checks = [partial(gathers_int8, "eager", plan) for plan in (shardc.fsdp("dp"), shardc.fsdp("dp", level=2))]
    run_ranks(RANKS, *checks, partial(gathers_int8, "inductor", shardc.fsdp("dp")), reduces_fp16_as_ddp)
