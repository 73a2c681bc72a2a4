"""What is kept on the host leaves the device's memory, and its copies take their time."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardc
from shardc.cost.hardware import KNOWN, find
from shardc.report.predicted_schedule import Schedule

WIDTH, LAYERS = 256, 4
SHARD = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 // 2  # bytes of a rank's parameters


def schedule(plan: shardc.Plan, stage: str, hardware: str = "h100", **options: int) -> Schedule:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    module = shardc.compile(model, shardc.Mesh(dp=2), plan, loss=F.mse_loss, options=shardc.Options(**options))
    return module.lower(torch.empty(64, WIDTH), torch.empty(64, WIDTH)).schedule(hardware, stage=stage)


@pytest.mark.parametrize("stage", ["schedule", "localize"])
def test_memory_is_counted_where_it_is(stage: str) -> None:
    plain, offloaded = schedule(shardc.fsdp("dp"), stage), schedule(shardc.fsdp("dp") | shardc.offload(), stage)
    assert plain.memory.host == () and not plain.moves
    assert dict(offloaded.memory.host) == {"parameters": SHARD, "optimizer": 2 * SHARD, "gradients": SHARD}
    held = offloaded.memory.by_owner()
    assert held["parameters"] == held["optimizer"] == held["gradients"] == 0
    assert offloaded.memory.peak.total <= plain.memory.peak.total - 3 * SHARD
    some = schedule(shardc.fsdp("dp") | shardc.offload("*.bias"), stage)
    bias = LAYERS * WIDTH * 4 // 2
    assert dict(some.memory.host) == {"parameters": bias, "optimizer": 2 * bias, "gradients": bias}
    assert some.memory.by_owner()["parameters"] == SHARD - bias


@pytest.mark.parametrize("stage", ["schedule", "localize"])
def test_copies_take_the_time_of_their_link(stage: str) -> None:
    made = schedule(shardc.fsdp("dp") | shardc.offload("*.weight"), stage)
    plain = schedule(shardc.fsdp("dp"), stage)
    assert made.wire == plain.wire, "copies are not between ranks"
    weight = WIDTH * WIDTH * 4 // 2
    down, up = (made.totals("kind")[kind] for kind in ("to_device", "to_host"))
    assert (down.count, down.wire) == (2 * LAYERS - 1, (2 * LAYERS - 1) * weight)  # the first is not fetched again
    assert (up.count, up.wire) == (LAYERS, LAYERS * weight)
    assert {each.cause.entry for each in made.moves} == {'offload("*.weight")'}
    assert {each.cause.tensor for each in made.moves} == {f"{layer}.weight" for layer in range(LAYERS)}
    for each in made.moves:
        assert each.seconds == pytest.approx(find("h100").move(weight).seconds)
    slow = schedule(shardc.fsdp("dp") | shardc.offload("*.weight"), stage, "a100")
    assert slow.moves[0].seconds > made.moves[0].seconds
    said = json.loads(made.to_json())
    assert len(said["moves"]) == 3 * LAYERS - 1 and said["memory"]["host"]["gradients"] == LAYERS * weight
    assert "to_device" in made.to_html() and "to_host" in made.to_trace()


def test_copies_run_beside_collectives_and_compute() -> None:
    weight = WIDTH * WIDTH * 4 // 2
    said = shardc.fsdp("dp") | shardc.offload("*.weight")
    made = schedule(said, "schedule", bucket_size=0, max_in_flight=2 * weight)
    for kind in ("to_device", "to_host"):
        copies = [each for each in made.moves if each.kind == kind and each.phase == "backward"]
        assert any(a.start < b.end and b.start < a.end for a in copies for b in made.collectives), kind
    assert sum(each.exposed for each in made.moves) < sum(each.seconds for each in made.moves)


def test_every_description_has_the_link() -> None:
    for each in KNOWN.values():
        assert each.host.bandwidth > 0 and each.move(1 << 30).seconds > (1 << 30) / each.host.bandwidth * 0.99
