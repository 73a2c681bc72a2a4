"""Gradients share no memory with each other, nor with what the user holds; and buffers that get each other's values."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc.errors import InputError, ShardcWarning
from tests.ranks import run_ranks

BACKENDS = pytest.mark.parametrize("backend", ["eager", "inductor"])


class Prefix(nn.Module):
    """The gradients of ``prefix`` and of the input are parts of that of ``shift``, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix, self.shift = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((torch.cat([self.prefix, x]) + self.shift) ** 2).sum()


class AddGradient(torch.autograd.Function):
    """Adds to the gradient of ``values`` these values themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.saved_tensors[0]


class Decay(nn.Module):
    """The gradient of ``weight`` is ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return AddGradient.apply(x, self.weight).sum()


class FromBuffer(Decay):
    """The gradient of ``weight`` is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pull", torch.full((4, 4), 5.0))

    def forward(self, x: Tensor) -> Tensor:
        return PullTo.apply(self.weight, self.pull).sum() + x.sum()


class PullTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pull: Tensor) -> Tensor:
        ctx.save_for_backward(pull)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def compiled(model: nn.Module, backend: str) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return shardc.compile(copy.deepcopy(model), mesh, shardc.ddp("dp"), backend=backend)


def changed_together(tensors: dict[str, Tensor]) -> set[tuple[str, str]]:
    """Changes each of ``tensors`` in place. Returns the pairs of which the second has changed with the first."""
    plain = {name: (x.to_local() if isinstance(x, DTensor) else x).detach() for name, x in tensors.items()}
    pairs = set()
    for name, x in plain.items():
        before = {other: y.clone() for other, y in plain.items()}
        x.add_(1)
        pairs |= {(name, other) for other, y in plain.items() if other != name and not torch.equal(y, before[other])}
    return pairs


def shares_nothing(model: nn.Module, backend: str) -> None:
    module = compiled(model, backend)
    x = torch.randn(4, 4, requires_grad=True)
    module(x).backward()
    tensors = {"x": x, "x.grad": x.grad} | dict(module.named_parameters()) | dict(module.named_buffers())
    tensors |= {f"{name}.grad": param.grad for name, param in module.named_parameters()}
    assert len(tensors) > 3
    assert changed_together(tensors) == set()


def local_sums(backend: str) -> None:
    """What `no_sync` holds back keeps its values when the user changes other gradients."""
    module = compiled(Sum(), backend)
    x, tangent = torch.zeros(4, 4, requires_grad=True), torch.ones(4, 4)
    with module.no_sync():
        for _ in range(2):
            module(x).backward(tangent)
            x.grad.zero_(), tangent.zero_().add_(1)
        tangent.zero_()
    module(x).backward(torch.ones(4, 4))
    assert torch.equal(module.shift.grad.to_local(), torch.full((4, 4), 3.0))


def sums_of_an_expanded_gradient() -> None:
    """All elements of a gradient are one, to which later ones cannot be added in place."""
    module = compiled(nn.Sequential(Sum(), nn.Flatten(0)), "eager")
    with module.no_sync():
        for _ in range(3):
            module(torch.zeros(4, 4)).sum().backward()
    module(torch.zeros(4, 4)).sum().backward()
    assert torch.equal(module[0].shift.grad.to_local(), torch.full((4, 4), 4.0))


@BACKENDS
def test_gradients(backend: str) -> None:
    models = (Prefix(), Decay(), FromBuffer())
    run_ranks(1, *(partial(shares_nothing, model, backend) for model in models), partial(local_sums, backend))


def test_sums_of_an_expanded_gradient() -> None:
    run_ranks(1, sums_of_an_expanded_gradient)


class History(nn.Module):
    """Buffers get each other's values of before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        for at, name in enumerate(("newest", "older", "oldest")):
            self.register_buffer(name, torch.full((4,), float(at)))
        self.register_buffer("square", torch.arange(16.0).view(4, 4))
        self.register_buffer("before", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        transposed = self.square.t().clone()
        self.before.copy_(self.square)
        self.square.mul_(2)
        self.oldest.copy_(self.older)
        self.older.copy_(self.newest)
        self.newest.copy_(x.detach().sum(0))
        return ((x * self.weight) @ transposed).sum()


def buffers_of_before(backend: str, trains: bool) -> None:
    model = History()
    module = compiled(model, backend)
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        with torch.set_grad_enabled(trains):
            ours, theirs = module(module.shard_inputs(x)), model(x)
        torch.testing.assert_close(ours, theirs)
        if trains:
            ours.backward(), theirs.backward()
    for ours, theirs in zip(module.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    if trains:
        torch.testing.assert_close(module.weight.grad.full_tensor(), model.weight.grad)


@BACKENDS
def test_buffers_that_get_each_others_values(backend: str) -> None:
    run_ranks(1, partial(buffers_of_before, backend, True), partial(buffers_of_before, backend, False))


class Shared(nn.Module):
    """Two layers and two buffers in one memory."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = nn.Parameter(self.first.weight.data.t())
        self.register_buffer("counts", torch.zeros(4))
        self.register_buffer("first_counts", self.counts[:2])
        self.requires_grad_(trained)


def test_tensors_in_one_memory_that_are_not_tied() -> None:
    with pytest.raises(InputError, match=r"'first\.weight' and parameter 'second\.weight' share memory"):
        shardc.compile(Shared(trained=True), shardc.Mesh(dp=2), shardc.ddp("dp"))
    with pytest.warns(ShardcWarning) as caught:
        shardc.compile(Shared(trained=False), shardc.Mesh(dp=2), shardc.ddp("dp"))
    texts = [str(x.message) for x in caught]
    assert len(texts) == 2 and any("'counts' and buffer 'first_counts' share memory" in text for text in texts)


def test_parts_of_one_memory() -> None:
    """They may be parameters of their own."""
    model, whole = Shared(trained=True), torch.randn(8, 4)
    model.first.weight, model.second.weight = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    del model.first_counts
    shardc.compile(model, shardc.Mesh(dp=2), shardc.ddp("dp"))
