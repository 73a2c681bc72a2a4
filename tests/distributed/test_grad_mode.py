"""Ranks that evaluate a model which asks whether gradients are recorded: stored, found, and apart from each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import MeshError
from tests.ranks import run_ranks


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if torch.is_grad_enabled() else 3)


def compared(stored: str, evaluates_first: bool, backend: str | None = None) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Asks()
    how = {} if backend is None else {"backend": backend}
    module = shardc.compile(model, mesh, shardc.fsdp("dp"), **how)
    x = torch.randn(2, 4)
    for evaluates in (evaluates_first, not evaluates_first, evaluates_first):
        with torch.set_grad_enabled(not evaluates):
            out = module(x)
            torch.testing.assert_close(out, model(x))
            assert out.requires_grad is not evaluates
        if not evaluates:
            out.sum().backward()
    said: list[list[str]] = [[], []]
    programs = module.shardc.programs.values()
    dist.all_gather_object(said, [program.stored.partition(" ")[0] for program in programs])
    by_program = {frozenset(each) for each in zip(*said, strict=True)}
    assert len(said[0]) == 2 and all(stored in each for each in by_program), said


def apart() -> None:
    """One rank records gradients, the other does not: both raise before either compiles for it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(Asks(), mesh, shardc.fsdp("dp"), backend="eager")
    x = torch.randn(2, 4)
    for _ in range(2):
        module(x).sum().backward()
    with torch.set_grad_enabled(dist.get_rank() == 0), pytest.raises(MeshError, match=r"no_grad\(\)"):
        module(x)


def apart_at_first() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(Asks(), mesh, shardc.fsdp("dp"), backend="eager")
    with torch.set_grad_enabled(dist.get_rank() == 0), pytest.raises(MeshError, match=r"no_grad\(\)"):
        module(torch.randn(2, 4))


class AsksOfTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.linear(x)
        return h * (2 if h.requires_grad else 3)


def in_inference_mode(backend: str | None) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = AsksOfTensor()
    how = {} if backend is None else {"backend": backend}
    module = shardc.compile(model, mesh, shardc.fsdp("dp"), **how)
    for _ in range(2):
        x = torch.randn(2, 4)
        module(x).sum().backward()
        for around in (torch.inference_mode, torch.no_grad):
            with around():
                torch.testing.assert_close(module(x).detach(), model(x).detach())


def one_in_inference_mode(seen_before: bool) -> None:
    """One rank is in inference mode, the other in no_grad: each would run another program."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(AsksOfTensor(), mesh, shardc.fsdp("dp"), backend="eager")
    x = torch.randn(2, 4)
    for around in (torch.no_grad, torch.inference_mode) if seen_before else ():
        with around():
            module(x)
    with torch.inference_mode() if dist.get_rank() == 0 else torch.no_grad(), pytest.raises(MeshError) as raised:
        module(x)
    assert "inference_mode" in str(raised.value), raised.value


@pytest.mark.parametrize("first", [False, True], ids=["trains first", "evaluates first"])
def test_the_program_of_each_mode_is_stored_and_found(first: bool, tmp_path: Path) -> None:
    run_ranks(2, partial(compared, "added", first, "eager"), programs=tmp_path)
    run_ranks(2, partial(compared, "found", first, "eager"), programs=tmp_path)


@pytest.mark.slow
def test_each_mode_by_inductor(tmp_path: Path) -> None:
    run_ranks(2, partial(compared, "added", False), programs=tmp_path)
    run_ranks(2, partial(compared, "found", True), programs=tmp_path)


def test_ranks_in_different_modes_raise() -> None:
    run_ranks(2, apart, apart_at_first)


def test_inference_mode_is_stored_and_found(tmp_path: Path) -> None:
    for _ in range(2):
        run_ranks(2, partial(in_inference_mode, "eager"), programs=tmp_path)


@pytest.mark.slow
def test_inference_mode_by_inductor(tmp_path: Path) -> None:
    for _ in range(2):
        run_ranks(2, partial(in_inference_mode, None), programs=tmp_path)


@pytest.mark.parametrize("seen_before", [False, True])
def test_one_rank_in_inference_mode_raises(seen_before: bool) -> None:
    run_ranks(2, partial(one_in_inference_mode, seen_before))
