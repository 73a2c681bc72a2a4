"""Faults planted in forward and backward, behind each pass that works on them: the verifier refuses each by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import shardc
from shardc.cost.model import CostModel, Measured
from shardc.errors import VerifyError
from shardc.ir import graph as ir
from shardc.ir.arena import PLAN, place
from shardc.ir.certificate import certify
from shardc.ir.comm import IN_MESSAGES, entry_of
from shardc.ir.comm_volume import arguments_of, collective_kind
from shardc.passes import Partition, Pass, Pipeline, Schedule
from shardc.verify import halves
from shardc.verify.subject import State, Subject, no_rules

WAIT = torch.ops._c10d_functional.wait_tensor.default
Plant = Callable[[fx.Graph], bool]
"""Breaks a graph; False where it holds nothing to break."""


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def model() -> nn.Module:
    return Net(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))


@dataclass(frozen=True)
class Broken:
    """A pass with a fault."""

    right: Pass
    plant: Plant

    @property
    def name(self) -> str:
        return self.right.name

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm = self.right(gm)
        self.plant(gm.graph)
        return gm


class BrokenSchedule(Schedule):
    """The schedule, with a fault."""

    plant: Any = None

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm = super().__call__(gm)
        type(self).plant(gm.graph)
        return gm


class BrokenCut(Partition):
    """The cut, with a fault in the forward."""

    plant: Any = None

    def __call__(self, gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        forward, backward = super().__call__(gm)
        assert type(self).plant(forward.graph)
        return forward, backward


def lower(edit: Callable[[Pipeline], Pipeline], direct: bool, **said: Any) -> shardc.Program:
    options = shardc.Options(**{"pipeline": edit, "bucket_size": 600, "p2p_collectives": direct, **said})
    plan = shardc.fsdp("dp", threshold=0) | shardc.tp("tp", colwise=["0"], rowwise=["2"])
    module = shardc.compile(model(), shardc.Mesh(dp=2, tp=2), plan, loss=F.mse_loss, options=options, backend="eager")
    program = module.lower(torch.empty(8, 8), torch.empty(8, 8))
    assert program.forward is not None and program.backward is not None
    return program


def starts(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if collective_kind(node) is not None]


def waits(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is WAIT]


def delete_a_wait(graph: fx.Graph) -> bool:
    for wait in waits(graph)[:1]:
        wait.replace_all_uses_with(wait.args[0])
        graph.erase_node(wait)
        return True
    return False


def drop_a_reduction(graph: fx.Graph) -> bool:
    """What an all-reduce gives becomes what it takes, or what a reduce-scatter gives another's result."""
    for wait in waits(graph):
        given = wait.args[0]
        node = given if collective_kind(given) is not None else given.args[0]
        if collective_kind(node) == "all_reduce":
            source: Any = node.args[0] if given is node else node.args[0][given.args[1]]
            for user in list(wait.users):
                user.replace_input_with(wait, source)
            return True
    return False


def exchange_two_outputs(graph: fx.Graph) -> bool:
    """Two results of one shape: saved values of the forward, gradients of the backward."""
    output = ir.output_node(graph)
    made = list(output.args[0])
    for at, one in enumerate(made):
        for other in range(at + 1, len(made)):
            if isinstance(one, fx.Node) and isinstance(made[other], fx.Node) and one is not made[other]:
                if one.meta["val"].shape == made[other].meta["val"].shape:
                    made[at], made[other] = made[other], one
                    output.args = (tuple(made),)
                    return True
    return False


def swap_two_starts(graph: fx.Graph) -> bool:
    found = starts(graph)
    for one, other in zip(found, found[1:], strict=False):
        between = list(graph.nodes)[list(graph.nodes).index(one) + 1 : list(graph.nodes).index(other)]
        if not set(one.users) & set(between) and not set(other.all_input_nodes) & {*between, one}:
            one.prepend(other)
            return True
    return False


