"""Steps of `shardc.optim.wrap` by the kernel alone: the base class's, and given up where they would not be."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardc

ADAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "maximize": True}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


class Pair:
    """A wrapped optimizer beside torch's own on the same local values."""

    def __init__(self, mesh: Any, kind: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
        self.module = shardc.compile(model, mesh, shardc.fsdp("dp"), backend="eager")
        cls, options = ADAMS[kind]
        self.params = list(self.module.parameters())
        self.ours = shardc.optim.wrap(cls, self.module, **options)
        self.plain = [nn.Parameter(p._local_tensor.detach().clone()) for p in self.params]
        self.theirs = cls(self.plain, **options)
        self.calls = 0
        self.made = 0

    def step(self, used: tuple[int, ...] = (0, 1, 2, 3)) -> bool:
        """A step of both, on the same gradients of the parameters ``used``; whether ours was by the kernel alone."""
        self.made += 1
        for at, (mine, plain) in enumerate(zip(self.params, self.plain, strict=True)):
            torch.manual_seed(10 * self.made + at)
            plain.grad = torch.randn_like(plain) if at in used else None
            local = None if plain.grad is None else plain.grad.clone()
            mine.grad = None if local is None else DTensor(local, mine._spec, requires_grad=False)
        again = self.ours._step_unchanged
        done: list[bool] = []

        def watched(*args: Any) -> bool:
            done.append(again(*args))
            return done[-1]

        self.ours._step_unchanged = watched
        self.ours.step()
        self.ours._step_unchanged = again
        self.theirs.step()
        for mine, plain in zip(self.params, self.plain, strict=True):
            torch.testing.assert_close(mine._local_tensor, plain.detach(), rtol=1e-10, atol=1e-12)
            state, right = self.ours.state.get(mine, {}), self.theirs.state.get(plain, {})
            assert state.keys() == right.keys()
            for key, x in right.items():
                found = state[key]._local_tensor if isinstance(state[key], DTensor) else state[key]
                torch.testing.assert_close(found, x, rtol=1e-10, atol=1e-12)
        return done[0]


@pytest.fixture(params=ADAMS)
def pair(mesh: Any, request: pytest.FixtureRequest) -> Pair:
    return Pair(mesh, request.param)


def test_steps_by_the_kernel_are_the_base_classes(pair: Pair) -> None:
    assert [pair.step() for _ in range(4)] == [False, True, True, True]


def test_after_something_was_compiled(mesh: Any) -> None:
    """The first torch.compile of a process changes the classes of torch's optimizers."""
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    for kind in ADAMS:
        pair = Pair(mesh, kind)
        assert [pair.step() for _ in range(3)] == [False, True, True]


def test_numbers_of_the_groups_are_those_of_now(pair: Pair) -> None:
    pair.step()
    for one in (pair.ours, pair.theirs):
        one.param_groups[0].update(lr=0.5, betas=(0.5, 0.6), weight_decay=0.3, eps=1e-3)
    assert pair.step()


def test_other_gradients_go_through_the_base_class(pair: Pair) -> None:
    assert [pair.step((0, 2)), pair.step((0, 2)), pair.step((0, 1, 2)), pair.step((0, 1, 2)), pair.step((1,))] == [
        False, True, False, True, False,
    ]  # fmt: skip


def test_state_that_was_replaced_goes_through_the_base_class(pair: Pair) -> None:
    pair.step()
    pair.step()
    for one in (pair.ours, pair.theirs):
        one.load_state_dict(deepcopy(one.state_dict()))
    assert not pair.step() and pair.step()
    for params, one in ((pair.params, pair.ours), (pair.plain, pair.theirs)):
        one.state[params[1]]["exp_avg"] = one.state[params[1]]["exp_avg"] * 2
    assert not pair.step() and pair.step()
    for params, one in ((pair.params, pair.ours), (pair.plain, pair.theirs)):
        one.state.pop(params[2])
    assert not pair.step() and pair.step()


def test_another_implementation_is_the_base_classes(pair: Pair) -> None:
    pair.step()
    pair.ours.param_groups[0]["fused"] = False
    assert not pair.step() and not pair.step()


def test_values_of_a_parameter_that_were_replaced(pair: Pair) -> None:
    pair.step()
    with torch.no_grad():
        local = pair.params[0]._local_tensor.clone()
        pair.params[0]._local_tensor = local
    assert not pair.step() and pair.step()
    assert pair.params[0]._local_tensor is local


def test_a_class_with_a_step_of_its_own_is_asked_for_every_step(mesh: Any) -> None:
    class Counting(torch.optim.AdamW):
        count = 0

        def step(self, closure: Any = None) -> Any:
            type(self).count += 1
            return super().step(closure)

    pair = Pair(mesh, "adamw")
    pair.ours = shardc.optim.wrap(Counting, pair.module, **ADAMS["adamw"][1])
    assert not any(pair.step() for _ in range(3)) and type(pair.ours).count == 3
