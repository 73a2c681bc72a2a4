"""What is not folded, or not all of it: blocks that differ, and what is beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.errors import ShardcWarning
from shardc.ir.mesh import Mesh
from tests.test_fold import FOLD, WIDTH, Layer, Stack, check, program, stack


class Paired(Stack):
    """Every two layers are one checkpoint region."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = checkpoint(lambda x, first=first, second=second: second(first(x)), x, use_reentrant=False)
        return self.last(x).sum()


@pytest.mark.slow
def test_regions_of_several_blocks_are_not_folded() -> None:
    with pytest.warns(ShardcWarning, match="checkpoint regions do not repeat as blocks do"):
        check(lambda: (Paired(*(Layer() for _ in range(8))), *stack(8)[1:]), shardc.fsdp("dp"), False, dp=2)


class Counted(Layer):
    """A layer that keeps state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x) - self.mean


class Scaled(Layer):
    """A layer that knows its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.number)


class Scales(Layer):
    """A layer that multiplies by a number that it is passed."""

    def forward(self, x: Tensor, number: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * number


class Signed(Stack):
    """Layers of which one is passed a zero of another sign."""

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = torch.tanh(layer(x, -0.0 if at == 2 else 0.0))
        return self.last(x).sum()


def tied(layers: int) -> Any:
    made = [Layer() for _ in range(layers)]
    made[4].up.weight = made[1].up.weight
    return Stack(*made), (torch.empty(8, WIDTH),), None


def wide_at(place: int, layers: int) -> Any:
    made = [Layer(4 * WIDTH if at == place else 2 * WIDTH) for at in range(layers)]
    return Stack(*made), (torch.empty(8, WIDTH),), None


def stack_of(kind: Callable[[int], nn.Module], layers: int) -> Any:
    return Stack(*(kind(at) for at in range(layers))), (torch.empty(8, WIDTH),), None


def frozen_at(place: int, layers: int) -> Any:
    made = stack(layers)
    made[0].layers[place].requires_grad_(False)
    return made


class Dropping(Layer):
    """A layer that draws."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


NEVER = {
    "draws": lambda: stack_of(lambda at: Dropping(), 6),
    "state": lambda: stack_of(lambda at: Counted(), 6),
    "the sign of a zero": lambda: (Signed(*(Scales() for _ in range(6))), (torch.empty(8, WIDTH),), None),
    "its number": lambda: stack_of(Scaled, 6),
    "a shared parameter": lambda: tied(6),
    "other shapes": lambda: wide_at(2, 6),
    "a frozen block": lambda: frozen_at(3, 6),
    "an output in between": lambda: stack(6, combine=lambda outs: outs[3] + outs[-1]),
    "all outputs": lambda: stack(6, combine=lambda outs: torch.stack(outs).mean(0)),
    "their number": lambda: stack(6, combine=lambda outs: outs[-1] / len(outs)),
}


@pytest.mark.parametrize(
    "why", [pytest.param(why, marks=[pytest.mark.slow] if why == "other shapes" else []) for why in NEVER]
)
def test_blocks_that_differ_are_not_folded(why: str) -> None:
    assert program(NEVER[why](), shardc.fsdp("dp"), True, dp=2).folded is None


def test_a_plan_of_one_block_splits_the_run() -> None:
    """Blocks that the plan treats alike are folded, before that block and behind it."""
    plan = shardc.tp("tp", colwise=["layers.5.up"], rowwise=["layers.5.down"])
    folded = check(lambda: stack(11), plan, True, tp=2)
    assert [str(each) for each in folded.folded.repeats] == ["layers.0 to layers.4", "layers.6 to layers.10"]


def test_what_stands_behind_a_run_keeps_its_name() -> None:
    folded = check(lambda: wide_at(6, 8), shardc.fsdp("dp"), True, dp=2)
    assert [str(each) for each in folded.folded.repeats] == ["layers.0 to layers.5"]


@pytest.mark.slow
def test_two_runs() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = stack(6)[0], stack(7)[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(x * self.encoder(x))

    folded = check(lambda: (Both(), (torch.empty(8, WIDTH),), None), shardc.fsdp("dp"), True, dp=2)
    assert [str(each) for each in folded.folded.repeats] == [
        "encoder.layers.0 to encoder.layers.5", "decoder.layers.0 to decoder.layers.6",
    ]  # fmt: skip


class Pulled(torch.autograd.Function):
    """The identity, whose gradient is multiplied: nothing of that is seen in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.by, None


class Pulling(Layer):
    """A layer that pulls its gradient."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Pulled.apply(x, self.by))


@pytest.mark.parametrize("place", [1, 4, 6])
def test_blocks_that_read_other_values_are_not_folded(place: int) -> None:
    """What a block that was not captured would have read is compared with what those read that were."""
    torch.manual_seed(0)
    model = Stack(*(Pulling(3.0 if at == place else 2.0) for at in range(7))).double()
    x = torch.randn(8, WIDTH).double()
    module = shardc.compile(model, Mesh(dp=2), shardc.fsdp("dp"), backend="eager", options=FOLD)
    simulation = shardc.Simulation(module)
    simulation(x)
    simulation.backward()
    model(x).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(simulation.grad(name), param.grad, rtol=1e-9, atol=1e-12)
    alike = shardc.compile(Stack(*(Pulling(2.0) for _ in range(7))), Mesh(dp=2), shardc.ddp("dp"), options=FOLD)
    reads = alike.lower(x.float()).guards.reads
    assert {str(read) for read in reads.entries} >= {f"model._modules['layers']._modules['{at}'].by" for at in range(7)}


class Carrying(Stack):
    """Every layer adds a value that looks like another layer's result; its gradient is summed from layer to layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = kept = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x) + kept)
        return self.last(x + (kept if self.combine([x, kept]) is kept else 0)).sum()


@pytest.mark.parametrize("at", [0, 1])
def test_values_that_all_blocks_read_are_not_copied_with_them(at: int) -> None:
    torch.manual_seed(0)
    model = Carrying(*(Layer() for _ in range(8)), combine=lambda both: both[at]).double()
    x = torch.randn(8, WIDTH).double()
    module = shardc.compile(model, Mesh(dp=2), shardc.fsdp("dp"), backend="eager", options=FOLD)
    simulation = shardc.Simulation(module)
    simulation(x)
    simulation.backward()
    model(x).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(simulation.grad(name), param.grad, rtol=1e-9, atol=1e-12)
