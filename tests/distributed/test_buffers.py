"""Memory of collectives on real gloo ranks: planned, allocated once, and never taken from who still holds it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.runtime.gloo import direct
from tests.ranks import run_ranks


class Tower(nn.Module):
    def __init__(self, depth: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def tower(plan: shardc.Plan, ranks: int, backend: str) -> tuple[Tower, Any]:
    """The model in float64, and compiled; little is in flight, so that ranges are used again within a half."""
    torch.manual_seed(0)
    model = Tower().double()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    options = shardc.Options(bucket_size=0, max_in_flight=20_000)
    return model, shardc.compile(model, mesh, plan, backend=backend, options=options)


def rows(seed: int) -> Tensor:
    return torch.randn(12, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def same_gradients(module: Any, model: Tower, what: str) -> None:
    for name, param in model.named_parameters():
        found = module.get_parameter(name).grad.full_tensor()
        assert torch.allclose(found, param.grad, rtol=1e-9, atol=1e-12), f"{what}: {name}"


def plans_hold(level: int, ranks: int, backend: str) -> None:
    """Steps give one device's gradients, at the same addresses, in what was planned."""
    model, module = tower(shardc.fsdp("dp", level=level), ranks, backend)
    addresses: list[list[int]] = []
    made = direct.empty

    def noted(*args: Any) -> Tensor:
        addresses[-1].append((out := made(*args)).data_ptr() if args[0] else -1)
        return out

    sizes = []
    for step in range(4):
        addresses.append([])
        direct.empty = noted  # type: ignore[assignment]
        try:
            module(module.shard_inputs(rows(step))).backward()
        finally:
            direct.empty = made
        model(rows(step)).backward()
        same_gradients(module, model, f"level {level}, step {step}")
        for one in (module, model):
            one.zero_grad()
        use = module.memory()
        sizes.append(use.arena)
        assert use.strays == 0, f"{use.strays} results had no place"
    assert -1 not in addresses[-1], "a collective without a plan"
    runners = module.shardc.cache.runners.values()
    inside = [compiled.plan for runner in runners for compiled in runner._compiled.values()]
    placed = [slot.region != "outside" for plan in inside for slot in plan.slots if slot.size]
    stable = [(a, b) for a, b, kept in zip(addresses[1], addresses[3], placed, strict=True) if kept]
    assert stable and all(a == b for a, b in stable), "a planned result moved between steps"
    assert sizes[0] == sizes[-1] and len(set(addresses[-1])) < len(addresses[-1]) or level < 3
    assert abs(use.observed - use.planned_peak) <= 0.05 * use.planned_peak, use


def arenas_are_safe(ranks: int) -> None:
    """Who holds a result keeps it: two forwards before a backward, gradients over steps, an evaluation in between."""
    model, module = tower(shardc.fsdp("dp", level=2), ranks, "eager")
    losses = [(module(module.shard_inputs(rows(k))), model(rows(k))) for k in range(3)]
    assert module.memory().strays > 0, "what the first forward keeps was given to the second"
    with torch.no_grad():
        evaluated = module(module.shard_inputs(rows(7)))
        assert torch.allclose(evaluated, model(rows(7)))
    for ours, theirs in losses:
        ours.backward()
        theirs.backward()
    same_gradients(module, model, "three forwards, then three backwards")
    held = [param.grad.to_local().clone() for param in module.parameters()]
    with torch.no_grad():
        module(module.shard_inputs(rows(5)))
    module(module.shard_inputs(rows(6)))
    assert all(torch.equal(param.grad.to_local(), one) for param, one in zip(module.parameters(), held, strict=True))
    for to_none in (False, True):
        module.zero_grad(set_to_none=to_none)
        model.zero_grad(set_to_none=to_none)
        with module.no_sync():
            module(module.shard_inputs(rows(1))).backward()
        module(module.shard_inputs(rows(2))).backward()
        (model(rows(1)) + model(rows(2))).backward()
        same_gradients(module, model, f"no_sync after zero_grad(set_to_none={to_none})")


def evaluation_has_no_backward(ranks: int) -> None:
    _, module = tower(shardc.fsdp("dp"), ranks, "eager")
    with torch.no_grad():
        module(module.shard_inputs(rows(0)))
    use = module.memory()
    (plan,) = [c.plan for runner in module.shardc.cache.runners.values() for c in runner._compiled.values()]
    assert use.planned.keys() == {"inference"} and use.arena == plan.size() and use.strays == 0
    module(module.shard_inputs(rows(0))).backward()
    assert module.memory().planned.keys() == {"inference", "forward", "backward"}


@pytest.mark.slow
def test_plans_hold_on_two_ranks() -> None:
    checks = [partial(plans_hold, level, 2, "eager") for level in (1, 2, 3)]
    run_ranks(2, *checks, partial(arenas_are_safe, 2), partial(evaluation_has_no_backward, 2))


@pytest.mark.slow
def test_plans_hold_on_three_ranks_and_through_inductor() -> None:
    run_ranks(3, partial(plans_hold, 3, 3, "eager"))
    run_ranks(2, partial(plans_hold, 3, 2, "inductor"), partial(plans_hold, 2, 2, "inductor"))
