"""Outputs that the loss does not use: which gradients are None, as on one device, and that ranks must use the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import MeshError
from shardc.ir.executable import certificate_of
from tests.ranks import run_ranks
from tests.state import assert_same

PLANS = {"ddp": shardc.ddp("dp"), "fsdp2": shardc.fsdp("dp", level=2), "fsdp3": shardc.fsdp("dp", level=3)}


class Heads(nn.Module):
    """A trunk with three heads, one of them infinitely steep at 0, and a layer that no output is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 3)
        self.steep, self.idle = nn.Parameter(torch.zeros(8)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
        hidden = self.trunk(x).tanh()
        steep = (hidden * self.steep).sqrt()
        return self.a(hidden), {"b": self.b(hidden), "steep": steep}, hidden.argmax(-1), x * 2


Loss = Callable[[Any], Tensor]
LOSSES: dict[str, Loss] = {
    "one": lambda out: out[0].square().mean(),
    "two": lambda out: out[0].square().mean() + out[1]["b"].sin().mean(),
    "part of one": lambda out: out[1]["b"][:, 0].square().mean(),
}


def heads() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


def compiled(source: nn.Module, plan: shardc.Plan, backend: str = "eager") -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(source, mesh, plan, backend=backend)


def steps_equal_one_devices(name: str, backend: str = "eager") -> None:
    """Under Adam with weight decay and history, a zero gradient moves a weight, and none does not."""
    source = heads()
    module = compiled(source, PLANS[name], backend)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.1) for one in (module, source))
    for at, which in enumerate(("two", "one", "part of one", "two")):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(at))
        LOSSES[which](module(module.shard_inputs(x))).backward()
        LOSSES[which](source(x)).backward()
        assert_same(module, source, grads=True)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(module, source)


def outputs_one_after_the_other() -> None:
    """One backward for each output of one forward, the graph kept between, adds up as on one device."""
    source = heads()
    module = compiled(source, PLANS["fsdp3"])
    x = torch.randn(4, 6, dtype=torch.float64)
    for net, given in ((module, module.shard_inputs(x)), (source, x)):
        out = net(given)
        out[0].square().mean().backward(retain_graph=True)
        assert net.b.weight.grad is None
        out[1]["b"].square().mean().backward()
    assert_same(module, source, grads=True)


def what_needs_no_gradient() -> None:
    """An output that no parameter leads to needs none, and is not of the graph."""
    source = heads()
    module = compiled(source, PLANS["ddp"])
    x = torch.randn(4, 6, dtype=torch.float64)
    ours, theirs = module(module.shard_inputs(x)), source(x)
    assert [y.requires_grad for y in (ours[0], ours[1]["b"], ours[2], ours[3])] == [True, True, False, False]
    assert [y.requires_grad for y in (theirs[0], theirs[1]["b"], theirs[2], theirs[3])] == [True, True, False, False]


def fewer_collectives() -> None:
    """What only unused outputs need is not communicated in backward."""
    source = heads()
    module = compiled(source, PLANS["fsdp3"])
    module(module.shard_inputs(torch.randn(4, 6, dtype=torch.float64)))
    program = next(iter(module.shardc.programs.values()))
    certificate = certificate_of([program.half(frozenset({1}))])
    named = "\n".join(certificate.lines)
    assert "b.weight" in named and "a.weight" not in named, named


def ranks_that_use_different_outputs() -> None:
    module = compiled(heads(), PLANS["fsdp3"])
    x = module.shard_inputs(torch.randn(4, 6, dtype=torch.float64))
    with pytest.raises(MeshError, match="rank 0 has 0, 1, rank 1 has 0"):
        LOSSES["one" if module.shardc.spec.rank else "two"](module(x)).backward()


