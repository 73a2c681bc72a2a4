"""Where what backward reads lies (`shardc.save`): on the host, on the device, or computed again."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardc
from examples.models import llama
from shardc.cost.hardware import H100
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.comm import is_loaded, is_stored
from shardc.ir.parse import parse
from shardc.ir.text import dump
from shardc.report.predicted_memory import OWNERS
from tests.models.alike import trains_alike

aten = torch.ops.aten
WIDTH, LAYERS = 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        # A transposed value is saved: the copy on the host has its dims in another order.
        h = torch.tanh(self.up(x)).t()
        return x + self.down(self.drop(torch.sin(h).cos().t()))


class Net(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


HOST, MM = shardc.save("layers.*", on="host"), ["aten.mm"]
TP = shardc.tp("tp", colwise=["layers.*.up"], rowwise=["layers.*.down"])
PLANS: dict[str, tuple[dict[str, int], shardc.Plan]] = {
    "level 3": ({"dp": 2}, shardc.fsdp("dp") | HOST),
    "level 2 on three": ({"dp": 3}, shardc.fsdp("dp", level=2) | HOST),
    "level 1": ({"dp": 2}, shardc.fsdp("dp", level=1) | HOST),
    "whole": ({"dp": 3}, shardc.ddp("dp") | shardc.save("", on="host")),
    "beside tp": ({"dp": 2, "tp": 2}, shardc.fsdp("dp") | TP | HOST),
    "parameters too": ({"dp": 2}, shardc.fsdp("dp") | HOST | shardc.offload("*")),
    "in microbatches": ({"dp": 2}, shardc.fsdp("dp") | HOST | shardc.microbatches(3)),
    "in stages": ({"pp": 2}, HOST | shardc.pp("pp", microbatches=3)),
    "in stages, backwards in two": (
        {"pp": 2},
        HOST | shardc.pp("pp", schedule="zb", microbatches=3, stages_per_rank=1),
    ),
    "computed again": ({"dp": 2}, shardc.fsdp("dp") | shardc.recompute("layers.*")),
    "inputs of regions": ({"dp": 2}, shardc.fsdp("dp") | HOST | shardc.recompute("layers.*")),
    "products of regions": (
        {"dp": 2, "tp": 2}, shardc.fsdp("dp") | TP | shardc.recompute("*") | shardc.save("*", on="host", ops=MM)
    ),
    "some ops again": ({"dp": 3}, shardc.fsdp("dp") | shardc.save("*", on="recompute", ops=["aten.tanh", *MM])),
    "but one": ({"dp": 2}, shardc.fsdp("dp") | HOST | shardc.save("layers.1", on="device")),
}  # fmt: skip


SLOW = ("level 1", "whole", "parameters too", "in stages", "computed again", "some ops again", "but one")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PLANS])
def test_as_one_device(name: str) -> None:
    mesh, plan = PLANS[name]
    trains_alike(Net(), (torch.randn(12, WIDTH),), mesh, plan, steps=2)


@cache
def lowered(plan: shardc.Plan, layers: int = LAYERS, **options: Any) -> shardc.Program:
    module = shardc.compile(
        Net(layers), shardc.Mesh(dp=2), plan, loss=F.mse_loss, backend="eager", options=shardc.Options(**options)
    )
    return module.lower(torch.empty(12, WIDTH), torch.empty(12, WIDTH))


def stored(program: shardc.Program) -> list[str]:
    """Names of what forward moves to the host; backward moves the same back."""
    forward, backward = program.forward, program.backward
    assert forward is not None and backward is not None
    there = {role.name: x for role, x in ir.outputs(forward.graph) if role.kind == "saved" and isinstance(x, fx.Node)}
    moved = {name: x for name, x in there.items() if x.op == "call_function" and ir.value(x).host}
    back = {ir.role(x.args[0]).name for x in backward.graph.nodes if is_loaded(x)}  # type: ignore[arg-type]
    assert back == set(moved)
    return [ir.info(x).name.removesuffix(".host") for x in moved.values()]


def test_what_a_plan_names_goes_to_the_host() -> None:
    assert stored(lowered(shardc.fsdp("dp"))) == []
    names = stored(lowered(shardc.fsdp("dp") | HOST))
    assert names and all(name.startswith("layers.") for name in names)
    assert not any("weight" in name for name in stored(lowered(shardc.fsdp("dp", level=2) | HOST)))
    one = stored(lowered(shardc.fsdp("dp") | HOST | shardc.save("layers.1", on="device")))
    assert one == [name for name in names if not name.startswith("layers.1.")]
    assert stored(lowered(shardc.fsdp("dp") | HOST | shardc.save("*", on="recompute"))) == []


def test_ops_select_what_is_saved() -> None:
    again = shardc.fsdp("dp") | shardc.recompute("layers.*")
    kept = again | shardc.save("layers.*", on="device", ops=[aten.sin.default])
    program = lowered(kept)
    assert program.forward is not None and program.backward is not None
    saved = [ir.info(x).name for role, x in ir.outputs(program.forward.graph) if role.kind == "saved"]  # type: ignore[arg-type]
    assert [name for name in saved if name.endswith(".sin")] == [f"layers.{at}.sin" for at in range(LAYERS)]
    assert stored(lowered(again | shardc.save("layers.*", on="host", ops="aten.sin"))) == [
        f"layers.{at}.sin" for at in range(LAYERS)
    ]
    names = ["aten.linear", "aten.addmm.default", "aten.mm"]  # a product and its bias are two ops of a program
    products = {tuple(stored(lowered(again | shardc.save("layers.*", on="host", ops=name)))) for name in names}
    assert len(products) == 1 and products.pop()
    sines = [node for node in program.backward.graph.nodes if node.target is aten.sin.default]
    assert len(sines) < sum(node.target is aten.sin.default for node in lowered(again).backward.graph.nodes)  # type: ignore[union-attr]


def test_moves_stand_ahead_of_their_use_within_the_limit() -> None:
    """A move starts behind its value, and its wait frees the device when more than the limit is under way."""
    size = 6 * 4 * WIDTH * 4  # of the largest values, in bytes
    for limit in (-1, size):
        program = lowered(shardc.fsdp("dp") | HOST, max_in_flight=limit)
        assert program.forward is not None and program.backward is not None
        for half, starts in ((program.forward, is_stored), (program.backward, is_loaded)):
            moves, flying, most = [node for node in half.graph.nodes if starts(node)], dict[fx.Node, int](), 0
            for node in half.graph.nodes:
                flying = {x: nbytes for x, nbytes in flying.items() if x not in node.all_input_nodes}
                if starts(node):
                    flying[node] = ir.value(node).nbytes
                most = max(most, sum(flying.values()))
            every = sum(ir.value(node).nbytes for node in moves)
            above = 2 * size * (starts is is_stored)  # of those that start at one place
            assert most == every if limit < 0 else size <= most <= max(limit, size) + above


def test_the_schedule_counts_bytes_where_they_lie() -> None:
    plain, ours = (lowered(shardc.fsdp("dp") | plan, 4, max_in_flight=0) for plan in (shardc.Plan(), HOST))
    before, after = (program.schedule(hardware="h100") for program in (plain, ours))
    moved = [move for move in after.moves if move.kind == "to_host"]
    assert {move.kind for move in after.moves} == {"to_host", "to_device"} and before.moves == ()
    assert dict(after.memory.host) == {"activations": sum(move.bytes for move in moved)}
    assert {move.cause.entry for move in after.moves} == {'save("layers.*", on="host")'}
    of = OWNERS.index("activations")
    freed = max(x.sizes[of] for x in before.memory.samples) - max(x.sizes[of] for x in after.memory.samples)
    largest = max(move.bytes for move in moved)
    assert sum(move.bytes for move in moved) - 3 * largest <= freed <= sum(move.bytes for move in moved)
    assert after.memory.peak.total < before.memory.peak.total


def test_folded_blocks_are_as_all() -> None:
    plan = shardc.fsdp("dp") | HOST | shardc.save("layers.*", on="recompute", ops="aten.tanh")
    folded, whole = (lowered(plan, 6, fold=fold) for fold in (True, False))
    assert folded.folded is not None and whole.folded is None and len(stored(whole)) >= 6
    records = [json.loads(program.schedule("h100").to_json()) for program in (folded, whole)]
    assert records[0] | {"notes": []} == records[1] | {"notes": []}


def test_text_says_where_values_lie_and_reads_back() -> None:
    program = lowered(shardc.fsdp("dp") | HOST | shardc.save("layers.1", on="recompute", ops="aten.tanh"))
    for stage in ("collectives", "offload_saved", "offload_saved.backward"):
        shown = program.text(stage, origins=True)
        assert dump(parse(shown), program.mesh, origins=True) == shown
    assert "<host>" in shown and '| host save("layers.*", on="host")' in shown
    assert "| must_recompute" in program.text("collectives", origins=True)


@pytest.mark.slow
def test_transformers_on_two_axes() -> None:
    model = llama.Llama(llama.LlamaConfig(layers=2))
    tokens = torch.randint(0, 64, (4, 16))
    plan = shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True) | HOST
    trains_alike(model, (tokens,), {"dp": 2, "tp": 2}, plan, steps=2)


@pytest.mark.slow
def test_a_model_of_14_billion_fits_where_it_did_not() -> None:
    """Moves of two values of each layer fit beside forward and backward, on 8 GPUs of 80 GB."""
    model, args = llama.qwen3_14b(targets=True)
    plan = shardc.fsdp("dp") | shardc.precision(param=torch.bfloat16, reduce=torch.float32)
    moved = plan | shardc.save(["layers.*.mlp.gate", "layers.*.mlp.up"], on="host")
    options = shardc.Options(fold=True, bucket_size=H100)
    before, after = (
        shardc.compile(model, shardc.Mesh(dp=8), x, loss=llama.loss, options=options).lower(*args).schedule("h100")
        for x in (plan, moved)
    )
    assert not before.fits() and after.fits() and after.peak < 65e9 and after.seconds < 1.01 * before.seconds


BAD = {
    "no module": (shardc.save("layer.*", on="host"), "matches no module", "layers"),
    "no op": (shardc.save("layers.*", on="host", ops=["aten.tan"]), "no op 'aten.tan'", "aten.tanh"),
    "no op there": (shardc.save("first", on="host", ops=[aten.tanh.default]), "'first'", "aten.t.default"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_policy_that_names_nothing_says_what_there_is(name: str) -> None:
    plan, what, fix = BAD[name]
    with pytest.raises(PlanError) as error:
        lowered(shardc.fsdp("dp") | plan)
    text = str(error.value)
    assert what in text and fix in text and "save(" in text


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: shardc.save("*", on="disk"), "'disk'"),
        (lambda: shardc.save("*", on="host", ops=[torch.sin]), "no op"),
        (lambda: shardc.save("*", on="host", ops=[]), "empty"),
        (lambda: shardc.save(3, on="host"), "3"),
    ],
)
def test_bad_arguments_raise(call: Any, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        call()


def test_plans_are_written_and_read() -> None:
    plan = shardc.recompute(["a", "b"]) | shardc.save(["a", "b"], on="host") | shardc.save("c", on="host", ops=aten.mm)
    text = 'recompute(("a", "b")) | save(("a", "b"), on="host") | save("c", on="host", ops=["aten.mm"])'
    assert str(plan) == text
    assert shardc.plan.expression.parse_plan(text) == plan
    assert shardc.save("a", on="recompute") == shardc.recompute("a")
