"""Dynamic sizes in microbatches and pipeline stages: one program for many sizes computes what one device computes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.mesh import Mesh
from tests.pipeline.programs import Blocks
from tests.ranks import device_mesh, run_ranks

DYNAMIC = {"x": {0: "b", 1: "t"}, "target": {0: "b", 1: "t"}}
# Rows and length; of 14 and 22 rows the last microbatch of each rank has fewer.
EVEN = ((16, 6), (32, 5), (24, 9))
SIZES = (*EVEN, (14, 6), (22, 4))


def masked(out: Tensor, target: Tensor) -> Tensor:
    """The mean over the places whose target is positive: a microbatch has any number of them."""
    mask = (target[..., :1] > 0).to(out.dtype)
    return ((out - target).square() * mask).sum() / mask.sum()


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, rows, length, 8, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    return x, y[..., :4].contiguous()


def source() -> nn.Module:
    torch.manual_seed(0)
    return Blocks(layers=2).double()


def compiled(model: nn.Module, mesh: object, plan: shardc.Plan, backend: str = "eager") -> nn.Module:
    return shardc.compile(copy.deepcopy(model), mesh, plan, loss=masked, backend=backend, dynamic=DYNAMIC)


def conditions(module: nn.Module) -> list[str]:
    """What divides, of each program for many sizes."""
    (families,) = module.shardc.cache.build.families._families.values()
    return [family.conditions[-1] for _, family in families]


def pp(schedule: str) -> shardc.Plan:
    return shardc.pp("pp", schedule, microbatches=4)


PLANS = {
    "microbatches": (Mesh(dp=2), shardc.fsdp("dp") | shardc.microbatches(4)),
    "gathered once": (Mesh(dp=2), shardc.fsdp("dp", level=2) | shardc.microbatches(4)),
    "stages": (Mesh(dp=2, pp=2), shardc.fsdp("dp") | pp("1f1b")),
    "backwards in two": (Mesh(dp=2, pp=2), shardc.fsdp("dp", level=2) | pp("zbv")),
}


QUICK = ("microbatches", "backwards in two")
RUNS = [*(pytest.param(x, EVEN) for x in QUICK), *(pytest.param(x, SIZES, marks=pytest.mark.slow) for x in PLANS)]


@pytest.mark.parametrize("name, sizes", RUNS, ids=[*QUICK, *(f"{name}, uneven too" for name in PLANS)])
def test_each_size_is_what_one_device_computes(name: str, sizes: Sequence[tuple[int, int]]) -> None:
    model, (mesh, plan) = source(), PLANS[name]
    module = compiled(model, mesh, plan)
    sim = shardc.Simulation(module)
    for rows, length in sizes:
        args = batch(rows, length)
        model.zero_grad()
        sim.grads.clear()
        loss, expected = sim(*args), masked(model(args[0]), args[1])
        sim.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        for key, p in model.named_parameters():
            torch.testing.assert_close(sim.grad(key), p.grad, rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(sim(*args, grad=False), expected.detach(), rtol=1e-12, atol=0)
    assert conditions(module) == ["b % 8 == 0", "b % 8 == 6"][: 1 if sizes == EVEN else 2]


def test_gradients_of_another_output() -> None:
    """Of a model without a loss in its graph: they are those of programs for one size each."""

    class Two(Blocks):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = self.features(x)
            return self.last(features).square().mean(), features

    torch.manual_seed(0)
    model, plan = Two(layers=2).double(), shardc.fsdp("dp") | shardc.microbatches(4)
    sims = [
        shardc.Simulation(shardc.compile(copy.deepcopy(model), Mesh(dp=2), plan, backend="eager", dynamic=dynamic))
        for dynamic in ({"x": {0: "b", 1: "t"}}, None)
    ]
    for rows, length in SIZES[:1]:
        x = batch(rows, length)[0]
        tangent = torch.ones_like(x)
        for sim in sims:
            sim.grads.clear()
            (results := sim(x)), sim.backward(None, tangent)
            torch.testing.assert_close(results[1], model.features(x).detach(), rtol=1e-12, atol=1e-14)
        assert "blocks.0.0.weight" in sims[0].grads and sims[0].grads.keys() == sims[1].grads.keys()
        for key in sims[0].grads:
            torch.testing.assert_close(sims[0].grad(key), sims[1].grad(key), rtol=1e-12, atol=1e-14)


def trained(mesh: Mesh, plan: shardc.Plan) -> None:
    model = source()
    module = compiled(model, device_mesh(mesh), plan, "inductor")
    for rows, length in SIZES:
        args = batch(rows, length)
        model.zero_grad()
        module.zero_grad()
        loss, expected = module(*module.shard_inputs(*args)), masked(model(args[0]), args[1])
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=0)
        for key, p in model.named_parameters():
            torch.testing.assert_close(module.get_parameter(key).grad.full_tensor(), p.grad, rtol=1e-9, atol=1e-14)
        with torch.no_grad():
            torch.testing.assert_close(module(*module.shard_inputs(*args)), expected.detach(), rtol=1e-9, atol=0)
    assert conditions(module) == (["b % 8 == 0", "b % 8 == 6"] if "dp" in mesh else ["b % 4 == 0", "b % 4 == 2"])


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        partial(trained, Mesh(dp=2), shardc.fsdp("dp", level=2) | shardc.microbatches(4)),
        partial(trained, Mesh(pp=2), pp("zbv")),
    )