class Held(nn.Module):
    """Both outputs lead to one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x) + self.a.weight.sum()


def held_back(name: str) -> None:
    """Under no_sync each micro-batch may use other outputs."""
    torch.manual_seed(0)
    source = Held().double()
    module = compiled(source, PLANS[name])
    for at, used in enumerate((0, 0, 1)):
        x = torch.randn(4, 6, dtype=torch.float64)
        with module.no_sync() if at < 2 else torch.enable_grad():
            module(module.shard_inputs(x))[used].square().mean().backward()
        source(x)[used].square().mean().backward()
        if at == 1:
            assert source.b.weight.grad is None and "b.weight" not in {n for n, _ in module.shardc.params.sync.sums}
    assert_same(module, source, grads=True)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        *(partial(steps_equal_one_devices, name) for name in PLANS),
        partial(steps_equal_one_devices, "fsdp3", "inductor"),
        outputs_one_after_the_other,
        what_needs_no_gradient,
        fewer_collectives,
        *(partial(held_back, name) for name in PLANS),
    )


@pytest.mark.slow
def test_ranks_that_differ() -> None:
    run_ranks(2, ranks_that_use_different_outputs)


MESHES = [
    ({"dp": 2}, shardc.fsdp("dp")),
    ({"tp": 2}, shardc.tp("tp", colwise=["trunk"], rowwise=["a", "b"])),
    ({"dp": 2, "tp": 2}, shardc.fsdp("dp") | shardc.tp("tp", colwise=["trunk"], rowwise=["a", "b"])),
]


def assert_gradients(
    sim: shardc.Simulation, source: nn.Module, outputs: tuple[Tensor, ...], used: tuple[int, ...]
) -> None:
    """Goes backward from the outputs of these indices, with the same tangents in the simulator and on one device."""
    tangents = [torch.randn_like(y) if at in used else None for at, y in enumerate(outputs)]
    sim.backward(*tangents)
    torch.autograd.backward([outputs[at] for at in used], [tangents[at] for at in used])
    for name, param in source.named_parameters():
        assert (param.grad is None) == (name not in sim.grads), name
        if param.grad is not None:
            torch.testing.assert_close(sim.grad(name), param.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize(("mesh", "plan"), MESHES, ids=[",".join(mesh) for mesh, _ in MESHES])
def test_each_set_on_each_mesh(mesh: dict[str, int], plan: shardc.Plan, used: tuple[int, ...]) -> None:
    """Tangents of some outputs, in the simulator; the global loss is a sum over all that they are."""
    source = heads()
    with torch.no_grad():
        source.steep.fill_(0.5)
        source.trunk.weight.abs_()
        source.trunk.bias.fill_(1.0)
    module = shardc.compile(source, shardc.Mesh(mesh), plan | shardc.Plan(reduce="sum"))
    module.load_state_dict(source.state_dict())
    sim = shardc.Simulation(module)
    x = torch.rand(4, 6, dtype=torch.float64)
    sim(x)
    out = source(x)
    assert_gradients(sim, source, (out[0], out[1]["b"], out[1]["steep"]), used)


def test_zero_times_infinity_is_not_added() -> None:
    """What an unused output would add to a shared gradient is nothing, not 0 * inf."""
    source = heads()
    module = shardc.compile(source, shardc.Mesh(dp=2), shardc.fsdp("dp"))
    module.load_state_dict(source.state_dict())
    sim = shardc.Simulation(module)
    x = torch.randn(4, 6, dtype=torch.float64)
    sim(x)
    sim.backward(torch.ones(4, 5, dtype=torch.float64), None, None)
    assert sim.grad("trunk.weight").isfinite().all() and "steep" not in sim.grads


class Scored(nn.Module):
    """A loss beside what it is made of, as models of transformers return them."""

    def __init__(self, balance: bool = False) -> None:
        super().__init__()
        self.layer, self.balance = nn.Linear(6, 3), balance

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.layer(x)
        more = {"balance": scores.mean()} if self.balance else {}
        return {"loss": scores.square().mean(), "scores": scores, **more}


def test_a_simulation_takes_the_scalar_for_the_loss() -> None:
    torch.manual_seed(0)
    source, x = Scored().double(), torch.randn(4, 6, dtype=torch.float64)
    source(x)["loss"].backward()
    sim = shardc.Simulation(shardc.compile(copy.deepcopy(source), shardc.Mesh(dp=2), PLANS["fsdp3"], backend="eager"))
    for given in ((), (torch.ones((), dtype=torch.float64), None)):
        sim.grads.clear()
        sim(x)
        sim.backward(*given)
        torch.testing.assert_close(sim.grad("layer.weight"), source.layer.weight.grad, rtol=1e-12, atol=1e-12)
    sim(x)
    with pytest.raises(shardc.ShardcError, match="2 outputs have gradients, but 1 were given"):
        sim.backward(torch.ones((), dtype=torch.float64))


def test_a_simulation_does_not_guess_which_scalar_is_the_loss() -> None:
    """Models of experts return a loss that has the balance in it already, and the balance."""
    sim = shardc.Simulation(shardc.compile(Scored(balance=True), shardc.Mesh(dp=2), PLANS["ddp"], backend="eager"))
    sim(torch.randn(4, 6))
    with pytest.raises(shardc.ShardcError, match="2 of the outputs are scalars"):
        sim.backward()
    assert not sim.grads


class Statistics(nn.Module):
    """Two outputs whose backwards take a mean over the batch again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        other = self.b(x)
        return self.a(x).std() + x[:, 0], (other - other.mean(0)) / (other.var(0) + 0.1), (x @ self.a.weight.t()).sin()


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (1, 2)])
@pytest.mark.parametrize("plan", [shardc.Plan(inputs={"x": ("dp", None)}), *PLANS.values()])
def test_statistics_in_a_bucket_with_gradients(plan: shardc.Plan, used: tuple[int, ...]) -> None:
    """A bucket has what a gradient is made of, and sums of forward's values that are there whatever is used."""
    torch.manual_seed(0)
    source = Statistics().double()
    module = shardc.compile(source, shardc.Mesh(dp=2), plan | shardc.Plan(reduce="sum"))
    module.load_state_dict(source.state_dict())
    sim = shardc.Simulation(module)
    x = torch.randn(4, 6, dtype=torch.float64)
    sim(x)
    assert_gradients(sim, source, source(x), used)
