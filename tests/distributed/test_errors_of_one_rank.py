"""What one rank raises while it calls, captures, plans, lowers or derives is raised on the others, with its text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import CaptureError, InputError, MeshError
from shardc.passes import Pipeline
from tests.ranks import run_ranks

FAILS = 1  # the rank that does


class Net(nn.Module):
    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.refuses = nn.Linear(4, 8), nn.Linear(8, 4), refuses

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.refuses:
            raise ValueError("no such head")
        hidden = self.up(x).relu()
        return self.down(hidden), hidden.sum()


def compiled(model: nn.Module, store: bool = False, **options: Any) -> Any:
    c10d._get_default_store().set_timeout(timedelta(seconds=60))  # what waits for it is told apart by its text
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    options = {"store": store, **options}
    return shardc.compile(model, mesh, shardc.fsdp("dp"), backend="eager", options=shardc.Options(**options))


def raises(does: Callable[[], Any], own: type[BaseException], text: str) -> None:
    """``does`` raises ``own`` on the rank that fails, and its text on the others."""
    with pytest.raises(own if dist.get_rank() == FAILS else MeshError) as caught:
        does()
    if dist.get_rank() != FAILS:
        assert f"rank {FAILS} raised {own.__name__}" in str(caught.value) and text in str(caught.value), caught.value


def trains(module: Any) -> None:
    module(torch.ones(2, 4))[0].sum().backward()


def in_the_capture() -> None:
    """It is over before any collective: all go on afterwards."""
    net = Net(dist.get_rank() == FAILS)
    module = compiled(net)
    raises(lambda: module(torch.ones(2, 4)), CaptureError, "no such head")
    module.refuses = False
    trains(module)


def in_a_capture_that_another_waits_for() -> None:
    net = Net(dist.get_rank() == FAILS)
    module = compiled(net, store=True)
    raises(lambda: module(torch.ones(2, 4)), CaptureError, "no such head")


@dataclass(frozen=True)
class Fails:
    """A pass that raises on one rank, and takes long on the others."""

    error: type[BaseException]
    at: str
    name = "fails"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if dist.get_rank() == FAILS:
            raise self.error("in the pass")
        for _ in range(300):
            time.sleep(0.1)
        return gm

    def added(self, pipeline: Pipeline) -> Pipeline:
        return pipeline.after(self.at, self)


def in_a_pass(error: type[BaseException], at: str) -> None:
    module = compiled(Net(), pipeline=Fails(error, at).added)
    raises(lambda: trains(module), error, "in the pass")


def in_lowering() -> None:
    module = compiled(Net())
    lower = module.shardc.lower

    def lowered(*halves: Any) -> Any:
        if dist.get_rank() == FAILS:
            raise RuntimeError("g++ exited with status 1")
        return lower(*halves)

    module.shardc.lower = lowered
    raises(lambda: trains(module), RuntimeError, "g++ exited with status 1")


def at_an_input_of_a_later_step() -> None:
    """The others are in a collective of the step by then."""
    module = compiled(Net())
    for _ in range(4):
        trains(module)
    given = [torch.ones(2, 4)] * (2 if dist.get_rank() == FAILS else 1)
    raises(lambda: module(*given)[0].sum().backward(), InputError, "too many positional arguments")


def in_a_backward() -> None:
    module = compiled(Net())
    trains(module)
    out = module(torch.ones(2, 4))[0]
    if dist.get_rank() == FAILS:
        with torch.no_grad():
            module.up.weight._local_tensor.mul_(2)
            module.down.weight._local_tensor.mul_(2)
    raises(lambda: out.sum().backward(), shardc.errors.BackwardError, "was modified in place")


def all_raise_alike() -> None:
    """Each rank has its own error where all make the same mistake, and all go on."""
    module = compiled(Net(True))
    for _ in range(2):
        time.sleep(0.3 * dist.get_rank())
        with pytest.raises(CaptureError, match="no such head"):
            module(torch.ones(2, 4))
    module.refuses = False
    trains(module)
    with pytest.raises(InputError):
        module(torch.ones(2, 4), torch.ones(2, 4))
    trains(module)


def test_before_anything_runs() -> None:
    run_ranks(2, in_the_capture, all_raise_alike)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_wherever_it_is(ranks: int) -> None:
    run_ranks(
        ranks,
        in_the_capture,
        in_a_capture_that_another_waits_for,
        in_lowering,
        partial(in_a_pass, MemoryError, "canonicalize"),
        partial(in_a_pass, KeyboardInterrupt, "propagate"),
        partial(in_a_pass, AssertionError, "bucket"),
        all_raise_alike,
    )


@pytest.mark.slow
@pytest.mark.parametrize("check", [at_an_input_of_a_later_step, in_a_backward])
def test_while_others_are_in_a_collective(check: Any) -> None:
    run_ranks(2, check)
