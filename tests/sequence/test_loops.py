"""Loops over a split sequence are scans, which send a state and no token; others stay loops, and are right."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import shardc
from shardc.custom_ops.function_ops import OPS
from shardc.ir.comm_volume import collective_kind
from shardc.program import Program
from tests.experts.alike import trains_alike as trains_language_model_alike
from tests.higher_order.on_ranks import equal_one_device
from tests.models.alike import trains_alike
from tests.ranks import run_ranks
from tests.sequence import state_space
from tests.sequence.loops import DRAWS, LINEAR, LOOPS, SCANS, WIDTH, Loop
from tests.sequence.models import batch
from tests.sequence.test_scans import Scanned
from tests.sequence.test_state_space import language_model

ROWS, LENGTH = 2, 12
MESHES: tuple[dict[str, int], ...] = ({"cp": 2}, {"cp": 3}, {"dp": 2, "cp": 2})
HALVES = ("partition", "partition.backward")


def plan(mesh: dict[str, int], order: str = "contiguous") -> shardc.Plan:
    cp = shardc.cp("cp", order=order)
    return shardc.fsdp(("dp", "cp"), threshold=0) | cp if "dp" in mesh else cp


def lowered(model: nn.Module, mesh: dict[str, int], plan: shardc.Plan, length: int = LENGTH) -> Program:
    module = shardc.compile(model, shardc.Mesh(mesh), plan, loss=lambda y: y.square().sum())
    return module.lower(torch.empty(ROWS, length, next(model.parameters()).shape[-1]))


def scans(program: Program, half: str) -> int:
    return sum(node.target is OPS["scan"] for node in program.graph(half).nodes)


def sent(program: Program) -> dict[str, list[int]]:
    """Kind of collective -> elements of each."""
    out: dict[str, list[int]] = {}
    for half in HALVES:
        for node in program.graph(half).nodes:
            kind = collective_kind(node) if node.op == "call_function" else None
            if kind is not None:
                out.setdefault(kind, []).append(node.meta["val"].numel())
    return out


def cases(names: dict[str, object], quick: set[str]) -> list[object]:
    out = []
    for name, mesh in product(names, MESHES):
        marks = () if name in quick and mesh == MESHES[0] else pytest.mark.slow
        out.append(pytest.param(name, mesh, id=f"{name}-{mesh}", marks=marks))
    return out


@pytest.mark.parametrize(("name", "mesh"), cases(dict(SCANS), {"gated", "cell", "chunks"}))
def test_scans_equal_one_device(name: str, mesh: dict[str, int]) -> None:
    trains_alike(Loop(SCANS[name]), (torch.randn(4, LENGTH, WIDTH),), mesh, plan(mesh), steps=1)


@pytest.mark.parametrize(("name", "mesh"), cases(dict(LOOPS), set()))
def test_other_loops_equal_one_device(name: str, mesh: dict[str, int]) -> None:
    trains_alike(Loop(LOOPS[name]), (torch.randn(4, LENGTH, WIDTH),), mesh, plan(mesh), steps=1)


@pytest.mark.parametrize("name", ["last", "lstm", "two"])
def test_lengths_that_do_not_divide(name: str) -> None:
    for mesh, length in (({"cp": 2}, 13), ({"cp": 3}, 11)):
        trains_alike(Loop(SCANS[name]), (torch.randn(2, length, WIDTH),), mesh, plan(mesh), steps=1)


@pytest.mark.parametrize("name", SCANS)
def test_known_loops_are_scans(name: str) -> None:
    captured = lowered(Loop(SCANS[name]), {"cp": 2}, plan({"cp": 2}))
    assert scans(captured, "capture") == 2 * (2 if name == "two" else 1)  # forward and backward


@pytest.mark.parametrize("name", [*LOOPS, "draws"])
def test_others_stay_loops(name: str) -> None:
    program = lowered(Loop(LOOPS.get(name, DRAWS)), {"cp": 2}, plan({"cp": 2}))
    assert not scans(program, "capture")


def test_without_a_split_sequence_all_stay_loops() -> None:
    for name in SCANS:
        assert not scans(lowered(Loop(SCANS[name]), {"dp": 2}, shardc.fsdp("dp", threshold=0)), "capture")


@pytest.mark.parametrize("name", ["gated", "cell"])
def test_a_rank_sends_the_state_and_no_token(name: str) -> None:
    """Forward and backward. If a step only scales the state and adds to it, ranks do not wait: they run it twice."""
    ranks = 3
    program = lowered(Loop(SCANS[name]), {"cp": ranks}, plan({"cp": ranks}), length=240)
    collectives = sent(program)
    assert collectives.pop("permute_ranks") == [ROWS * WIDTH] * 2 * (ranks - 1)
    assert collectives.keys() == {"all_reduce"} and max(collectives["all_reduce"]) == WIDTH * WIDTH  # of gradients
    assert sum(scans(program, half) for half in HALVES) == 2 * (2 if name == "gated" else ranks)


@pytest.mark.parametrize("name", LINEAR)
def test_ranks_do_not_wait_for_steps_that_scale_and_add(name: str) -> None:
    """They run their steps from zeros, and again for the results; if they waited, each rank's turn would be a scan."""
    program = lowered(Loop(LINEAR[name]), {"cp": 3}, plan({"cp": 3}))
    assert [scans(program, half) for half in HALVES] == [2, 2]
    trains_alike(Loop(LINEAR[name]), (torch.randn(2, LENGTH, WIDTH),), {"cp": 3}, plan({"cp": 3}), steps=1)


