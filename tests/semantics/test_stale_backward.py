"""Backwards that torch refuses: of values that were changed meanwhile, run twice, or to be differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import BackwardError
from tests.ranks import run_ranks
from tests.state import assert_same, close

PLANS = {name: shardc.fsdp("dp", level=level) for name, level in (("fsdp2", 2), ("fsdp3", 3))} | {
    "ddp": shardc.ddp("dp")
}


class Net(nn.Module):
    """The weights of the first layer and all biases are of no use to a backward; a buffer scales what comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def compiled(source: nn.Module, plan: shardc.Plan, backend: str = "eager", loss: Any = F.mse_loss) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(source, mesh, plan, loss=loss, backend=backend)


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)


def only(module: nn.Module, *names: str) -> list[nn.Parameter]:
    return [module.get_parameter(name) for name in names]


def add(module: nn.Module, name: str) -> None:
    with torch.no_grad():
        getattr(module, name.split(".")[0]).get_parameter(name.split(".")[1]).add_(1.0)


# What is done between the forward and the backward -> whether torch refuses the backward then.
CHANGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "sgd": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=False).step(), True),
    "foreach": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=True).step(), True),
    "other parameters": (lambda m: torch.optim.SGD(only(m, "first.weight", "last.bias"), lr=0.1).step(), False),
    "add_ to what is read": (lambda m: add(m, "last.weight"), True),
    "add_ to what is not": (lambda m: add(m, "first.weight"), False),
    "buffer": (lambda m: m.scale.add_(1.0), True),
}


def changed_in_between(plan: str, change: str) -> None:
    source = net()
    module = compiled(source, PLANS[plan])
    do, refused = CHANGES[change]
    x, y = data()
    for m, given in ((module, module.shard_inputs(x, y)), (source, None)):
        step = (lambda: module(*given)) if m is module else (lambda: F.mse_loss(source(x), y))  # noqa: B023
        step().backward()
        loss = step()
        do(m)
        if refused:
            with pytest.raises(
                RuntimeError, match="modified by an inplace" if m is source else "modified in place"
            ) as e:
                loss.backward()
            named = "scale" if change == "buffer" else "last.weight"
            assert m is source or (isinstance(e.value, BackwardError) and named in str(e.value))
        else:
            loss.backward()
    assert_same(module, source, grads=True)


def fused_steps(wrapped: bool) -> None:
    """Torch itself takes no note of these."""
    module = compiled(net(), PLANS["fsdp2"])
    x, y = data()
    if wrapped:
        optimizer = shardc.optim.wrap(torch.optim.AdamW, module, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        module(*module.shard_inputs(x, y)).backward()
        loss = module(*module.shard_inputs(x, y))
        optimizer.step()
        with pytest.raises(BackwardError, match=r"last\.weight"):
            loss.backward()
        optimizer.zero_grad()


def an_input_that_changes() -> None:
    module = compiled(net(), PLANS["fsdp2"])
    x, y = module.shard_inputs(*data())
    loss = module(x, y)
    x.mul_(2.0)
    with pytest.raises(BackwardError, match="input 'x' was modified in place"):
        loss.backward()


class Counts(nn.Module):
    """Reads a buffer before it counts on."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * self.count.clone()
        self.count.add_(1.0)
        return y


def a_buffer_that_the_forward_changes() -> None:
    torch.manual_seed(0)
    source = Counts().double()
    module = compiled(source, PLANS["ddp"])
    for _ in range(2):
        x, y = data()
        losses = [module(*module.shard_inputs(x, y)) for _ in range(2)]
        theirs = [F.mse_loss(source(x), y) for _ in range(2)]
        for ours, other in zip(losses, theirs, strict=True):
            close(ours.detach(), other.detach())
            ours.backward()
            other.backward()
        assert_same(module, source, grads=True)


def kept_graphs(backend: str) -> None:
    """retain_graph=True gives the same gradients again; a backward without it is the last."""
    source = net()
    module = compiled(source, PLANS["fsdp2"], backend)
    x, y = data()
    for _ in range(2):
        ours, theirs = module(*module.shard_inputs(x, y)), F.mse_loss(source(x), y)
        for keep in (True, True, False):
            ours.backward(retain_graph=keep)
            theirs.backward(retain_graph=keep)
            assert_same(module, source, grads=True)
        with pytest.raises(RuntimeError, match="retain_graph"):
            ours.backward()


def gradients_of_gradients() -> None:
    module = compiled(net(), PLANS["ddp"])
    x, y = module.shard_inputs(*data())
    loss = module(x, y)
    with pytest.raises(BackwardError, match="create_graph=True"):
        torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    loss.backward()  # nothing was lost


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        *(partial(changed_in_between, "fsdp2", change) for change in CHANGES),
        *(partial(changed_in_between, plan, "sgd") for plan in ("ddp", "fsdp3")),
        partial(fused_steps, True),
        partial(fused_steps, False),
        an_input_that_changes,
        a_buffer_that_the_forward_changes,
        partial(kept_graphs, "eager"),
        partial(kept_graphs, "inductor"),
        gradients_of_gradients,
    )
