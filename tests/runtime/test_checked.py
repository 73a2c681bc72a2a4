"""The debug mode of buffers: nothing wrong in what the passes make, and each planted fault is found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardc
from shardc.errors import InputError, VerifyError
from shardc.ir import graph as ir
from shardc.ir.arena import PLAN, MemoryPlan
from shardc.ir.tally import arguments_of
from shardc.runtime.checked import Ledger, poison
from tests.passes.test_golden import MLP

OPTIONS = shardc.Options(debug="buffers", bucket_size=0, max_in_flight=600)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Two ranks, one of them here; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def step(plan: shardc.Plan, plant: Callable[[fx.GraphModule], None] = lambda half: None) -> None:
    """A step whose forward is changed by ``plant`` after it was compiled."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(MLP(), mesh, plan, loss=F.mse_loss, options=OPTIONS)
    program = module.lower(torch.empty(16, 8), torch.empty(16, 8))
    assert program.forward is not None
    plant(program.forward)
    module(torch.ones(8, 8), torch.ones(8, 8)).backward()
    with torch.no_grad():
        module(torch.ones(8, 8), torch.ones(8, 8))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_is_compiled_is_right(level: int) -> None:
    step(shardc.fsdp("dp", level=level))


def tampered(slot: int, **changes: int) -> Callable[[fx.GraphModule], None]:
    """Changes one slot of the plan."""

    def plant(half: fx.GraphModule) -> None:
        meta = ir.output_node(half.graph).meta
        slots = list(meta[PLAN].slots)
        slots[slot] = replace(slots[slot], **changes)
        meta[PLAN] = MemoryPlan(tuple(slots), meta[PLAN].given)

    return plant


def place_of(half: fx.GraphModule, name: str) -> int:
    return next(at for at, node in enumerate(half.graph.nodes) if node.op != "output" and ir.info(node).name == name)


def test_a_use_after_the_release_is_found() -> None:
    def plant(half: fx.GraphModule) -> None:
        tampered(0, end=place_of(half, "up.weight.full"))(half)

    with pytest.raises(VerifyError, match=r"%up.t uses %up.weight.full.all_gather_into_tensor after its release"):
        step(shardc.fsdp("dp"), plant)


def test_bytes_given_away_while_in_use_are_found() -> None:
    def plant(half: fx.GraphModule) -> None:
        plan = ir.output_node(half.graph).meta[PLAN]
        tampered(1, offset=plan.slots[0].offset)(half)

    with pytest.raises(VerifyError, match=r"is given bytes in which %up.weight.full\S* is there"):
        step(shardc.fsdp("dp"), plant)


def test_a_double_release_is_found() -> None:
    """A slot that two results have at different times, and whose release stands in the plan once too often."""

    def plant(half: fx.GraphModule) -> None:
        meta = ir.output_node(half.graph).meta
        slots = list(meta[PLAN].slots)
        slots[1] = replace(slots[1], end=0)  # before it is taken: what another step left released is released again
        meta[PLAN] = MemoryPlan(tuple(slots), meta[PLAN].given)

    with pytest.raises(VerifyError, match="slot 1 is released twice, or was never in use"):
        step(shardc.fsdp("dp"), plant)
    ledger, made = Ledger(), torch.zeros(4)
    ledger.take(0, "x", None, made)
    ledger.arrive(0)
    ledger.release(0)
    with pytest.raises(VerifyError, match="%x is released twice"):
        ledger.release(0)


def test_a_read_before_the_wait_is_found() -> None:
    def plant(half: fx.GraphModule) -> None:
        wait = next(n for n in half.graph.nodes if n.op != "output" and ir.info(n).name == "up.weight.full")
        wait.replace_all_uses_with(wait.args[0])
        half.graph.erase_node(wait)

    found = re.escape("%up.t reads %up.weight.full.all_gather_into_tensor before the wait for it")
    with pytest.raises(VerifyError, match=found) as error:
        step(shardc.fsdp("dp"), plant)
    assert error.value.program is not None and error.value.program.startswith("%up.t: f32[8,32] = t(")


def test_a_write_into_what_is_still_sent_on_is_found() -> None:
    """A gathered weight is handed on to a collective that is waited for behind the release of its bytes."""

    def plant(half: fx.GraphModule) -> None:
        nodes = {ir.info(n).name: n for n in half.graph.nodes if n.op != "output"}
        whole, gather = nodes["up.weight.full"], nodes["up.weight.full.all_gather_into_tensor"].args[0]
        group = arguments_of(gather)["group_name"]
        with half.graph.inserting_after(whole):
            sum_of = half.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (whole, "sum", group))
        with half.graph.inserting_before(ir.output_node(half.graph)):
            wait = half.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (sum_of,))
        for node, name in ((sum_of, "sum"), (wait, "sum.waited")):
            node.meta.update(whole.meta)
            ir.set_info(node, replace(ir.info(whole), name=name))
        number = arguments_of(gather)["slots"][0]
        places = {node: at for at, node in enumerate(half.graph.nodes)}
        tampered(number, end=max(places[user] for user in whole.users if user is not sum_of))(half)

    found = "%up.weight.full.all_gather_into_tensor is written over while %sum sends it"
    with pytest.raises(VerifyError, match=found):
        step(shardc.fsdp("dp"), plant)
    ledger = Ledger()
    ledger.take(0, "x", None, torch.zeros(4))
    ledger.arrive(0)
    ledger.send(0, "y")
    with pytest.raises(VerifyError, match="%x is written over while %y sends it"):
        ledger.release(0)
    ledger.sent("y")
    ledger.release(0)


def test_released_bytes_are_poisoned() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        made = torch.zeros(5, 3, dtype=dtype)
        view = made[1:]
        poison(view)
        assert made.isnan().all()
    whole = torch.zeros(3, dtype=torch.int32)
    poison(whole)
    assert whole.tolist() == [-1] * 3
    ledger, made = Ledger(), torch.ones(4)
    ledger.take(0, "x", None, made)
    ledger.release(0)
    assert made.isnan().all()


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(InputError, match=r"debug is 'bufers', not 'buffers'"):
        shardc.Options(debug="bufers")  # type: ignore[arg-type]