def test_a_short_scan_over_the_sequence_stays_one() -> None:
    model = Scanned()
    assert scans(lowered(model, {"cp": 2}, plan({"cp": 2})), "capture") == 2
    assert not scans(lowered(model, {"dp": 2}, shardc.fsdp("dp", threshold=0)), "capture")
    trains_alike(model, (torch.randn(2, LENGTH, WIDTH),), {"cp": 2}, plan({"cp": 2}), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "length"), [({"cp": 2}, 256), ({"cp": 3}, 384), ({"dp": 2, "cp": 2}, 256)], ids=str)
def test_gated_delta_rule_of_transformers(mesh: dict[str, int], length: int) -> None:
    """Chunks of 64 places."""
    trains_language_model_alike(partial(language_model, "qwen3_next"), batch(2, length), mesh, plan(mesh))
    module = shardc.compile(language_model("qwen3_next"), shardc.Mesh(mesh), plan(mesh))
    assert scans(module.lower(**batch(2, length)), "capture") == 2


@pytest.mark.parametrize("layer", ["chunked", "delta", "rwkv"])
def test_layers_gather_no_token(layer: str) -> None:
    """The loop over the chunks of the gated delta rule is a scan; that over the rows of its triangle stays."""
    length = 96
    program = lowered(state_space.build(layer), {"cp": 2}, plan({"cp": 2}), length=length)
    tokens = ROWS * length * state_space.WIDTH
    assert scans(program, "capture") == 2
    assert all(size < tokens / 2 for sizes in sent(program).values() for size in sizes)


def on_ranks(found: bool) -> None:
    models = [partial(Loop, mix) for mix in (SCANS["gated"], SCANS["lstm"], SCANS["chunks"], LINEAR["alpha"])]
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    equal_one_device(models, (x,), ("inductor",), found, plan=shardc.cp("dp", order="contiguous"))
    padded = x[:, : LENGTH - 1].contiguous()
    equal_one_device([partial(Loop, SCANS["last"])], (padded,), ("inductor",), found, plan=shardc.cp("dp"))


@pytest.mark.medium
def test_on_two_ranks_and_from_the_store(tmp_path: Path) -> None:
    run_ranks(2, partial(on_ranks, False), programs=tmp_path)
    run_ranks(2, partial(on_ranks, True), programs=tmp_path)
