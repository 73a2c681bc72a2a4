"""States of torch around a call (autocast and its like): each is compiled for, and computes what one device does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardc

Around = Callable[[], AbstractContextManager[Any]]


def low(dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=dtype)


class Net(nn.Module):
    """Ops that autocast makes low, one that it keeps whole, and parts with an autocast of their own."""

    def __init__(self, inside: bool = False, outside: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm, self.inside, self.outside = nn.LayerNorm(8), inside, outside

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        with low() if self.inside else nullcontext():
            x = self.second(x)
        with torch.autocast("cpu", enabled=False) if self.outside else nullcontext():
            x = self.second(x.float() if self.outside else x)
        return self.third(x)


class Twice(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Twice.apply(self.first(x)))


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, generator=generator, dtype=dtype), torch.randint(4, (4,), generator=generator)


def pair(model: nn.Module, plan: Any = None, loss: Any = F.cross_entropy) -> tuple[Any, nn.Module]:
    plan = plan or shardc.fsdp("dp")
    return shardc.compile(copy.deepcopy(model), shardc.Mesh(dp=2), plan, loss=loss, backend="eager"), model


def alike(module: Any, source: nn.Module, around: Around, loss: Any = F.cross_entropy, tolerance: float = 1e-6) -> None:
    """Output, gradients and their dtypes under ``around``; backward outside of it, as torch advises."""
    x, y = batch()
    sim = shardc.Simulation(module)
    source.zero_grad()
    with around():
        ours = sim(x, y) if loss is not None else sim(x)
        theirs = loss(source(x), y) if loss is not None else source(x)
    tangent = torch.ones_like(theirs)
    sim.backward(tangent)
    # Without a loss, gradients are those of the mean over the ranks' losses.
    theirs.backward(tangent if loss is not None else tangent / 2)
    assert ours.dtype == theirs.dtype
    close(ours, theirs.detach(), tolerance, "output")
    for name, param in source.named_parameters():
        assert sim.grad(name).dtype == param.grad.dtype
        close(sim.grad(name), param.grad, tolerance, name)


def close(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    error = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-6)
    assert error <= tolerance, f"{what} is off by {error:.2g}"


# Sums over shards are rounded to bfloat16 in other places than a whole one.
LOW = 2e-2


@pytest.mark.parametrize("loss", [F.cross_entropy, None], ids=["loss", "output"])
def test_each_autocast_has_its_program(loss: Any) -> None:
    torch.manual_seed(0)
    module, source = pair(Net(), loss=loss)
    for around, tolerance in ((low, LOW), (nullcontext, 1e-6), (lambda: low(torch.float16), LOW), (low, LOW)):
        alike(module, source, around, loss, tolerance)
    assert len(module.shardc.programs) == 3


def test_plain_first() -> None:
    torch.manual_seed(0)
    module, source = pair(Net())
    alike(module, source, nullcontext)
    alike(module, source, low, tolerance=LOW)


@pytest.mark.parametrize("kind", ["nested", "custom"])
def test_autocast_in_the_model(kind: str) -> None:
    torch.manual_seed(0)
    module, source = pair(Net(inside=True, outside=True) if kind == "nested" else Custom())
    alike(module, source, low, tolerance=LOW)
    alike(module, source, nullcontext, tolerance=LOW if kind == "nested" else 1e-6)


def test_under_a_plan_with_precision() -> None:
    """The plan's casts are those of a model whose parameters and inputs are of that dtype."""
    torch.manual_seed(0)
    module, source = pair(Net(), shardc.fsdp("dp") | shardc.precision(param=torch.bfloat16, reduce=torch.float32), None)
    x, _ = batch()
    lowered = copy.deepcopy(source).bfloat16()
    for around in (low, nullcontext):
        with around():
            ours, theirs = shardc.Simulation(module)(x), lowered(x.bfloat16())
        assert ours.dtype == theirs.dtype
        close(ours, theirs.detach(), LOW, "output")


def test_backward_inside_of_autocast() -> None:
    """The same program as outside: its casts are those of the forward."""
    torch.manual_seed(0)
    module, source = pair(Net())
    x, y = batch()
    sims = []
    for around in (low, nullcontext):
        sims.append(shardc.Simulation(module))
        with low():
            sims[-1](x, y)
        with around():
            sims[-1].backward()
    for name, _ in source.named_parameters():
        assert torch.equal(sims[0].grad(name), sims[1].grad(name))


class Makes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.full((8,), 1 / 3)


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_default_dtype() -> None:
    module, source = pair(Makes(), loss=None)
    x, _ = batch()
    for dtype in (torch.float32, torch.float64, torch.float32):
        with default(dtype):
            ours, theirs = shardc.Simulation(module)(x), source(x)
        assert ours.dtype == theirs.dtype == dtype
        torch.testing.assert_close(ours, theirs.detach())


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x).view(2, 2, 3, 1, 8).unbind(2))


def test_attention_kernels() -> None:
    module, source = pair(Attends(), loss=None)
    x, _ = batch()
    texts = []
    for around in (nullcontext, lambda: sdpa_kernel(SDPBackend.MATH), nullcontext):
        with around():
            torch.testing.assert_close(shardc.Simulation(module)(x), source(x).detach())
            texts.append(module.lower(x).text("capture"))
    flash = ["scaled_dot_product_flash" in text for text in texts]
    assert flash == [True, False, True]
    assert len(module.shardc.programs) == 2


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])
def test_a_first_call_without_gradients(first: Around) -> None:
    torch.manual_seed(0)
    module, source = pair(Net())
    x, y = batch()
    with first():
        ours = shardc.Simulation(module)(x, y, grad=False)
    close(ours, F.cross_entropy(source(x), y).detach(), 1e-6, "loss")
    alike(module, source, nullcontext)
    assert len(module.shardc.programs) == 1


def test_deterministic_mode_and_precision_are_compiled_for() -> None:
    module, source = pair(nn.Linear(8, 4))
    alike(module, source, nullcontext)
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True)
        alike(module, source, nullcontext)
    with ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("medium")
        alike(module, source, nullcontext, tolerance=LOW)
    alike(module, source, nullcontext)
    assert len(module.shardc.programs) == 3
