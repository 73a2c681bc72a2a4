"""``reshard_after_forward=n``: a parameter stays split over n ranks from forward to backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardc
from examples.models import llama
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.comm_volume import collective_kind, tally
from tests.models.alike import relative

X, Y = torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 6, dtype=torch.float64)


class Checkpointed(nn.Module):
    """Uneven sizes, and a layer that runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.head = nn.Linear(8, 30), nn.Linear(30, 30), nn.Linear(30, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(lambda h: self.mid(self.up(h).tanh()).relu(), x, use_reentrant=False)
        return self.head(hidden)


def program(mesh: shardc.Mesh, plan: shardc.Plan, **options: Any) -> Any:
    options = {"bucket_size": 0, **options}
    module = shardc.compile(
        Checkpointed().double(), mesh, plan, loss=F.mse_loss, backend="eager", options=shardc.Options(**options)
    )
    return module.lower(X, Y)


def gathers(program: Any) -> list[dict[str, tuple[int, int]]]:
    """By axes the gathers of forward and those of backward: how many, and the bytes that each rank sends."""
    halves = (program.forward, program.backward)
    return [
        {r.axis: (r.count, r.bytes) for r in tally(half, program.mesh) if r.kind == "all_gather"} for half in halves
    ]


def test_backward_gathers_over_n_ranks() -> None:
    mesh = shardc.Mesh(dp=8)
    whole, part, none = (
        program(mesh, plan)
        for plan in (
            shardc.fsdp("dp"),
            shardc.fsdp("dp", reshard_after_forward=2),
            shardc.fsdp("dp", level=2),
        )
    )
    assert gathers(part)[0] == gathers(whole)[0]
    ((count, bytes_over_8),) = gathers(whole)[1].values()
    # Half of what they gather, rather than seven eighths.
    assert gathers(part)[1] == {"dp:4x2": (count, bytes_over_8 * 8 // 7 // 2)} and gathers(none)[1] == {}
    # Each rank keeps half of what it gathers again; level 2 keeps all but the filling of uneven dims.
    gathered = bytes_over_8 * 8 // 7
    saved = [_saved(p) for p in (whole, part, none)]
    assert saved[1] - saved[0] == gathered // 2 < saved[2] - saved[0] <= gathered


def _saved(program: Any) -> int:
    """Bytes that forward keeps for backward, inputs and parameters left out."""
    kept = [x for role, x in ir.outputs(program.forward.graph) if role.kind == "saved" and ir.info(x).role is None]
    return sum(ir.value(x).nbytes for x in kept)


PLANS = {
    "all": ({"dp": 4}, shardc.fsdp("dp", reshard_after_forward=2)),
    "by_name": ({"dp": 4}, shardc.fsdp("dp", reshard_after_forward={"*": 2, "mid.*": -1})),
    "fewer_store": ({"dp": 8}, shardc.fsdp("dp", shard_size=4, reshard_after_forward=2, overrides={"up.*": 2})),
    "two_axes": ({"a": 2, "b": 4}, shardc.fsdp(("a", "b"), reshard_after_forward=4)),
    "part_of_two_axes": ({"a": 2, "b": 4}, shardc.fsdp(("a", "b"), reshard_after_forward=2)),
    "hsdp": ({"rep": 2, "dp": 4}, shardc.hsdp(reshard_after_forward=2)),
    "tp": (
        {"dp": 4, "tp": 2},
        shardc.fsdp("dp", reshard_after_forward=2) | shardc.tp("tp", colwise=["up"], rowwise=["mid"]),
    ),
    "placed": ({"dp": 4}, shardc.fsdp("dp", reshard_after_forward=2) | shardc.Plan(params={"up.weight": (None, "dp")})),
    "offload": ({"dp": 4}, shardc.fsdp("dp", reshard_after_forward=2) | shardc.offload("mid.*")),
    "levels": ({"dp": 4}, shardc.fsdp("dp", level=2, levels={"mid.*": 3}, reshard_after_forward=2)),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("bucket_size", [0, None])
def test_values_are_those_of_one_device(name: str, bucket_size: int | None) -> None:
    sizes, plan = PLANS[name]
    torch.manual_seed(0)
    source = Checkpointed().double()
    options = shardc.Options(bucket_size=bucket_size, p2p_collectives=bucket_size is None)
    module = shardc.compile(
        copy.deepcopy(source), shardc.Mesh(sizes), plan, loss=F.mse_loss, backend="eager", options=options
    )
    over = {row.axis for row in tally(module.lower(X, Y).backward, shardc.Mesh(sizes)) if row.kind == "all_gather"}
    assert over & {"dp:2x2", "dp:4x2", "b", "b:2x2"}, over
    sim = shardc.Simulation(module)
    expected = F.mse_loss(source(X), Y)
    expected.backward()
    assert relative(sim(X, Y), expected.detach()) < 1e-9
    sim.backward()
    for name, param in source.named_parameters():
        assert relative(sim.grad(name), param.grad) < 1e-9, name


def test_in_bf16_what_was_cast_is_kept() -> None:
    low = shardc.precision(param=torch.bfloat16)
    part, whole = (
        program(shardc.Mesh(dp=4), shardc.fsdp("dp", reshard_after_forward=n) | low, bucket_size=0) for n in (2, None)
    )
    ((count, sent),) = gathers(whole)[1].values()
    assert gathers(part)[1] == {"dp:2x2": (count, sent * 4 // 3 // 2)}
    gathered = [x for x in part.backward.graph.nodes if collective_kind(x) == "all_gather"]
    assert {ir.value(x).dtype for x in gathered} == {torch.bfloat16}


def test_a_budget_leaves_it_alone() -> None:
    part = program(shardc.Mesh(dp=4), PLANS["by_name"][1], memory_budget=-1)
    assert {name for name, level in part.levels.items() if level == 2} == {"mid.weight", "mid.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True])
def test_folded_and_predicted(checkpoint: bool) -> None:
    """Alike blocks repeat, and the joint graph predicts the gathers of the halves."""
    config = llama.LlamaConfig(layers=6)
    model = llama.Llama(config)
    if checkpoint:
        model.layers = nn.ModuleList(_Again(layer) for layer in model.layers)
    plan, given = shardc.fsdp("dp", reshard_after_forward=2), llama.batch(config, size=4, length=8)
    made = [
        shardc.compile(
            model, shardc.Mesh(dp=4), plan, loss=llama.loss, options=shardc.Options(fold=fold, bucket_size=0)
        ).lower(*given)
        for fold in (True, False)
    ]
    assert made[0].folded is not None and gathers(made[0]) == gathers(made[1])
    assert _saved(made[0]) == _saved(made[1])
    starts = [
        sorted((c.axis, c.wire) for c in made[1].schedule(stage=stage).collectives if c.kind == "all_gather")
        for stage in ("schedule", "localize")
    ]
    assert starts[0] == starts[1]


class _Again(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.inner, *args, use_reentrant=False)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (lambda: shardc.fsdp("dp", reshard_after_forward=1), "1"),
        (
            lambda: shardc.fsdp("dp", level=2, reshard_after_forward=2),
            "reshard_after_forward applies to parameters of level 3",
        ),
        (
            lambda: shardc.fsdp("dp", reshard_after_forward=3),
            "parameters cannot be split over 3 of the 4 ranks of dp=4",
        ),
        (lambda: shardc.fsdp("dp", reshard_after_forward={"no": 2}), "'no' matches no parameter"),
    ],
)
def test_what_cannot_be(plan: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        program(shardc.Mesh(dp=4), plan())
