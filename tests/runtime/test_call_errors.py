# ruff: noqa: E501
"""Calls of a module on real ranks, most of them bad: the whole message of each error, and the module left as it was."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardc
from shardc.errors import InputError, MeshError
from tests.unchanged import snapshot

WAYS_OUT = """\
  fix: pass this rank's shard, as module.shard_inputs(*global_inputs) cuts it, or compile for another global size with module.lower(*examples) at global shapes"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, times: int = 1, shift: Tensor | None = None) -> Tensor:
        y = self.down(self.up(x).relu()) * self.scale * times
        return y if shift is None else y + shift


class Signed(nn.Module):
    def forward(self, x: Tensor, value: complex) -> Tensor:
        return x.abs().copysign(torch.tensor(value.real)) / value.real


@contextlib.contextmanager
def world(ranks: int) -> Iterator[None]:
    """This process as rank 0 of a world whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of dp=2, tp=2."""
    with world(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """A gloo world of one rank, in which a step really runs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def fails(module: Any, act: Callable[[], Any], kind: type[Exception], message: str) -> None:
    """``act`` raises ``kind`` with this whole message; ``module``, and what it is compiled for, is as it was."""
    before, programs = snapshot(module), dict(module.shardc.programs)
    with pytest.raises(kind) as caught:
        act()
    assert str(caught.value) == message
    assert snapshot(module) == before
    assert module.shardc.programs == programs


def test_a_mesh_larger_than_the_world() -> None:
    model = Net()
    before = snapshot(model)
    with world(2):
        larger = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("dp",), _init_backend=False)
        with pytest.raises(MeshError) as caught:
            shardc.compile(model, larger, shardc.fsdp("dp"), backend="eager")
    assert (
        str(caught.value)
        == "mesh dp=4 has 4 ranks, the world has 2\n  fix: start 4 processes, or make the mesh smaller"
    )
    assert snapshot(model) == before


def test_a_mesh_without_names_or_world(mesh: DeviceMesh) -> None:
    unnamed = init_device_mesh("cpu", (4,))
    with pytest.raises(MeshError) as caught:
        shardc.compile(Net(), unnamed, shardc.fsdp("dp"), backend="eager")
    assert (
        str(caught.value)
        == """\
the DeviceMesh has no dim names
  fix: pass mesh_dim_names=("dp", "tp") to init_device_mesh"""
    )
    dist.destroy_process_group()
    with pytest.raises(MeshError) as caught:
        shardc.compile(Net(), mesh, shardc.fsdp("dp"), backend="eager")
    assert str(caught.value) == "there is no process group to run on\n  fix: call dist.init_process_group first"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)


def test_an_input_of_the_wrong_local_shape(mesh: DeviceMesh) -> None:
    module = shardc.compile(Net(), mesh, shardc.fsdp("dp"), backend="eager")
    module.lower(torch.empty(8, 8))
    expected = "expected local shape [4, 8] (global [8, 8], layout [8@dp,8])"
    wrong = f"input 'x' has local shape [3, 8]; {expected}\n{WAYS_OUT}"
    fails(module, lambda: module(torch.ones(3, 8)), InputError, wrong)
    # The commonest mistake: the whole batch where this rank's shard belongs.
    whole = f"input 'x' has local shape [8, 8], which is the whole global input; {expected}\n{WAYS_OUT}"
    fails(module, lambda: module(torch.ones(8, 8)), InputError, whole)
    assert module.shard_inputs(torch.ones(8, 8)).shape == (4, 8)


def test_what_a_call_without_lower_takes_for_the_global_batch(mesh: DeviceMesh) -> None:
    """Any shard is right then: its global size follows from the plan."""
    module = shardc.compile(Net(), mesh, shardc.fsdp("dp"), backend="eager")
    assert module.shardc.spec.global_shapes([("x", (8, 8))]) == [(16, 8)]


def test_several_wrong_inputs_are_all_named(mesh: DeviceMesh) -> None:
    module = shardc.compile(Net(), mesh, shardc.fsdp("dp"), loss=F.mse_loss, backend="eager")
    module.lower(torch.empty(8, 8), torch.empty(8, 8))
    fails(
        module,
        lambda: module(torch.ones(2, 8), torch.ones(8, 8)),
        InputError,
        f"""\
input 'x' has local shape [2, 8]; expected local shape [4, 8] (global [8, 8], layout [8@dp,8]); input 'target' has local shape [8, 8], which is the whole global input; expected local shape [4, 8] (global [8, 8], layout [8@dp,8])
{WAYS_OUT}""",
    )


def test_another_dtype(mesh: DeviceMesh) -> None:
    module = shardc.compile(Net(), mesh, shardc.fsdp("dp"), backend="eager")
    module.lower(torch.empty(8, 8))
    fails(
        module,
        lambda: module(torch.ones(4, 8, dtype=torch.float64)),
        InputError,
        """\
input 'x' is torch.float64, expected torch.float32
  fix: pass it in that dtype, or lower the module for this one too""",
    )


def test_a_constant_that_changes(alone: DeviceMesh) -> None:
    model = Net()
    module = shardc.compile(model, alone, shardc.fsdp("dp"), backend="eager")
    x = torch.randn(4, 8)
    module.lower(torch.empty(4, 8), 2)
    for other in (3, 2.0, True):
        message = f"""\
input 'times' is {other}; the program was captured with 2, which is part of it
  fix: pass the captured value, lower the module for this one too, or pass it as a tensor"""
        fails(module, lambda other=other: module(x, other), InputError, message)
    module.lower(torch.empty(4, 8), 3)
    for times in (2, 3):
        torch.testing.assert_close(module(x, times), model(x, times))
    assert len(module.shardc.programs) == 2


def test_other_arguments(mesh: DeviceMesh) -> None:
    module = shardc.compile(Net(), mesh, shardc.fsdp("dp"), backend="eager")
    x = torch.ones(4, 8)
    module.lower(torch.empty(8, 8), times=2)
    fix = "pass the same arguments, or lower the module for these too: module.lower(*examples) at global shapes"
    for act, passed in [
        (lambda: module(x), "x"),
        (lambda: module(x, 2), "x, times"),
        (lambda: module(x, times=2, shift=x), "x, times=..., shift=..."),
    ]:
        message = f"the call passes {passed}; the module was lowered for x, times=...\n  fix: {fix}"
        fails(module, act, InputError, message)


def test_another_mode_is_compiled_for(alone: DeviceMesh) -> None:
    """A change of mode is no bad input: what was lowered for training serves evaluation and frozen parameters."""
    model = Net()
    module = shardc.compile(model, alone, shardc.fsdp("dp"), backend="eager")
    module.lower(torch.empty(4, 8))
    x = torch.randn(4, 8)
    torch.testing.assert_close(module.eval()(x), model.eval()(x))
    for parameter in module.up.parameters():
        parameter.requires_grad_(False)
    torch.testing.assert_close(module(x), model(x))
    assert len(module.shardc.programs) == 3


def test_constants_without_lower(alone: DeviceMesh) -> None:
    model = Net()
    module = shardc.compile(model, alone, shardc.fsdp("dp"), backend="eager")
    x, shift = torch.randn(4, 8), torch.randn(4, 8)
    for arguments in [(x,), (x, 2), (x, 2.5), (x, True, shift)]:
        torch.testing.assert_close(module(*arguments), model(*arguments))
    assert len(module.shardc.programs) == 4


def test_constants_that_equal_differs_for(alone: DeviceMesh) -> None:
    """0.0 == -0.0, but not to what is computed; NaN is not equal to itself, and needs a program only once."""
    module = shardc.compile(Signed(), alone, shardc.fsdp("dp"), backend="eager")
    x = torch.randn(4, 8)
    nans = [float("nan") for _ in range(3)]  # objects of their own
    for value in [0.0, -0.0, 0.0, *nans, complex(0.0, 1.0), complex(-0.0, 1.0)]:
        expected = Signed()(x, value)
        assert torch.equal(torch.signbit(module(x, value)), torch.signbit(expected))
    assert len(module.shardc.programs) == 5


def test_backward_twice(alone: DeviceMesh) -> None:
    module = shardc.compile(Net(), alone, shardc.fsdp("dp"), backend="eager")
    total = module(torch.ones(4, 8)).sum()
    total.backward(retain_graph=True)
    total.backward()
    fails(
        module,
        total.backward,
        RuntimeError,
        "backward was already run for this step, and what it needs was freed\n  fix: run the forward again, or pass "
        "retain_graph=True to all backwards of one forward but the last",
    )
    module(torch.ones(4, 8)).sum().backward()


def test_an_input_whose_memory_is_not_in_order(alone: DeviceMesh) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    module = shardc.compile(model, alone, shardc.fsdp("dp"))
    x = torch.randn(8, 3, 4).transpose(1, 2)
    torch.testing.assert_close(module(x), model(x))


def test_parameters_that_are_frozen_before_backward_get_no_gradient(alone: DeviceMesh) -> None:
    def gradients(module: nn.Module) -> list[bool]:
        out = module(torch.ones(2, 4)).sum()
        module.get_parameter("0.weight").requires_grad_(False)
        out.backward()
        return [p.grad is not None for p in module.parameters()]

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module = shardc.compile(copy.deepcopy(model), alone, shardc.fsdp("dp"), backend="eager")
    assert gradients(module) == gradients(model) == [False, True, True, True]
