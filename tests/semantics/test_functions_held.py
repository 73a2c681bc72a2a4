"""Functions that a model holds, and that hold the model: those of a compiled module use its own parameters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from tests.semantics.test_after_compile import alike, inputs, loss


def _project(of: nn.Module, x: Tensor, *, scale: float) -> Tensor:
    return x @ of.weight.T * scale  # type: ignore[operator, union-attr]


def _by_default(model: Any) -> Callable[[Tensor], Tensor]:
    def head(x: Tensor, of: nn.Module = model.embed, *, more: nn.Module = model.norm) -> Tensor:
        return x @ more(of.weight).T  # type: ignore[operator]

    return head


def _wrapped(model: Any) -> Callable[[Tensor], Tensor]:
    """A function that holds one that holds a method."""
    before = model.project
    return functools.wraps(before)(lambda x: before(x) * 2)


def _over(found: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ (found["embed"] if isinstance(found, dict) else found[0]).weight.T


def _kept(model: Any) -> Callable[[Tensor], Tensor]:
    model.kept = [model.embed.weight]
    return lambda x: x @ model.kept[0].T


HEADS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "the model": lambda m: lambda x: x @ m.embed.weight.T,
    "a parameter": lambda m: (lambda weight: lambda x: x @ weight.T)(m.embed.weight),
    "a list of parameters": _kept,
    "in a default": _by_default,
    "in a partial": lambda m: functools.partial(_project, m.embed, scale=2.0),
    "in a function": _wrapped,
    "in a list": lambda m: _over([m.embed]),
    "in a tuple": lambda m: _over((m.embed,)),
    "in a dict": lambda m: _over({"embed": m.embed}),
}


class Holds(nn.Module):
    """Its head is a function that holds a part of it, as tied embeddings often are."""

    def __init__(self, held: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Linear(4, 8, bias=False), nn.LayerNorm(4)
        self.double()
        self.head = HEADS[held](self)

    def project(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.embed.weight.T

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)[:, :4]))


@pytest.mark.parametrize("held", HEADS)
def test_a_function_holds_the_compiled_module(held: str) -> None:
    source = Holds(held)
    module: Any = shardc.compile(Holds(held), shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=loss, backend="eager")
    alike(module, source)
    with torch.no_grad():
        for one in (module, source):
            one.embed.weight.mul_(0.5)
    alike(module, source)
    assert len(module.shardc.programs) == 1


def test_a_forward_that_is_put_around_the_own_one() -> None:
    def doubled(model: nn.Module) -> nn.Module:
        before = model.forward
        model.forward = lambda x: before(x) * 2
        return model

    torch.manual_seed(0)
    plain = nn.Linear(4, 4).double()
    source = doubled(copy.deepcopy(plain))
    module = shardc.compile(doubled(plain), shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=loss, backend="eager")
    alike(module, source)


class Tempered(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0).double())

    def forward(self, out: Tensor) -> Tensor:
        return loss(out * self.temperature)


def test_a_loss_that_is_trained_is_refused() -> None:
    """Nothing would train it: its gradient is no result of the program."""
    model, tempered = nn.Linear(4, 4).double(), Tempered()

    def penalty(out: Tensor) -> Tensor:
        return loss(out) + model.weight.pow(2).sum()

    def compiled(loss: Any) -> Any:
        return shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=loss, backend="eager")

    with pytest.raises(ShardcError, match="the loss Tempered has parameters that are trained: 'temperature'"):
        compiled(tempered)
    for reads in (penalty, tempered.forward):
        with pytest.raises(ShardcError, match=r"the loss reads loss\S*, a tensor of shape .* that needs a gradient"):
            compiled(reads).lower(inputs())
    compiled(tempered.requires_grad_(False)).lower(inputs())


def test_a_parameter_that_is_not_the_compiled_modules() -> None:
    """`copy.deepcopy` copies no functions: what it holds is of the module that was copied."""
    source = Holds("the model")
    module = shardc.compile(copy.deepcopy(source), shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=loss, backend="eager")
    with pytest.raises(ShardcError, match="needs a gradient and is no parameter of the compiled model"):
        module.lower(inputs())
