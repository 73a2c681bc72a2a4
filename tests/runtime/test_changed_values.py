"""Values that `==`, a hash or the name of a class cannot tell apart, changed between calls: each call computes with its
own values, and equal ones share a program.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardc
from shardc.errors import CaptureError
from shardc.runtime.identity_guards import _memory


class Config:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def times(self, y: Tensor) -> Tensor:
        return y * self.scale


class AlwaysEqual(Config):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Named(float):
    def __repr__(self) -> str:
        return "number"


class Applies(nn.Module):
    """Computes with an argument."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor, value: Any) -> Tensor:
        return self.function(self.layer(x), value)


class Reads(Applies):
    """Computes with an attribute."""

    value: Any = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.function(self.layer(x), self.value)


class Runs(Reads):
    """Differentiates inside of forward, so that it is captured without Dynamo."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.layer(x).sum(), x, create_graph=True)
        return self.function(gradient, self.value)


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def compiled(model: nn.Module, mesh: DeviceMesh) -> Any:
    return shardc.compile(model, mesh, shardc.fsdp("dp"), backend="eager")


def assert_same(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert torch.equal(torch.signbit(out), torch.signbit(expected))


def of_set(y: Tensor, value: frozenset[float]) -> Tensor:
    (element,) = value
    return y.abs().copysign(torch.tensor(float(element))) * (2 if element is True else 3)


VALUES: dict[str, tuple[Callable[[Tensor, Any], Tensor], list[Any], int]] = {
    "scalars of NumPy": (
        lambda y, value: y.abs().copysign(torch.as_tensor(value)),
        [np.float32(0.0), np.float32(-0.0), np.float32("nan"), np.float32("nan")],
        3,
    ),
    "sets": (of_set, [frozenset({0.0}), frozenset({-0.0}), frozenset({1}), frozenset({True}), frozenset({1})], 4),
    "ranges": (lambda y, value: y * (2 + value.step), [range(0), range(0, 0, 2), range(0)], 2),
    "a repr that hides": (lambda y, value: y * float(value), [Named(1.0), Named(2.0), Named(1.0)], 2),
    "an __eq__ that hides": (lambda y, value: y * value.scale, [AlwaysEqual(2.0), AlwaysEqual(3.0)], 2),
}


@pytest.mark.parametrize("kind", VALUES)
def test_arguments(kind: str, alone: DeviceMesh) -> None:
    function, values, programs = VALUES[kind]
    model = Applies(function)
    module = compiled(model, alone)
    x = torch.randn(4, 8)
    for value in values:
        assert_same(module(x, value), model(x, value))
    assert len(module.shardc.programs) == programs


def closure() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    scale = 2.0

    def function(y: Tensor) -> Tensor:
        return y * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return function, change


def default(y: Tensor, scale: float = 2.0) -> Tensor:
    return y * scale


def parts(kind: str) -> tuple[Callable[[Tensor, Any], Tensor], Any, Callable[[float], None]]:
    """What computes with an argument, the argument, what changes a part of it."""
    if kind == "a closure":
        function, change = closure()
        return (lambda y, value: value(y)), function, change
    if kind == "a default":
        return (lambda y, value: value(y)), default, lambda value: setattr(default, "__defaults__", (value,))
    if kind == "an attribute of a class":
        cls = type("Class", (), {"scale": 2.0})
        return (lambda y, value: y * value.scale), cls, functools.partial(setattr, cls, "scale")
    config = Config(2.0)
    argument = config.times if kind == "the object of a method" else config
    apply = (lambda y, value: value(y)) if kind == "the object of a method" else (lambda y, value: y * value.scale)
    return apply, argument, functools.partial(setattr, config, "scale")


@pytest.mark.parametrize(
    "kind", ["an object", "the object of a method", "a closure", "a default", "an attribute of a class"]
)
def test_parts_of_arguments(kind: str, alone: DeviceMesh) -> None:
    """An argument is the same object in each call; what it has inside changes."""
    function, argument, change = parts(kind)
    model = Applies(function)
    module = compiled(model, alone)
    x = torch.randn(4, 8)
    for value in 2.0, 3.0, 2.0:
        change(value)
        assert_same(module(x, argument), model(x, argument))
    assert len(module.shardc.programs) == 2


def test_a_tensor_of_an_argument_that_needs_a_gradient(alone: DeviceMesh) -> None:
    """The program would take it for a constant, and its gradient would be missing."""
    module = compiled(Applies(lambda y, value: value(y)), alone)
    with pytest.raises(CaptureError, match=r"forward reads argument 1\..*'weight'.*needs a gradient"):
        module(torch.randn(4, 8), nn.Linear(8, 8))


def product(y: Tensor, value: Any) -> Tensor:
    return y * torch.as_tensor(value)


OBJECTS = Config(2.0), Config(3.0)
ATTRIBUTES: dict[str, tuple[type[Reads], Callable[[Tensor, Any], Tensor], list[Any]]] = {
    "a scalar of NumPy": (Reads, product, [np.float64(2.0), np.float64(3.0)]),
    "an array": (Reads, product, [np.arange(8.0), np.arange(8.0) + 1]),
    "a weak reference": (Reads, lambda y, value: y * value().scale, [weakref.ref(x) for x in OBJECTS]),
    "an array, without Dynamo": (Runs, product, [np.arange(8.0), np.arange(8.0) + 1]),
    "an object without attributes": (Runs, lambda y, value: value(y), [itemgetter(0), itemgetter(1)]),
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_attributes(kind: str, alone: DeviceMesh) -> None:
    cls, function, values = ATTRIBUTES[kind]
    model = cls(function)
    module = compiled(model, alone)
    x = torch.randn(4, 8)
    for value in [*values, values[0]]:
        model.value = module.value = value
        assert_same(module(x), model(x))
    assert len(module.shardc.programs) == 2


def test_an_array_that_is_written(alone: DeviceMesh) -> None:
    model = Reads(product)
    module = compiled(model, alone)
    x = torch.randn(4, 8)
    model.value = module.value = np.arange(8.0)
    for value in 0.0, -0.0, 5.0:
        model.value[0] = value
        assert_same(module(x), model(x))
    assert len(module.shardc.programs) == 3


def test_memory_of_an_array_of_dates() -> None:
    days = np.array(["2020-01-01"], dtype="datetime64[D]")
    before = _memory(days)
    days += 1
    assert before is not None and _memory(days) != before
    assert _memory("text") is None and _memory(1.5) is None
