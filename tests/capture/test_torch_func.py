"""Transforms of ``torch.func`` in forward: their results as outputs, and modules run with other parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import shardc
from shardc.errors import CaptureError
from tests.models.alike import relative, trains_alike
from tests.ranks import device_mesh, run_ranks

PLAN = shardc.fsdp("dp", threshold=0)


class Returns(nn.Module):
    def __init__(self, run: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.run = nn.Linear(4, 4), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self.net, x)


def pulled_back(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    out, pull = vjp(net, x)
    return out, pull(out.tanh())[0]


def energy(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: net(x).square().sum()


RESULTS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": lambda net, x: vmap(net)(x),
    "a view by vmap": lambda net, x: vmap(lambda row: row.view(2, 2))(net(x)),
    "vmap over weights": lambda net, x: vmap(lambda row, x: x @ row, in_dims=(0, None))(net.weight, x).t(),
    "grad": lambda net, x: grad(energy(net))(x),
    "grad of each row": lambda net, x: vmap(grad(energy(net)))(x),
    "grad_and_value": lambda net, x: grad_and_value(energy(net))(x)[0],
    "jvp": lambda net, x: jvp(net, (x,), (x.sin(),)),
    "vjp": pulled_back,
    "jacrev": lambda net, x: vmap(jacrev(lambda row: net(row).tanh()))(x),
    "jacfwd": lambda net, x: vmap(jacfwd(lambda row: net(row).tanh()))(x),
    "jvp of a view": lambda net, x: vmap(lambda row: jvp(net, (row,), (row.sin(),))[1])(torch.stack([x, x], 1)[:, 0]),
    "hessian of a view": lambda net, x: vmap(hessian(lambda row: net(row).tanh().sum()))(torch.stack([x, x], 1)[:, 0]),
}


@pytest.mark.parametrize("run", RESULTS)
def test_results_are_outputs(run: str) -> None:
    torch.manual_seed(0)
    model, x = Returns(RESULTS[run]).double(), torch.randn(6, 4, dtype=torch.float64)
    sim = shardc.Simulation(shardc.compile(copy.deepcopy(model), shardc.Mesh(dp=2), PLAN, backend="eager"))
    ours, theirs = sim(x), model(x)
    many = isinstance(theirs, tuple)
    for our, their in zip(ours, theirs, strict=True) if many else [(ours, theirs)]:
        assert relative(our, their) < 1e-9
    sum(out.sum() for out in (theirs if many else [theirs])).backward()
    sim.backward()
    for name, param in model.named_parameters():
        assert (name in sim.grads) == (param.grad is not None)
        if param.grad is not None:  # ranks' losses are averaged
            assert relative(2 * sim.grad(name), param.grad) < 1e-9


class Penalty(nn.Module):
    """Backward reads a tensor of ones that forward has expanded, whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        forces = grad(lambda x: self.down(self.up(x).tanh()).sum())(x)
        return (forces.square().sum(-1) - 1).square()


def expanded_values_reach_backward() -> None:
    torch.manual_seed(0)
    model, x = Penalty().double(), torch.randn(4, 3, 6, dtype=torch.float64)
    module = shardc.compile(copy.deepcopy(model), device_mesh(shardc.Mesh(dp=2)), PLAN, loss=lambda out: out.mean())
    loss, expected = module(module.shard_inputs(x)), model(x).mean()
    loss.backward()
    expected.backward()
    assert relative(loss.detach(), expected.detach()) < 1e-9
    for name, param in module.named_parameters():
        if (theirs := model.get_parameter(name).grad) is not None:
            assert relative(param.grad.full_tensor(), theirs) < 1e-9


def test_gradients_by_inductor() -> None:
    run_ranks(2, expanded_values_reach_backward)


class Hyper(nn.Module):
    """Runs a module that is no part of it with parameters that it computes."""

    def __init__(self, device: str, given: int) -> None:
        super().__init__()
        self.hyper, self.given = nn.Linear(4, 20), given
        self.target = [nn.Linear(4, 4, device=device, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        values = self.hyper(x.mean(0))
        params = {"weight": values[:16].view(4, 4), "bias": values[16:]}
        return functional_call(self.target[0], dict(list(params.items())[: self.given]), (x,))


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nets = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(nets)
        self.names, self.base = list(stacked), [nets[0].to("meta")]
        self.stacked = nn.ParameterList(list(stacked.values()))

    def forward(self, x: Tensor) -> Tensor:
        def call(params: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self.base[0], params, (x,))  # type: ignore[no-any-return]

        return vmap(call, in_dims=(0, None))(dict(zip(self.names, self.stacked, strict=True)), x)


@pytest.mark.parametrize("model", [lambda: Hyper("cpu", 2), lambda: Hyper("meta", 2), Ensemble])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_module_whose_parameters_are_replaced(model: Callable[[], nn.Module], ranks: int) -> None:
    torch.manual_seed(0)
    trains_alike(model(), (torch.randn(6, 4),), {"dp": ranks}, PLAN, steps=2)


def test_a_module_some_of_whose_parameters_are_replaced_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"reads model.target\[0\]._parameters\['bias'\].*no parameter of the comp"):
        trains_alike(Hyper("cpu", 1), (torch.randn(6, 4),), {"dp": 2}, PLAN, steps=1)
