"""Functions with gradients of their own (`torch.autograd.Function`) within other functions: transforms and loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_slices
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.func import grad, vjp, vmap

import shardc
from shardc.errors import CaptureError
from tests.models.alike import trains_alike

FSDP = shardc.fsdp("dp", threshold=0)


class Rounded(torch.autograd.Function):
    """Rounds; its gradient is the identity where values are small."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, steps: int) -> Tensor:
        return torch.round(x * steps) / steps

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.saved_tensors[0].abs() < 2, gradient, 0), None


def rounded(x: Tensor) -> Tensor:
    return Rounded.apply(x, 8)


@torch.library.custom_op("shardc_own_gradients::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    """Has a gradient and no form under ``vmap``."""
    return x * x


square.register_fake(torch.empty_like)
square.register_autograd(
    lambda ctx, gradient: gradient * 2 * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 8), nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.b(KINDS[self.kind](self, self.a(x)))


def pulled_back(net: Net, h: Tensor) -> Tensor:
    out, pull = vjp(lambda h: rounded(h).sin(), h)
    return pull(out.detach())[0] + out


def mapped(net: Net, h: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return map_slices(lambda row: rounded(row) * square(row), h)
    return rounded(h) * square(h)


def spikes(net: Net, h: Tensor) -> Tensor:
    """A scan whose first carry requires no gradient; on one device a loop."""

    def step(voltage: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        spike = rounded(voltage)
        return voltage * 0.9 + x - spike * 0.5, spike * 2

    voltage, every = torch.zeros_like(h[:, 0]).detach(), []
    if torch.compiler.is_compiling():
        return scan(step, voltage, h, dim=1)[1]
    for x in h.unbind(1):
        voltage, spike = step(voltage, x)
        every.append(spike)
    return torch.stack(every, 1)


KINDS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "vmap": lambda net, h: vmap(rounded)(h),
    "grad of each row": lambda net, h: vmap(grad(lambda row: rounded(row).sin().sum()))(h),
    "vjp": pulled_back,
    "map": mapped,
    "a scan from zeros": spikes,
    "a long scan from zeros": lambda net, h: spikes(net, h.repeat(1, 60, 1)),
}


def detached(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(net.b(h))
    return torch.tanh(net.b(h)) * gate


def written(net: Net, h: Tensor) -> Tensor:
    h = net.b(h)
    h[..., 0] += 1
    return h.detach() + torch.tanh(h)


def looped(step: Callable[[Net, Tensor], Tensor], net: Net, h: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        count = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda n, h: n < 3, lambda n, h: (n + 1, step(net, h)), (count, h))[1]
    for _ in range(3):
        h = step(net, h)
    return h


KINDS["a loop that writes"] = partial(looped, written)
LOST: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "the gradient of an autograd.Function": lambda net, h: rounded(net.b(h)),
    r"torch\.no_grad\(\)": detached,
    r"a gradient that it takes by torch\.func": lambda net, h: grad(lambda h: net.b(h).tanh().square().sum())(h),
}


@pytest.mark.parametrize("what", LOST)
def test_a_step_of_a_loop_that_would_lose_a_gradient_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "a loop", partial(looped, LOST[what]))
    module = shardc.compile(Net("a loop"), shardc.Mesh(dp=2), FSDP, backend="eager")
    match = rf"while_loop would lose {what}(.|\n)*source: .*test_own_gradients.py:\d+\n  fix: write a scan[^\n]*$"
    with pytest.raises(CaptureError, match=match):
        module.lower(torch.randn(6, 5, 4))


@pytest.mark.filterwarnings("ignore:.*captured by running:shardc.errors.ShardcWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_one_device(kind: str) -> None:
    torch.manual_seed(0)
    trains_alike(Net(kind), (torch.randn(6, 5, 4),), {"dp": 2}, FSDP, steps=1)


def test_each_slice_of_a_map_draws_its_own_numbers() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return map_slices(lambda row: nn.functional.dropout(row, 0.5), x)

    dropped = []
    for ranks in (1, 2):
        torch.manual_seed(0)
        module = shardc.compile(Drops(), shardc.Mesh(dp=ranks), shardc.ddp("dp"), backend="eager")
        dropped.append(shardc.Simulation(module)(torch.ones(4, 16)) == 0)
    assert torch.equal(*dropped) and not torch.equal(dropped[0][0], dropped[0][1])
