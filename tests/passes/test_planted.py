"""Planted miscompiles: a right program is broken by hand, and the verifier or the simulated ranks' numbers say so.

Each bug is planted twice where it can be: in the graph of steps, where layouts say what a value is, and in the
local graph, where every rank's tensor has a right shape and only its numbers are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardc
from shardc.errors import VerifyError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.comm_volume import arguments_of
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.passes.check import check
from shardc.program import Program
from shardc.runtime.shards import assemble
from shardc.runtime.sim.lockstep import Lockstep

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
MESH = Mesh(dp=2, tp=2)
SIZE = 8


class Net(nn.Module):
    """Two square blocks and a head, so that a wrong shard, group or weight has the shape of the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.up0, self.down0 = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.up1, self.down1 = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down0(self.up0(x).relu())
        return self.head(self.down1(self.up1(x).relu()))


@dataclass(frozen=True)
class Right:
    """A right program and what it computes."""

    program: Program
    feed: dict[tuple[str, str], Tensor]
    wanted: dict[tuple[str, str], Tensor]

    def graph(self, stage: str) -> fx.GraphModule:
        """A copy of the graph after ``stage``, to break."""
        copy = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        made = copy.output(copy.graph_copy(self.program.graph(stage), env))
        for node, twin in env.items():
            twin.meta = dict(node.meta)
        made.meta = dict(self.program.graph(stage).output_node().meta)
        return fx.GraphModule(torch.nn.Module(), copy)


@lru_cache(maxsize=1)
def right() -> Right:
    torch.manual_seed(0)
    model = Net().double()
    plan = shardc.fsdp("dp") | shardc.tp("tp", colwise=["up*", "head"], rowwise=["down*"])
    x, target = torch.randn(8, SIZE).double(), torch.randint(SIZE, (8,))
    module = shardc.compile(model, MESH, plan, loss=F.cross_entropy, backend="eager")
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    params = dict(model.named_parameters())
    feed = {("param", name): p.detach() for name, p in params.items()}
    feed |= {("input", "x"): x, ("input", "target"): target, ("tangent", "out"): torch.ones((), dtype=torch.float64)}
    grads = {("grad", name): p.grad for name, p in params.items() if p.grad is not None}
    return Right(module.lower(x, target), feed, {("output", "out"): loss.detach(), **grads})


def error(gm: fx.GraphModule) -> float:
    """The largest error of the local joint graph ``gm``, stepped on all ranks, relative to each right result.

    Raises:
        AssertionError: replicas that should be equal differ.
    """
    ranks, feed = Lockstep(MESH), []
    source = {(ir.role(n).kind, ir.role(n).name): n for n in ir.placeholders(right().program.graph("collectives"))}
    for node in ir.placeholders(gm.graph):
        role = ir.role(node)
        if role.kind == "coordinate":
            feed.append(ranks.coordinate(tuple(role.name.split(","))))
        else:
            key = role.kind, role.name
            feed.append(ranks.shard(right().feed[key], ir.layout(source[key])))
    largest = 0.0
    for (role, _), result in zip(ir.outputs(gm.graph), ranks.run(gm, feed), strict=True):
        assert result is not None and role.layout is not None
        wanted = right().wanted[role.kind, role.name]
        off = (assemble(result, role.layout) - wanted).abs().max() / wanted.abs().max()
        largest = max(largest, off.item())
    return largest


def test_the_right_program_is_right() -> None:
    check(right().graph("collectives"), MESH, "collectives", check(right().graph("simplify"), MESH, "simplify"))
    check(right().graph("localize"), MESH, "localize")
    assert error(right().graph("localize")) < 1e-12


# --- bugs


Plant = Callable[[fx.GraphModule], None]


def named(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.op != "output" and ir.info(node).name == name)


def drop(name: str) -> Plant:
    """Uses of ``name`` take what it moves instead."""

    def plant(gm: fx.GraphModule) -> None:
        node: Any = named(gm, name)
        started = node.args[0] if node.target is c10d.wait_tensor.default else node
        node.replace_all_uses_with(started.args[0])
        gm.graph.erase_node(node)
        if started is not node:
            gm.graph.erase_node(started)

    return plant


def argument(name: str, key: str, value: Any) -> Plant:
    """The argument ``key`` of ``name`` is ``value``."""

    def plant(gm: fx.GraphModule) -> None:
        node: Any = named(gm, name)
        node = node.args[0] if node.target is c10d.wait_tensor.default else node
        if node.target in ops.MARKERS.values():
            node.kwargs = {**node.kwargs, key: value}
        else:
            node.args, node.kwargs = tuple({**arguments_of(node), key: value}.values()), {}

    return plant


def swap(name: str, other: str, user: str) -> Plant:
    """``user`` takes ``other`` in the place of ``name``."""

    def plant(gm: fx.GraphModule) -> None:
        named(gm, user).replace_input_with(named(gm, name), named(gm, other))

    return plant


def relabel(name: str, layout: str) -> Plant:
    """``name`` says that it lies as ``layout``."""

    def plant(gm: fx.GraphModule) -> None:
        node = named(gm, name)
        ir.set_info(node, ir.info(node).at(_layout(node, layout)))

    return plant


def both(*plants: Plant) -> Plant:
    def plant(gm: fx.GraphModule) -> None:
        for one in plants:
            one(gm)

    return plant


