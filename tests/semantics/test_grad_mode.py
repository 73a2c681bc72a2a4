"""Models that ask whether gradients are recorded compute under ``torch.no_grad`` what one device does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardc

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first, self.second, self.dropout, self.fast = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5), False
        self.runs = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.runs(self, x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (2 if ctx.needs_input_grad[0] else 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def is_grad_enabled(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * (2 if torch.is_grad_enabled() else 3)


def requires_grad(net: Net, x: Tensor) -> Tensor:
    h: Tensor = net.first(x)
    return h * (2 if any(each.requires_grad for each in (h,)) else 3)


def is_leaf(net: Net, x: Tensor) -> Tensor:
    h: Tensor = net.first(x)
    return h * (2 if h.is_leaf else 3)


def needs_input_grad(net: Net, x: Tensor) -> Tensor:
    y: Tensor = Scaled.apply(net.first(x))  # type: ignore[no-untyped-call]
    return y


def handed_on(net: Net, x: Tensor) -> Tensor:
    ask = torch.is_grad_enabled
    with torch.no_grad():
        y = net.first(x) * (2 if ask() else 5)
    return (net.second(x) + y) * (2 if ask() else 3)


def checkpoints(net: Net, x: Tensor) -> Tensor:
    h: Tensor = checkpoint(net.first, x, use_reentrant=False) if torch.is_grad_enabled() else net.first(x)
    return net.second(h)


def restores(net: Net, x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    with torch.no_grad():
        y = net.first(x)
    with torch.set_grad_enabled(before):
        return net.second(x) + y


def has_a_way_of_its_own(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * (3 if net.fast and not torch.is_grad_enabled() else 2)


def inside_of_a_function(net: Net, x: Tensor) -> Tensor:
    with torch.enable_grad():
        h = net.first(x)
    return h * (2 if h.requires_grad else 3)


def of_a_gradient(net: Net, x: Tensor) -> Tensor:
    h: Tensor = net.first(x)
    return h * (2 if h.grad is None else 3)


def never(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.second(torch.relu(net.first(x)))
    return y


# What asks -> how many programs there are of it.
ASKS: dict[Forward, int] = {
    is_grad_enabled: 2, requires_grad: 2, is_leaf: 2, needs_input_grad: 2, handed_on: 2, checkpoints: 1, restores: 1,
    has_a_way_of_its_own: 1, inside_of_a_function: 1, of_a_gradient: 1, never: 1,
}  # fmt: skip


def pair(forward: Forward, **how: Any) -> tuple[Any, Net]:
    torch.manual_seed(0)
    model = Net(forward).double()
    mesh, plan = shardc.Mesh(dp=2), shardc.fsdp("dp")
    return shardc.compile(copy.deepcopy(model), mesh, plan, backend="eager", **how), model


def alike(module: Any, model: Net, grad: bool, rows: int = 4) -> None:
    x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sim = shardc.Simulation(module)
    model.zero_grad()
    with torch.set_grad_enabled(grad):
        ours, theirs = sim(x, grad=grad), model(x)
    torch.testing.assert_close(ours, theirs.detach(), msg=lambda text: f"gradients {grad}: {text}")
    if grad:
        sim.backward(torch.ones_like(theirs))
        theirs.backward(torch.ones_like(theirs) / 2)
        for name, param in model.named_parameters():
            if param.grad is not None:
                torch.testing.assert_close(sim.grad(name), param.grad)


@pytest.mark.parametrize("first", [True, False], ids=["trains first", "evaluates first"])
@pytest.mark.parametrize("forward", ASKS, ids=lambda forward: forward.__name__)
def test_each_mode_computes_what_one_device_does(forward: Forward, first: bool) -> None:
    module, model = pair(forward)
    for grad in (first, not first, first, not first):
        alike(module, model, grad)
    assert len(module.shardc.programs) == ASKS[forward]


def test_a_branch_of_evaluation_that_opens_later() -> None:
    """What is read without gradients only is watched, too."""
    module, model = pair(has_a_way_of_its_own)
    for fast in (False, True, False):
        module.fast = model.fast = fast
        for grad in (True, False):
            alike(module, model, grad)


def test_sizes_that_change() -> None:
    module, model = pair(is_grad_enabled, dynamic={"x": {0: "rows"}})
    for rows in (4, 8, 12):
        for grad in (True, False):
            alike(module, model, grad, rows)


def test_inference_mode() -> None:
    module, model = pair(is_grad_enabled)
    alike(module, model, True)
    x = torch.ones(4, 4, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(shardc.Simulation(module)(x, grad=False), model(x))


def test_a_loss_that_asks() -> None:
    def loss(out: Tensor) -> Tensor:
        return out.sum() * (2 if torch.is_grad_enabled() else 3)

    module, model = pair(never, loss=loss)
    x = torch.ones(4, 4, dtype=torch.float64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(shardc.Simulation(module)(x, grad=grad), loss(model(x)).detach())
