"""Parameters kept on the host: the same as one device under every plan, moved when and where the plan says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import shardc
from shardc.errors import VerifyError
from shardc.ir import graph as ir
from shardc.ir.comm import move_kind
from shardc.ir.parse import parse
from shardc.ir.text import dump
from shardc.passes.check import check
from tests.models.alike import trains_alike
from tests.state import model

ALL, SOME = shardc.offload(), shardc.offload(["odd.*", "fused", "back.weight"])
SPLIT = shardc.tp("tp", colwise=["mid"], rowwise=["back"])
PLANS = {
    "level 3": ({"dp": 2}, shardc.fsdp("dp") | ALL),
    "level 2": ({"dp": 2}, shardc.fsdp("dp", level=2) | ALL),
    "level 1, some": ({"dp": 4}, shardc.fsdp("dp", level=1) | SOME),
    "whole": ({"dp": 2}, shardc.ddp("dp") | ALL),
    "one rank": ({"dp": 1}, shardc.fsdp("dp") | ALL),
    "small ones whole": ({"dp": 2}, shardc.fsdp("dp", threshold=400) | ALL),
    "partial groups": ({"dp": 4}, shardc.fsdp("dp", shard_size=2) | ALL),
    "beside tp": ({"dp": 2, "tp": 2}, shardc.fsdp("dp") | SPLIT | SOME),
    "hsdp": ({"rep": 2, "dp": 2}, shardc.hsdp() | ALL),
}


@pytest.mark.parametrize("name", PLANS)
def test_as_one_device(name: str) -> None:
    mesh, plan = PLANS[name]
    trains_alike(model(), (torch.randn(8, 5),), mesh, plan)


def lowered(plan: shardc.Plan, layers: int = 3, **options: object) -> shardc.Program:
    made = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    said = shardc.Options(**options)  # type: ignore[arg-type]
    module = shardc.compile(made, shardc.Mesh(dp=2), plan, loss=F.mse_loss, backend="eager", options=said)
    return module.lower(torch.empty(4, 8), torch.empty(4, 8))


def moves(gm: fx.GraphModule | None, kind: str) -> list[str]:
    assert gm is not None
    return [ir.info(node.args[0]).name for node in gm.graph.nodes if move_kind(node) == kind]  # type: ignore[arg-type]


WEIGHTS = ["0.weight", "1.weight", "2.weight"]


@pytest.mark.parametrize(
    ("plan", "again"),
    [
        (shardc.fsdp("dp"), ["2.weight", "1.weight"]),  # of the first layer, nothing is needed in backward
        (shardc.ddp("dp"), ["2.weight", "1.weight"]),
        (shardc.fsdp("dp", level=2), []),
        (shardc.fsdp("dp", level=1), []),
    ],
    ids=str,
)
def test_what_is_kept_from_forward_to_backward_is_moved_once(plan: shardc.Plan, again: list[str]) -> None:
    program = lowered(plan | shardc.offload("*.weight"))
    assert moves(program.forward, "to_device") == moves(program.inference, "to_device") == WEIGHTS
    assert moves(program.backward, "to_device") == again
    assert len(moves(program.backward, "to_host")) == len(WEIGHTS)


def test_casts_run_on_the_device_and_the_text_says_who_asked() -> None:
    program = lowered(shardc.fsdp("dp") | shardc.offload("0.*") | shardc.precision(torch.bfloat16, torch.float32))
    lines = program.text("offload", origins=True).splitlines()
    said = [line.strip().partition(" = ")[0] for line in lines if "offload(" in line or "_to_copy(%0.weight" in line]
    assert said[:3] == [
        "%0.weight.to_device: f32[4,8]", "%0.weight.device: f32[4,8]", said[2],
    ]  # fmt: skip
    assert said[2].endswith(": bf16[4,8]"), "the cast stands behind the move"
    (grad,) = (line for line in lines if line.strip().startswith("grad 0.weight"))
    name = grad.partition(" = ")[2].partition(" as ")[0]
    assert any(f"{name}: f32<host>[4,8]" in line and line.endswith('| offload("0.*")') for line in lines)
    for stage in program.stages:
        assert dump(parse(program.text(stage)), program.mesh) == program.text(stage)


def test_moves_fly_ahead_within_the_limit() -> None:
    """Each layer's move starts while the one before is on its way, and no earlier."""
    plan = shardc.fsdp("dp") | shardc.offload("*.weight")
    size = 4 * 8 * 4
    program = lowered(plan, layers=4, bucket_size=0, max_in_flight=2 * size)
    order = [ir.info(node).name for node in program.forward.graph.nodes if node.op == "call_function"]  # type: ignore[union-attr]
    place = {name: at for at, name in enumerate(order)}
    for layer in (1, 2, 3):
        start = place[f"{layer}.weight.to_device"]
        assert place[f"{layer - 1}.weight.to_device"] < start < place[f"{layer - 1}.weight.device"]
        if layer > 1:
            assert start > place[f"{layer - 2}.weight.device"]


def test_gradients_leave_while_the_rest_of_the_backward_runs() -> None:
    program = lowered(shardc.fsdp("dp") | shardc.offload(), layers=4, bucket_size=0)
    nodes = [node for node in program.backward.graph.nodes if node.op == "call_function"]  # type: ignore[union-attr]
    kinds = [move_kind(node) or str(getattr(node.target, "_opname", "")) for node in nodes]
    starts = [at for at, kind in enumerate(kinds) if kind == "to_host"]
    last = max(at for at, kind in enumerate(kinds) if kind == "mm")
    assert starts[0] < last and len(starts) == 8
    assert all(kind == "wait_tensor" for kind in kinds[starts[-1] + 1 :])


def test_the_verifier_knows_the_sides() -> None:
    program = lowered(shardc.fsdp("dp") | shardc.offload("0.weight"))
    text = program.text("offload")
    for broken, reason in (
        (text.replace("(%0.weight.device, 2", "(%0.weight, 2"), "it computes with what lies on the host"),
        (text.replace("%0.weight.to_device: f32[", "%0.weight.to_device: f32<host>["), "does not move from the host"),
        (text.replace("param %0.weight: f32<host>[", "param %0.weight: f32["), "does not move from the host"),
    ):
        assert broken != text
        with pytest.raises(VerifyError, match=reason):
            check(parse(broken), program.mesh, "offload")


def test_copies_are_real() -> None:
    """Level 2 computes its backward with what it fetched in forward, level 3 with what the host has by then."""
    for level, kept in ((2, True), (3, False)):
        made = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).double()
        plan = shardc.fsdp("dp", level=level) | shardc.offload()
        module = shardc.compile(made, shardc.Mesh(dp=2), plan, loss=F.mse_loss, backend="eager")
        sim = shardc.Simulation(module)
        x, y = torch.randn(4, 8).double(), torch.randn(4, 8).double()
        F.mse_loss(made(x), y).backward()
        sim(x, y)
        for shard in sim.params["1.weight"]:
            shard.zero_()
        sim.backward()
        assert bool(sim.grad("0.weight").any()) == kept
        if kept:
            torch.testing.assert_close(sim.grad("0.weight"), made[0].weight.grad)  # type: ignore[union-attr]