def transposed(name: str) -> Plant:
    """Uses of ``name`` take its transpose: the shard of the other dim, where a tensor is square."""

    def plant(gm: fx.GraphModule) -> None:
        node = named(gm, name)
        with gm.graph.inserting_after(node):
            turned = gm.graph.call_function(aten.t.default, (node,))
        ir.set_info(turned, replace(ir.info(node), name=f"{name}.turned"))
        node.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not turned)

    return plant


def instead_of_reduction(name: str) -> Plant:
    """This rank's own part of a pending sum instead of the sum: a slice where the reduce-scatter was."""

    def plant(gm: fx.GraphModule) -> None:
        node: Any = named(gm, name)
        started = node.args[0]
        with gm.graph.inserting_before(node):
            part = gm.graph.call_function(aten.slice.Tensor, (started.args[0], 0, 0, ir.value(node).shape[0]))
        ir.set_info(part, replace(ir.info(node), name=f"{name}.part"))
        node.replace_all_uses_with(part)
        gm.graph.erase_node(node)
        gm.graph.erase_node(started)

    return plant


def _layout(node: fx.Node, text: str) -> Any:
    value = f"{ir.value(node)}".partition("[")[0]
    shown = f"mesh {MESH}\ninputs:\n  input %x: {value}{text}\noutputs:\n"
    return ir.layout(next(iter(parse(shown).graph.nodes)))


STEPS = [
    (
        "dropped all-reduce",
        drop("down0.mm.summed"),
        "%down0.add: operands [0] are partial (sum over tp), which the op does not carry",
    ),
    (
        "dropped gather",
        drop("up0.weight.full"),
        "%up0.t: its operands at [8@(tp,dp),8] give [8,8@(tp,dp)]",
    ),
    (
        "all-reduce over the wrong axis",
        argument("down0.mm.summed", "axis", "dp"),
        "%down0.mm.summed: a sum over dp does not stand between {sum:tp} pending and nothing pending",
    ),
    (
        "gather over the wrong axis",
        argument("up0.weight.full", "axis", "tp"),
        "%up0.weight.full: [8@(tp,dp),8] without tp is [(2 4@dp),8], not [8@tp,8]",
    ),
    (
        "sum instead of max",
        argument("amax.summed", "op", "sum"),
        "%amax.summed: a sum over tp does not stand between {max:tp} pending and nothing pending",
    ),
    (
        "partial used as if whole",
        both(relabel("down0.mm", "[8@dp,8]"), drop("down0.mm.summed")),
        "%down0.mm: its operands at [8@dp,8@tp], [8@tp,8] give [8@dp,8]{sum:tp}",
    ),
    (
        "shard of the wrong dim",
        relabel("d.down0.mm.1.scattered", "[8,8@(tp,dp)]"),
        "the outputs: grad down0.weight is f64[8,8@(tp,dp)], and is wanted as [8@dp,8@tp]",
    ),
    (
        "another dim of the gradient",
        relabel("d.up0.mm.scattered", "[8@tp,8@dp]"),
        "the outputs: grad up0.weight is f64[8@tp,8@dp], and is wanted as [8@(tp,dp),8]",
    ),
    (
        "stale gather",
        swap("up1.weight.full", "up0.weight.full", "up1.t"),
        "%up1.mm: no op took %down0.add, %up1.t this way before the pass",
    ),
]


@pytest.mark.parametrize(("plant", "message"), [case[1:] for case in STEPS], ids=[case[0] for case in STEPS])
def test_a_bug_among_the_steps_is_found_by_the_verifier(plant: Plant, message: str) -> None:
    gm = right().graph("collectives")
    before = check(right().graph("simplify"), MESH, "simplify")
    plant(gm)
    with pytest.raises(VerifyError) as caught:
        check(gm, MESH, "collectives", before)
    assert caught.value.what == f"after collectives: {message}"


LOCAL = [
    ("dropped all-reduce", drop("down0.mm.summed")),
    ("dropped all-reduce of the loss", drop("sum.2.summed")),
    ("all-reduce over the wrong axis", argument("down0.mm.summed", "group_name", "shardc:dp")),
    ("gather over the wrong axis", argument("up0.weight.full", "group_name", "shardc:tp")),
    ("reduce-scatter over the wrong axis", argument("d.up0.mm.scattered", "group_name", "shardc:tp")),
    ("max instead of sum", argument("sum.summed", "reduce_op", "max")),
    ("partial used as if whole", instead_of_reduction("d.up0.mm.scattered")),
    ("shard of the wrong dim", transposed("d.down0.mm.1.scattered")),
    ("stale gather", swap("up1.weight.full", "up0.weight.full", "up1.t")),
]


@pytest.mark.parametrize("plant", [case[1] for case in LOCAL], ids=[case[0] for case in LOCAL])
def test_a_bug_in_the_local_graph_is_found_by_the_numbers(plant: Plant) -> None:
    gm = right().graph("localize")
    plant(gm)
    try:
        off = error(gm)
    except AssertionError as caught:
        assert "differ" in str(caught)
    else:
        assert off > 1e-3


def test_what_the_verifier_finds_in_a_local_graph() -> None:
    for plant, message in [
        (argument("down0.mm.summed", "group_name", "shardc:pp"), "'shardc:pp' is no group of the mesh dp=2 tp=2"),
        (argument("up0.weight.full", "group_size", 4), "it says 4 ranks, the group 'shardc:dp' has 2"),
    ]:
        gm = right().graph("localize")
        plant(gm)
        with pytest.raises(VerifyError) as caught:
            check(gm, MESH, "localize")
        assert caught.value.what.endswith(message)
