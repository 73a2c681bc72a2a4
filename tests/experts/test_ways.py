"""The ways of rows: what they send is what the page says, and no expert's weights are gathered."""

from __future__ import annotations

import re

import pytest
import torch

import shardc
from shardc.ir.comm_volume import tally
from tests.experts.models import Own, build, experts_of
from tests.experts.models import batch as toy

WIDTH, EXPERTS, BYTES = 64, 16, 4


def program(n: int, choices: int, tokens: int, way: str, **bound: float) -> shardc.Program:
    with torch.device("meta"):
        model = Own(WIDTH, 48, EXPERTS, choices)
    plan = shardc.ep("ep", "experts", dispatch=way, **bound)
    module = shardc.compile(model, shardc.Mesh(ep=n), plan, backend="eager")
    ids = torch.zeros(n * tokens, 1, dtype=torch.int64)
    return module.lower(input_ids=ids, labels=ids)


def sent(made: shardc.Program, kinds: tuple[str, ...]) -> int:
    return sum(row.bytes for half in made.step() for row in tally(half.gm, made.mesh) if row.kind in kinds)


@pytest.mark.parametrize("n, choices, tokens", [(2, 2, 64), (4, 2, 64), (4, 3, 128)])
def test_bytes_are_those_of_the_page(n: int, choices: int, tokens: int) -> None:
    rows = 4 * (n - 1) * tokens * choices * WIDTH * BYTES // n
    weights = 2 * (n - 1) * tokens * choices * BYTES // n
    counts = 8 * (n - 1) * EXPERTS // n
    assert sent(program(n, choices, tokens, "send"), ("all_to_all",)) == rows + weights + counts
    bounded = program(n, choices, tokens, "bounded", capacity=1.5)
    assert sent(bounded, ("all_to_all",)) == 1.5 * (rows + weights) + counts
    gathered = 4 * (n - 1) * tokens * WIDTH * BYTES + (n - 1) * tokens * choices * (8 + 2 * BYTES)
    assert sent(program(n, choices, tokens, "gather"), ("all_gather", "reduce_scatter")) == gathered


def test_the_cheaper_way_is_taken() -> None:
    """One choice of a token over eight ranks is sent; eight choices over two are gathered."""
    few, many = program(8, 1, 8192, "auto"), program(2, 8, 8192, "auto")
    assert "send_rows" in few.text("localize") and "send_rows" not in many.text("localize")


@pytest.mark.parametrize("chooser", ["greedy", pytest.param("exact", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["auto", "gather", "send"])
def test_no_weights_of_experts_are_gathered(way: str, chooser: str) -> None:
    plan = shardc.fsdp("ep") | shardc.ep("ep", experts_of("qwen3-moe"), dispatch=way)
    options = shardc.Options(layout_solver=chooser)
    module = shardc.compile(build("qwen3-moe"), shardc.Mesh(ep=2), plan, backend="eager", options=options)
    text = module.lower(**toy()).text("localize")
    assert not re.findall(r"experts\.(?:gate_up|down)_proj\S*: \S+ = \S*(?:all_gather|all_reduce|reduce_scatter)", text)


def test_memory_of_experts_falls_with_their_axis() -> None:
    held = []
    for n in (1, 2, 4):
        plan = shardc.ep("ep", "experts")
        module = shardc.compile(Own(WIDTH, 48, EXPERTS), shardc.Mesh(ep=n), plan, backend="eager")
        sim = shardc.Simulation(module)
        ids = torch.arange(32).view(8, 4)
        sim(input_ids=ids, labels=ids)
        sim.backward()
        held.append(sum(each["experts.up"][0].numel() for each in (sim.params, sim.grads)))
    assert held == [held[0], held[0] // 2, held[0] // 4]


def test_a_skewed_load_takes_longer_and_room_is_told() -> None:
    made = program(4, 2, 512, "send")
    even, skewed = (made.schedule("h100", skew=skew) for skew in (1.0, 2.0))
    assert skewed.seconds > even.seconds and skewed.flops > even.flops
    assert any("have room for" in note for note in even.notes)
