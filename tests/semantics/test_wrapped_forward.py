"""``module.forward = wrap(module.forward)``: the wrapper runs around the compiled forward, as on one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import InputError
from tests.ranks import run_ranks

PLAN = shardc.fsdp("dp")
KEPT: list[Any] = []
old: Any = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(x) * scale


class Doubles:
    def __init__(self, inner: Callable[..., Tensor]) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs) * 2

    def method(self, *args: Any, **kwargs: Any) -> Tensor:
        return self(*args, **kwargs)


def with_closure(module: nn.Module) -> Any:
    inner = module.forward
    return lambda *args, **kwargs: inner(*args, **kwargs).relu_() * float(inner(*args, **kwargs).sum())


def decorated(module: nn.Module) -> Any:
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        KEPT.append(out := inner(*args, **kwargs))
        return out.sin()

    return forward


def of_a_global(module: nn.Module) -> Any:
    global old
    old = module.forward
    return lambda x: old(x) + 1


def of_accelerate(module: nn.Module) -> Any:
    module._original_forward = module.forward  # type: ignore[assignment]
    return MethodType(convert_outputs_to_fp32(module.forward.__func__), module)  # type: ignore[attr-defined]


def twice(module: nn.Module) -> Any:
    module.forward = with_closure(module)
    return Doubles(module.forward)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "closure": with_closure,
    "decorator": decorated,
    "partial": lambda module: functools.partial(module.forward, scale=3.0),
    "object": lambda module: Doubles(module.forward),
    "bound method": lambda module: Doubles(module.forward).method,
    "method": lambda module: MethodType(lambda self, x, f=module.forward: f(x) + self.linear.bias.shape[0], module),
    "global": of_a_global,
    "accelerate": of_accelerate,
    "itself": lambda module: module.forward,
    "twice": twice,
    "other forward": lambda module: MethodType(lambda self, x: self.linear(x).tanh(), module),
}


def inputs() -> Tensor:
    return torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compiled(model: nn.Module, backend: str = "eager") -> Any:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    return shardc.compile(model, mesh, PLAN, backend=backend)


def train(model: nn.Module, wrap: Any) -> list[Tensor]:
    model(inputs())
    model.forward = wrap(model)
    out = []
    for call in (model, model.forward):
        model.zero_grad()
        result = call(inputs())
        result.mean().backward()
        grad: Any = model.linear.weight.grad  # type: ignore[union-attr]
        out += [result.detach().clone(), getattr(grad, "full_tensor", lambda grad=grad: grad)().clone()]
    return out


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_runs_around_the_compiled_forward(name: str) -> None:
    run_ranks(1, functools.partial(as_on_one_device, name, "eager"))


def as_on_one_device(name: str, backend: str) -> None:
    torch.testing.assert_close(train(compiled(Net(), backend), WRAPPERS[name]), train(Net(), WRAPPERS[name]))


def on_two_ranks() -> None:
    model, module = Net(), compiled(Net(), "inductor")
    for each in (model, module):
        each.forward = decorated(each)
    rows = inputs().chunk(2)[torch.distributed.get_rank()]
    torch.testing.assert_close(module(rows), model(rows))


def test_a_wrapper_on_two_ranks() -> None:
    run_ranks(2, on_two_ranks)


def undone() -> None:
    module, x = compiled(Net()), inputs()
    want = module(x)
    module.forward = Doubles(module.forward)
    torch.testing.assert_close(module(x), want * 2)
    torch.testing.assert_close(copy.deepcopy(module)(x), want * 2)
    del module.forward
    assert torch.equal(module(x), want) and torch.equal(module.forward(x), want)
    with pytest.raises(AttributeError):
        del module.forward
    module.forward = of_accelerate(module)
    assert torch.equal(module(x), want)
    assert torch.equal(extract_model_from_parallel(module, keep_fp32_wrapper=False)(x), want)


def with_hooks() -> None:
    module = compiled(Net())
    module.forward = Doubles(module.forward)
    module.register_forward_hook(lambda module, args, out: out + 1)
    with pytest.raises(InputError, match="the hooks would run inside of it"):
        module(inputs())


@pytest.mark.parametrize("case", [undone, with_hooks])
def test_a_wrapper_beside_other_things(case: Callable[[], None]) -> None:
    run_ranks(1, case)


def test_a_simulation_is_refused() -> None:
    module: Any = shardc.compile(Net(), shardc.Mesh(dp=2), PLAN, backend="eager")
    module.forward = Doubles(module.forward)
    with pytest.raises(InputError, match="wrapped after compile"):
        shardc.Simulation(module)(inputs())
