"""Models that ask for the grad mode, in inference mode, in blocks that set modes, and in reentrant checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.errors import CaptureError
from tests.semantics.test_grad_mode import Forward, Net, Scaled, is_grad_enabled, pair, requires_grad

Around = Callable[[], Any]


def factor(h: Tensor) -> int:
    return (2 if h.requires_grad else 3) * (5 if h.is_leaf else 7) * (11 if torch.is_grad_enabled() else 13)


def enabled(net: Net, x: Tensor) -> Tensor:
    with torch.enable_grad():
        h = net.first(x)
        y: Tensor = net.second(h) * factor(h)
    return y


def asks_after_the_block(net: Net, x: Tensor) -> Tensor:
    with torch.enable_grad():
        h = net.first(x)
    y: Tensor = net.second(h) * factor(h) * factor(h.detach())
    return y


def asks_of_several(net: Net, x: Tensor) -> Tensor:
    with torch.enable_grad():
        several = [x * 1, net.first(x)]
    y: Tensor = net.second(several[1]) * (2 if any(each.requires_grad for each in several) else 3)
    return y


def in_part(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.first(x)
        scale = factor(h)
    y: Tensor = net.second(h)
    return y * factor(h) * factor(y) * scale


@torch.enable_grad()
def _decorated(net: Net, x: Tensor) -> Tensor:
    h: Tensor = net.first(x)
    return h * factor(h)


def decorated(net: Net, x: Tensor) -> Tensor:
    h = _decorated(net, x)
    y: Tensor = net.second(h)
    return y * factor(h)


@torch.set_grad_enabled(False)
def _without(net: Net, x: Tensor) -> Tensor:
    h: Tensor = net.first(x)
    return h * factor(h)


def decorated_by_value(net: Net, x: Tensor) -> Tensor:
    h = _without(net, x)
    y: Tensor = net.second(x)
    return y * factor(y) + h * factor(h)


def by_keyword(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode(mode=True):
        h = net.first(x)
    with torch.set_grad_enabled(mode=False):
        h = h + net.second(x)
    y: Tensor = net.second(x)
    return y * factor(y) + h * factor(h)


def set_by_a_flag(net: Net, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(net.training):
        h = net.first(x)
    y: Tensor = net.second(h)
    return y * factor(h)


def inference_block(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = net.first(x)
        h = h * factor(h)
    y: Tensor = net.second(x)
    return y + h * factor(h)


@contextmanager
def within(*contexts: Around) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


AROUND: dict[str, Around] = {
    "gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "gradients in inference": lambda: within(torch.inference_mode, torch.enable_grad),
    "gradients in no_grad": lambda: within(torch.no_grad, torch.enable_grad),
    "left": lambda: within(torch.inference_mode, lambda: torch.inference_mode(False)),
}


@pytest.mark.parametrize("first", ["gradients", "inference"])
@pytest.mark.parametrize(
    "forward",
    [
        enabled,
        asks_after_the_block,
        asks_of_several,
        in_part,
        decorated,
        decorated_by_value,
        by_keyword,
        set_by_a_flag,
        inference_block,
        requires_grad,
    ],  # fmt: skip
    ids=lambda forward: forward.__name__,
)
def test_nested_modes_compute_what_one_device_does(forward: Forward, first: str) -> None:
    module, model = pair(forward)
    for around in (first, *AROUND, first):
        with AROUND[around]():
            x = torch.arange(16, dtype=torch.float64).reshape(4, 4)
            theirs = model(x).detach()
            ours = shardc.Simulation(module)(x, grad=torch.is_grad_enabled())
        torch.testing.assert_close(ours, theirs, msg=lambda text, around=around: f"{around}: {text}")


def test_sizes_that_change_in_inference_mode() -> None:
    module, model = pair(enabled, dynamic={"x": {0: "rows"}})
    for rows in (4, 8, 12):
        for around in AROUND:
            with AROUND[around]():
                x = torch.ones(rows, 4, dtype=torch.float64)
                ours = shardc.Simulation(module)(x, grad=torch.is_grad_enabled())
                torch.testing.assert_close(ours, model(x).detach())


def test_the_mode_alone_has_one_program_without_gradients() -> None:
    module, _ = pair(is_grad_enabled)
    for around in ("gradients", "no_grad", "inference", "no_grad"):
        with AROUND[around]():
            shardc.Simulation(module)(torch.ones(4, 4, dtype=torch.float64), grad=around == "gradients")
    assert len(module.shardc.programs) == 2


def view_of_a_parameter(net: Net, x: Tensor) -> Tensor:
    weight = net.first.weight.t()
    return x @ weight * (2 if weight.requires_grad else 3)


def leaves_inference(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode(False):
        weight = net.first.weight * 2
    return x @ weight * (2 if weight.requires_grad else 3)


@pytest.mark.parametrize("forward", [view_of_a_parameter, leaves_inference], ids=lambda forward: forward.__name__)
def test_tensors_that_are_not_of_inference_mode_are_refused(forward: Forward) -> None:
    module, model = pair(forward)
    x = torch.ones(4, 4, dtype=torch.float64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(shardc.Simulation(module)(x, grad=grad), model(x).detach())
    with torch.inference_mode(), pytest.raises(CaptureError, match="inference mode") as raised:
        shardc.Simulation(module)(x, grad=False)
    _names(raised.value, "no_grad")


def gradients_in_inference(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode(), torch.enable_grad():
        h = net.first(x)
    y: Tensor = net.second(x)
    return y + h * factor(h)


def sets_gradients_in_inference(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        torch.set_grad_enabled(True)
        h = net.first(x)
    y: Tensor = net.second(x)
    return y + h * factor(h)


@pytest.mark.parametrize(
    "forward", [gradients_in_inference, sets_gradients_in_inference], ids=lambda forward: forward.__name__
)
def test_gradients_enabled_in_an_inference_block_are_refused(forward: Forward) -> None:
    with pytest.raises(CaptureError, match="enables gradients") as raised:
        pair(forward)[0].lower(torch.ones(4, 4, dtype=torch.float64))
    _names(raised.value, "no_grad")


# What a region of a checkpoint asks for.
REGIONS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "mode": lambda net, h: net.second(h) * (2 if torch.is_grad_enabled() else 3),
    "requires_grad": lambda net, h: requires_grad(net, h),
    "is_leaf": lambda net, h: h * (2 if (h * 2).is_leaf else 3),
    "needs_input_grad": lambda net, h: Scaled.apply(net.second(h)),  # type: ignore[no-untyped-call]
    "nested": lambda net, h: checkpoint(lambda h: is_grad_enabled(net, h), h, use_reentrant=False),
}


class Checkpointed(nn.Module):
    def __init__(self, region: Callable[[Net, Tensor], Tensor], **how: Any) -> None:
        super().__init__()
        self.net, self.region, self.how = Net(region), region, how

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda h: self.region(self.net, h), self.net.first(x), **self.how)
        return y


@pytest.mark.parametrize("how", [{"use_reentrant": True}, {}], ids=["reentrant", "by default"])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
def test_a_reentrant_checkpoint_that_asks_is_refused(region: str, how: dict[str, Any]) -> None:
    module = shardc.compile(Checkpointed(REGIONS[region], **how), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    with pytest.raises(CaptureError, match="reentrant checkpoint") as raised:
        module.lower(torch.ones(4, 4))
    _names(raised.value, "use_reentrant=False")


@pytest.mark.parametrize("region", REGIONS)
def test_a_checkpoint_that_asks_computes_what_one_device_does(region: str) -> None:
    _compared(Checkpointed(REGIONS[region], use_reentrant=False))


def from_the_input(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.second(checkpoint(net.first, x, use_reentrant=True))
    return y


def from_a_list(net: Net, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda several: net.second(several[0]), [net.first(x)], use_reentrant=True)
    return y


@pytest.mark.parametrize("forward", [from_the_input, from_a_list], ids=lambda forward: forward.__name__)
def test_a_reentrant_checkpoint_that_gives_no_gradients_is_refused(forward: Forward) -> None:
    with pytest.raises(CaptureError, match="none of whose arguments") as raised:
        pair(forward)[0].lower(torch.ones(4, 4, dtype=torch.float64))
    _names(raised.value, "use_reentrant=False")


def test_a_reentrant_checkpoint_of_what_is_frozen() -> None:
    module, model = pair(from_the_input)
    for each in (module, model):
        each.first.requires_grad_(False)
    x = torch.ones(4, 4, dtype=torch.float64)
    torch.testing.assert_close(shardc.Simulation(module)(x), model(x).detach())


class AsksInBackward(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (2 if ctx.needs_input_grad[0] else 3)


@pytest.mark.parametrize(
    "region",
    [lambda net, h: net.second(h), lambda net, h: AsksInBackward.apply(net.second(h))],
    ids=["nothing", "in backward"],
)
def test_a_reentrant_checkpoint_that_does_not_ask_in_forward(region: Callable[[Net, Tensor], Tensor]) -> None:
    _compared(Checkpointed(region, use_reentrant=True))


def _compared(model: Checkpointed) -> None:
    model.double()
    module = shardc.compile(copy.deepcopy(model), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    x, sim = torch.ones(4, 4, dtype=torch.float64), shardc.Simulation(module)
    out = model(x)
    torch.testing.assert_close(sim(x), out.detach())
    sim.backward(torch.ones_like(out))
    out.backward(torch.ones_like(out) / 2)
    for name, param in model.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(sim.grad(name), param.grad)


def _names(error: CaptureError, fix: str) -> None:
    assert error.source and "test_" in error.source and error.fix and fix in error.fix
