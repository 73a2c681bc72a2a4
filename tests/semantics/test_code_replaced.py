"""Code that is replaced after a module was compiled: the next call runs a program of the new code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc


def scale(x: Tensor) -> Tensor:
    return x * 2


class Parent(nn.Module):
    def inner(self, x: Tensor) -> Tensor:
        return x + 1

    @property
    def rate(self) -> float:
        return 0.5

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x - 3


class Block(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.fn: Any = lambda x: x * 1.5

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.static(scale(self.fn(self.inner(self.linear(x)))))) * self.rate


def other(x: Tensor) -> Tensor:
    return x * 5


REPLACED: dict[str, Callable[[pytest.MonkeyPatch, Any], object]] = {
    "forward": lambda patch, _: patch.setattr(Block, "forward", lambda self, x: self.linear(x)),
    "a method of a base": lambda patch, _: patch.setattr(Parent, "inner", lambda self, x: x - 1),
    "a method over that of a base": lambda patch, _: patch.setattr(Block, "inner", lambda self, x: x, raising=False),
    "a property": lambda patch, _: patch.setattr(Parent, "rate", property(lambda self: 0.25)),
    "a static method": lambda patch, _: patch.setattr(Parent, "static", staticmethod(other)),
    "code": lambda patch, _: patch.setattr(scale, "__code__", other.__code__),
    "a global": lambda patch, _: patch.setitem(globals(), "scale", other),
    "an attribute": lambda patch, module: setattr(module, "fn", other),
    "forward of a layer of torch": lambda patch, _: patch.setattr(
        nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)
    ),
    "a function of torch": lambda patch, _: patch.setattr(F, "gelu", lambda x: x * 7),
}


@pytest.mark.parametrize("what", REPLACED)
def test_the_next_call_runs_the_new_code(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 4, dtype=torch.float64)
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    sim = shardc.Simulation(module)
    before = model(x)
    torch.testing.assert_close(sim(x), before)
    with monkeypatch.context() as patch:
        REPLACED[what](patch, module)
        if what == "an attribute":
            model.fn = other
        after = model(x)
        assert not torch.allclose(after, before)
        torch.testing.assert_close(sim(x), after)
        assert len(module.shardc.programs) == 2
    if what != "an attribute":
        torch.testing.assert_close(sim(x), before)
        assert len(module.shardc.programs) == 2, "the first program runs again"
