"""What one rank raises while it calls, captures, plans, lowers or derives is raised on the others, with its text."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import CaptureError, InputError, LayoutError, MeshError, PlanError
from shardc.passes import Pipeline
from shardc.runtime import rank_consistency
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
    options = {"program_cache": store, **options}
    return shardc.compile(model, mesh, shardc.fsdp("dp"), backend="eager", options=shardc.Options(**options))


def raises(does: Callable[[], Any], own: type[BaseException], text: str) -> None:
    """``does`` raises ``own`` on the rank that fails, and its text on the others."""
    with pytest.raises(own if dist.get_rank() == FAILS else MeshError) as caught:
        does()
    if dist.get_rank() != FAILS:
        assert re.search(f"rank {FAILS} raised {own.__name__}.*{text}", str(caught.value), re.S), caught.value


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
    spec = module.shardc.spec
    lower = spec.lower_half

    def lowered(*halves: Any) -> Any:
        if dist.get_rank() == FAILS:
            raise RuntimeError("g++ exited with status 1")
        return lower(*halves)

    object.__setattr__(spec, "lower_half", lowered)
    raises(lambda: trains(module), RuntimeError, r"g\+\+ exited with status 1")
    object.__setattr__(spec, "lower_half", lower)
    torch.manual_seed(0)
    trains(module)


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


def fails() -> bool:
    return dist.get_rank() == FAILS


def in_compile() -> None:
    """The others go on to a call; then all compile another module on that mesh."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    plan = shardc.Plan(params={"upp.weight" if fails() else "up.weight": ("dp", None)})
    raises(lambda: trains(shardc.compile(Net(), mesh, plan, backend="eager")), PlanError, "upp.weight")
    trains(compiled(Net()))


class Draws(Net):
    """It has methods of its own that initialise it, and raise on one rank."""

    def init_weights(self, std: float = 1.0) -> None:
        if fails():
            raise ZeroDivisionError("std is 0")
        nn.init.normal_(self.up.weight, std=std)


def _initialises(module: nn.Module) -> None:
    if fails():
        raise ZeroDivisionError("fan is 0")


def _loads(module: Any) -> None:
    module.load_state_dict({key: x for key, x in Net().state_dict().items() if not (fails() and key == "up.bias")})


def _lowers(module: Any) -> None:
    module.shardc.lower(torch.ones(4, 5 if fails() else 4))


def _clips(module: Any) -> None:
    trains(module)
    if fails():
        module.up.weight.grad = None
        module.up.weight.grad_dtype = None
        module.up.weight.grad = torch.distributed.tensor.DTensor.from_local(
            torch.ones(8, 4), module.shardc.spec.device_mesh, [torch.distributed.tensor.Replicate()]
        )
    module.clip_grad_norm_(1.0)


def _copies(module: Any) -> None:
    module.extra = (value for value in ()) if fails() else None  # a generator, which cannot be copied
    copy.deepcopy(module)


def _summons(module: Any) -> None:
    with module.summon_full_params():
        if fails():
            raise KeyError("head")


def _converts(module: Any) -> None:
    def place(x: Tensor) -> Tensor:
        if fails():
            raise MemoryError("no room")
        return x.double()

    module._apply(place)


METHODS: dict[str, tuple[Callable[[Any], Any], type[BaseException], str]] = {
    "init_weights of its own": (
        lambda module: module.init_weights(std=2.0),
        ZeroDivisionError,
        "std is 0.*test_errors_of_one_rank.py:",
    ),
    "init_weights": (lambda module: module.shardc.init_weights(_initialises), ZeroDivisionError, "fan is 0"),
    "load_state_dict": (_loads, RuntimeError, "up.bias"),
    "lower": (_lowers, CaptureError, r"float32\[4, 5\]"),
    "deepcopy": (_copies, TypeError, "generator"),
    "summon_full_params": (_summons, KeyError, "head"),
    "to": (_converts, MemoryError, "no room"),
    "clip_grad_norm_": (_clips, LayoutError, "up.weight"),
}


def in_a_method(name: str) -> None:
    """The others go on to a step. An error that comes before any collective leaves the mesh as it was."""
    module = compiled(Draws())
    trains(module)
    does, own, text = METHODS[name]

    def and_trains() -> None:
        does(module)
        trains(module)

    raises(and_trains, own, text)
    if name != "clip_grad_norm_":
        torch.manual_seed(0)  # a rank may have drawn more than others
        trains(compiled(Net()))


def all_raise_alike() -> None:
    """Each rank has its own error where all make the same mistake, and all go on."""
    module = compiled(Net(True))
    for _ in range(2):
        time.sleep(0.3 * dist.get_rank())
        # However slow the machine, a rank gets to its own error before it takes another's.
        with patch.object(rank_consistency, "_GRACE", 60.0), pytest.raises(CaptureError, match="no such head"):
            module(torch.ones(2, 4))
    module.refuses = False
    trains(module)
    with pytest.raises(InputError):
        module(torch.ones(2, 4), torch.ones(2, 4))
    trains(module)


def test_before_anything_runs() -> None:
    run_ranks(2, in_the_capture, all_raise_alike, in_compile)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_in_methods(ranks: int) -> None:
    run_ranks(ranks, *(partial(in_a_method, name) for name in METHODS))


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
