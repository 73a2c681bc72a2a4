"""What forward changes besides tensors in place: said, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, fsdp
from shardc.errors import CaptureError, ShardcWarning

MESH = Mesh(dp=2)
PLAN = fsdp("dp", threshold=0)


def simulation(model: nn.Module) -> shardc.Simulation:
    return shardc.Simulation(shardc.compile(model, MESH, PLAN, backend="eager"))


def test_a_changed_attribute_is_a_warning() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x)

    model = nn.Sequential(Counter())
    with pytest.warns(ShardcWarning, match="module '0' changes its attributes in forward"):
        shardc.compile(model, MESH, PLAN, backend="eager").lower(torch.empty(8, 4))
    assert model[0].calls == 0


NOTED: list[Tensor] = []


def test_a_hook_that_keeps_what_it_sees_is_a_warning() -> None:
    seen: list[Tensor] = []
    hooks: dict[str, Callable[..., Any]] = {
        r"the model changes globals of \S+test_side_effects \(NOTED\)": lambda module, args, out: NOTED.append(out),
        "a hook of module '0' changes variables around it": lambda module, args, out: seen.append(out),
    }
    for what, hook in hooks.items():
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].register_forward_hook(hook)
        with pytest.warns(ShardcWarning, match=what):
            simulation(model)(torch.ones(4, 4), grad=False)
    assert not NOTED and not seen


def test_a_replaced_buffer_is_an_error() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.last = x.mean(0)
            return x + self.last

    module = shardc.compile(nn.Sequential(Replaces()), MESH, PLAN, backend="eager")
    with pytest.raises(CaptureError, match="replaces the buffer '0.last' by another tensor"):
        module.lower(torch.empty(8, 4))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_empty_buffer_that_is_filled_is_a_warning(persistent: bool) -> None:
    """As models keep a table of positions that they make in the first call; the program makes it in each."""

    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", None, persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            if self.bias is None:
                self.bias = torch.arange(4.0)
            return x + self.bias

    model = nn.Sequential(Fills())
    if persistent:  # a checkpoint of the model would have it from then on
        with pytest.raises(CaptureError, match="replaces the buffer '0.bias' by another tensor"):
            simulation(model)(torch.ones(4, 4), grad=False)
        return
    with pytest.warns(ShardcWarning, match="module '0' fills its empty buffer 'bias' in forward; the compiled program"):
        sim = simulation(model)
        for _ in range(2):
            assert torch.equal(sim(torch.ones(4, 4), grad=False), torch.ones(4, 4) + torch.arange(4.0))
    assert model[0].bias is None


class Keeps(nn.Module):
    """Puts what it computes into the dict or the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: dict[str, Any], *, change: bool = True) -> Tensor:
        if change:
            kept["rows"].append(x)
            kept["y"] = self.linear(kept["x"])
        return self.linear(x)


def test_a_changed_argument_is_a_warning() -> None:
    x = torch.ones(4, 4)
    kept: dict[str, Any] = {"x": x, "rows": [x], "same": [x]}
    with pytest.warns(ShardcWarning) as said:
        simulation(Keeps())(x, kept, grad=False)
    assert [str(w.message).split(" in forward")[0] for w in said] == [
        "the model changes its argument kept",
        "the model changes its argument kept['rows']",
    ]
    assert "return the new value instead" in str(said[0].message)
    assert list(kept) == ["x", "rows", "same"] and len(kept["rows"]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulation(Keeps())(x, kept, grad=False, change=False)