def wait_too_early(graph: fx.Graph) -> bool:
    """A collective is waited for where it starts, although ops that do not use it come before the first that does."""
    nodes = list(graph.nodes)
    for wait in waits(graph):
        result = wait.args[0]
        start = result.args[0] if result.target is getitem else result
        between = nodes[nodes.index(start) + 1 : nodes.index(wait)]
        if any(x.target not in (WAIT, getitem) and collective_kind(x) is None for x in between):
            if result is not start:
                start.append(result)
            result.append(wait)
            return True
    return False


def overlap_two_slots(graph: fx.Graph) -> bool:
    output = ir.output_node(graph)
    plan = output.meta[PLAN]
    inside = [k for k, slot in enumerate(plan.slots) if slot.region == "inside" and slot.size]
    for one in inside:
        for other in inside:
            if one != other and plan.slots[one].overlaps(plan.slots[other]):
                moved = replace(plan.slots[one], offset=plan.slots[other].offset)
                slots = tuple(moved if k == one else slot for k, slot in enumerate(plan.slots))
                output.meta[PLAN] = replace(plan, slots=slots)
                return True
    return False


def forget_how_long_slots_are_used(graph: fx.Graph) -> bool:
    """Each slot is free again right behind the start of its collective, so that others are placed where it lies."""
    output = ir.output_node(graph)
    plan = output.meta[PLAN]
    short = place(replace(slot, end=slot.start) for slot in plan.slots)
    output.meta[PLAN] = replace(plan, slots=short)
    return any(one.offset != other.offset for one, other in zip(plan.slots, short, strict=True))


SAID = {
    delete_a_wait: "before it is waited on",
    drop_a_reduction: "is not the value that it was|nobody reads what it brings",
    exchange_two_outputs: "is not the value that it was",
    swap_two_starts: r"it runs in front of %\S+, and not behind %\S+ as scheduled",
    wait_too_early: r"it runs in front of %\S+, and not behind %\S+ as scheduled",
    forget_how_long_slots_are_used: "its result lies where .* does, at the same time",
    overlap_two_slots: "its result lies where .* does, at the same time",
}
FAULTS = [
    *((name, delete_a_wait) for name in ("bucket", "algorithms", "schedule", "plan_memory")),
    *(
        (name, plant)
        for name in ("bucket", "schedule", "plan_memory")
        for plant in (drop_a_reduction, exchange_two_outputs)
    ),
    ("plan_memory", swap_two_starts),
    ("plan_memory", wait_too_early),
    ("plan_memory", overlap_two_slots),
    ("plan_memory", forget_how_long_slots_are_used),
]
IN_SLOTS = (overlap_two_slots, forget_how_long_slots_are_used)


# Only results of messages have slots.
WHERE = [(*fault, direct) for fault in FAULTS for direct in (False, True) if direct or fault[1] not in IN_SLOTS]


