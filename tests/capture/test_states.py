"""What a trace calls and keeps as a constant: functions of torch that are known, and no others of their names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import torch as dynamo_torch

import shardc
from shardc.capture.dynamo_reads import _expression
from shardc.errors import CaptureError
from shardc.ir.guards import Lookup, parse

SCALE = [2.0]


def get_rank() -> float:
    return SCALE[0]


def sqrt(x: float) -> float:
    return SCALE[0] * x


sqrt.__module__ = "math"  # as of a user's file of that name


class Scaled(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.kind == "torch":
            return y * math.sqrt(4.0) if torch.promote_types(x.dtype, torch.float32) == x.dtype else y
        return y * (get_rank() if self.kind == "get_rank" else sqrt(4.0))


@pytest.mark.parametrize("kind", ["get_rank", "sqrt"])
def test_functions_of_the_same_name_are_not_taken_for_those_of_torch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in (get_rank, sqrt):
        torch.compiler.allow_in_graph(function)
    folded: Any = dynamo_torch.constant_fold_functions
    monkeypatch.setitem(folded, get_rank, None)
    module = shardc.compile(Scaled(kind), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    with pytest.raises(CaptureError, match=r"(?s)asks for a state of torch or of the process.*fix: ask for it outside"):
        module.lower(torch.ones(2, 4))


def test_those_of_torch_and_math_are_constants() -> None:
    model, x = Scaled("torch"), torch.ones(2, 4)
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    torch.testing.assert_close(shardc.Simulation(module)(x), model(x).detach())


def test_globals_with_equal_values_are_two_scopes() -> None:
    """Code that cannot be imported has globals of its own, also if another's have the same names and values."""
    scope = {f"___unnamed_scope_{at}": {"TABLE": torch.ones(2)} for at in range(2)}
    scopes: dict[str, object] = {}
    texts = [_expression(f"G['{name}']['TABLE']", {}, scope, scopes) for name in (*scope, *scope)]
    assert texts == ["scope('globals0')['TABLE']", "scope('globals1')['TABLE']"] * 2
    assert [scopes[f"globals{at}"] is x for at, x in enumerate(scope.values())] == [True, True]


def test_a_scope_that_comes_later_is_looked_up() -> None:
    """Scopes are numbered while a capture's guards are read, after the lookup that evaluates these was created."""
    scopes: dict[str, object] = {}
    lookup = Lookup(nn.Identity(), scopes=scopes)
    scopes["globals0"] = {"TABLE": 2}
    assert lookup(parse("scope('globals0')['TABLE']")) == 2


class Counts(nn.Module):
    """Its function reads and sets a variable around it."""

    def __init__(self) -> None:
        super().__init__()
        n = 1

        def function(x: Tensor) -> Tensor:
            nonlocal n
            y = x * n
            n = 7
            return y

        self.function, self.weight = function, nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def test_a_refused_capture_leaves_variables_around_functions() -> None:
    model = Counts()
    module = shardc.compile(model, shardc.Mesh(dp=1), shardc.ddp("dp"), backend="eager")
    with pytest.raises(CaptureError, match="reads and changes"):
        module.lower(torch.ones(2, 3))
    closure = model.function.__closure__
    assert closure is not None and closure[0].cell_contents == 1