@pytest.mark.parametrize(("name", "plant", "direct"), WHERE, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_fault_is_refused(name: str, plant: Plant, direct: bool) -> None:
    planted = []

    def break_it(graph: fx.Graph) -> bool:
        planted.append(plant(graph))
        return planted[-1]

    def edit(pipeline: Pipeline) -> Pipeline:
        right = next(each for each in pipeline if each.name == name)
        return pipeline.replaced(Broken(right, break_it))

    with pytest.raises(VerifyError, match=f"after {name}: .*({SAID[plant]})"):
        lower(edit, direct)
    assert planted[-1]


@pytest.mark.parametrize("direct", [False, True])
def test_a_schedule_that_waits_too_early(direct: bool) -> None:
    """It is refused by name, with what asked for the collective; one that waits where it starts on purpose is not."""
    planted = []

    def hoist(graph: fx.Graph) -> None:
        planted.append(wait_too_early(graph))

    def edit(pipeline: Pipeline, blocking: bool = False) -> Pipeline:
        return pipeline.replaced(BrokenSchedule(**vars(pipeline[Schedule]) | {"blocking": blocking}))

    BrokenSchedule.plant = staticmethod(hoist)
    with pytest.raises(VerifyError, match=r"after schedule: %\S+: it is waited for in front of %\S+, .*") as caught:
        lower(edit, direct)
    assert any(planted)
    assert caught.value.plan_entry == 'fsdp("dp", level=3)'
    assert caught.value.source is not None and "test_planted_halves.py:" in caught.value.source
    lower(lambda pipeline: edit(pipeline, blocking=True), direct)


def add_up_one_rank_alone(graph: fx.Graph) -> bool:
    """The first rank's term becomes the sum of the ranks' terms."""
    for node in graph.nodes:
        if _is_spelled_sum(node):
            node.target, node.args, node.kwargs = torch.ops.aten.select.int, (node.args[0], 0, 0), {}
            return True
    return False


def _is_spelled_sum(node: fx.Node) -> bool:
    """Whether it adds up what an all-to-all brought."""
    here = node
    while here.op == "call_function" and here.all_input_nodes and collective_kind(here) is None:
        here = here.all_input_nodes[0]
    return node.target is torch.ops.aten.sum.dim_IntList and collective_kind(here) == "all_to_all"


def send_to_other_ranks(graph: fx.Graph) -> bool:
    """An all-to-all over tp where the collective was over dp."""
    for node in starts(graph):
        if collective_kind(node) == "all_to_all":
            node.args = (*node.args[:-1], "shardc:tp")
            return True
    return False


def send_another_value(graph: fx.Graph) -> bool:
    """An all-to-all of what another one takes, which is of the same shape."""
    found = [node for node in starts(graph) if collective_kind(node) == "all_to_all"]
    for node in found:
        for other in found:
            if node is not other and ir.value(node.args[0]) == ir.value(other.args[0]):
                if [*graph.nodes].index(other) < [*graph.nodes].index(node):
                    node.args = (other.args[0], *node.args[1:])
                    return True
    return False


@pytest.mark.parametrize(
    "plant", [None, add_up_one_rank_alone, send_to_other_ranks, send_another_value, exchange_two_outputs]
)
def test_an_algorithm_that_gives_something_else_is_refused(plant: Plant | None) -> None:
    planted = []

    def edit(pipeline: Pipeline) -> Pipeline:
        right = next(each for each in pipeline if each.name == "algorithms")
        return pipeline.replaced(Broken(right, lambda graph: planted.append(plant is not None and plant(graph))))

    cost = CostModel(
        kinds=tuple(
            Measured(kind, 2, 1.0 if kind in ("reduce_scatter", "all_gather") else 1e-6, 1e9)
            for kind in ("reduce_scatter", "all_gather", "all_reduce", "all_to_all")
        )
    )
    if plant is None:
        program = lower(edit, False, bucket_size=0, cost=cost)
        assert "all_to_all" in map(collective_kind, program.backward.graph.nodes)
        return
    with pytest.raises(VerifyError, match="after algorithms: .*(is not the value that it was|it brings what)"):
        lower(edit, False, bucket_size=0, cost=cost)
    assert planted[-1]


def test_which_plan_entry_is_behind_a_collective() -> None:
    program = lower(lambda pipeline: pipeline, False)
    found = {ir.info(node).name: entry_of(node, program.causes) for node in starts(program.forward.graph)}
    assert found["0.weight.full.all_gather_into_tensor.bucket"] == 'fsdp("dp", level=3)'
    assert found["2.mm.summed.all_reduce"] == program.causes["2.weight"]
    assert "tp" in program.causes["2.weight"]
    backward = {ir.info(node).name: entry_of(node, program.causes) for node in starts(program.backward.graph)}
    assert backward["d.2.view.scattered.reduce_scatter_tensor.bucket"] == 'fsdp("dp", level=3)'


def test_the_certificate_says_where_is_waited() -> None:
    """So that ranks which wait elsewhere have other certificates, and the line that differs says where."""
    program = lower(lambda pipeline: pipeline, False)
    certificate = program.certificate()
    first, graph = certificate.lines[0], program.forward.graph
    assert first == (
        "forward: all_gather(dp) f32[8,8], f32[8] %0.weight.full.all_gather_into_tensor.bucket, "
        "waited for in front of %0.t, %0.add"
    )
    assert wait_too_early(graph)
    hoisted = certify(program.mesh, [("forward", graph)]).lines
    assert hoisted[0].endswith("waited for in front of %2.weight.full.all_gather_into_tensor.bucket, %0.t")
    assert hoisted[1:] == certificate.lines[1 : len(hoisted)]


def test_two_saved_values_that_the_cut_exchanges() -> None:
    def edit(pipeline: Pipeline) -> Pipeline:
        broken = BrokenCut(**vars(pipeline[Partition]))
        return pipeline.replaced(broken)

    BrokenCut.plant = staticmethod(exchange_two_outputs)
    with pytest.raises(VerifyError, match="after partition: .*is not the value that it was"):
        lower(edit, False)


def test_a_result_that_is_sent_on_keeps_its_bytes_until_that_has_arrived() -> None:
    """A gathered weight is handed on to a collective, which is waited for where another result has its bytes."""
    program = lower(lambda pipeline: pipeline, True)
    graph, mesh = program.backward.graph, program.mesh
    assert not list(halves.slots(Subject(program.backward, mesh, no_rules)))
    slots = ir.output_node(graph).meta[PLAN].slots
    gathers = [node for node in graph.nodes if node.target in IN_MESSAGES and collective_kind(node) == "all_gather"]
    made = {slots[arguments_of(node)["slots"][0]]: node for node in gathers}
    slot = next(one for one in made for x in slots if x.start > one.end and x.offset < one.offset + one.size and x.size)
    result = next(iter(made[slot].users))
    wait = next(iter(result.users))
    with graph.inserting_after(wait):
        sent = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (wait, "sum", "shardc:tp"))
    with graph.inserting_before(ir.output_node(graph)):
        arrived = graph.call_function(WAIT, (sent,))
    for node, name in ((sent, "sum"), (arrived, "sum.waited")):
        node.meta.update(wait.meta)
        ir.set_info(node, replace(ir.info(wait), name=name))
    found = [reason for _, reason in halves.slots(Subject(program.backward, mesh, no_rules))]
    assert found and "does, at the same time" in found[0]


def test_right_halves_are_taken() -> None:
    for direct in (False, True):
        lower(lambda pipeline: pipeline, direct)


def _rename(graph: fx.Graph) -> None:
    node = starts(graph)[0]
    ir.set_info(node, replace(ir.info(node), name="other"))


def _retype(graph: fx.Graph) -> None:
    node = waits(graph)[0]
    node.meta["val"] = node.meta["val"].clone()


def _swap_roles(graph: fx.Graph) -> None:
    output = ir.output_node(graph)
    output.meta[ir.ROLES] = output.meta[ir.ROLES][::-1]


@pytest.mark.parametrize(
    "change",
    [delete_a_wait, exchange_two_outputs, swap_two_starts, overlap_two_slots, _rename, _retype, _swap_roles],
)
def test_what_a_pass_has_changed_is_noticed(change: Callable[[fx.Graph], object]) -> None:
    """Only a graph that is the same in all that is checked is not verified again."""
    graph = lower(lambda pipeline: pipeline, True).forward.graph
    before = State(graph)
    assert State(graph).is_of(before)
    change(graph)
    assert not State(graph).is_of(before)
    assert State(graph).computes(before) == (change in (swap_two_starts, overlap_two_slots, _retype, _swap_roles))
