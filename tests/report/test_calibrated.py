"""Ranks whose own cores start, send and compute everything: what that takes from a predicted step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.cost.hardware import CPU, calibrated, find
from shardc.cost.model import CostModel, Measured, Messages
from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from tests.report.test_schedule import stack_program

DIRECT = shardc.Options(p2p_collectives=True)


@pytest.fixture(scope="module")
def program() -> shardc.Program:
    """Gathers ahead of their uses, reduce-scatters behind compute; buckets of several tensors."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    options = replace(DIRECT, bucket_size=40000, max_in_flight=200000)
    module = shardc.compile(model, Mesh(dp=2), shardc.fsdp("dp"), loss=F.mse_loss, options=options)
    return module.lower(torch.empty(512, 64), torch.empty(512, 64))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_a_step_is_compute_and_what_communication_takes(program: shardc.Program, share: float) -> None:
    schedule = program.schedule(replace(CPU, share=share, call=1e-5, message=1e-6, launch=1e-6))
    assert schedule.compute_seconds + schedule.exposed == pytest.approx(schedule.seconds)


def test_a_rank_computes_nothing_while_it_starts_a_collective(program: shardc.Program) -> None:
    """Tensors of 16 KiB share a message."""
    free = replace(CPU, start=0.0, inside=replace(CPU.inside, bandwidth=1e18, ring=0.0))
    before, after = (program.schedule(one) for one in (free, replace(free, call=1e-3, message=1e-4)))
    tensors = sum(len(step.node.args[0]) for step in before.step.ops if step.kind == "start")  # type: ignore[arg-type]
    assert tensors > len(after.collectives), "there are buckets"
    spent = 1e-3 * len(after.collectives) + 1e-4 * len(after.collectives)
    assert after.seconds - before.seconds == pytest.approx(spent)
    assert after.exposed == pytest.approx(spent)


def test_compute_loses_the_share_of_what_is_on_its_way(program: shardc.Program) -> None:
    slow = replace(CPU, start=0.0, inside=replace(CPU.inside, bandwidth=2e8, ring=0.0))
    alone = program.schedule(slow)
    hidden = sum(each.seconds - each.exposed for each in alone.collectives)
    assert hidden > 0.1 * alone.seconds
    steps = [program.schedule(replace(slow, share=share)).seconds for share in (0.0, 0.2, 0.4, 0.8)]
    assert steps[0] == alone.seconds and steps == sorted(set(steps))
    # No more than the share of all that is sent (less where the rank waits for it anyway), nor than if nothing hid.
    sent = sum(each.seconds for each in alone.collectives)
    assert steps[1] - steps[0] <= 0.2 * sent + 1e-9
    assert steps[-1] <= alone.compute_seconds + sent


def test_each_kernel_costs_a_launch() -> None:
    program = stack_program(shardc.ddp("dp"), dp=2)
    before, after = (program.schedule(one) for one in (CPU, replace(CPU, launch=1e-3)))
    assert after.compute_seconds - before.compute_seconds == pytest.approx(1e-3 * len(after.runs))


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_attention_has_a_rate_of_its_own() -> None:
    given = [torch.empty(2, 4, 256, 32) for _ in range(3)]
    program = shardc.compile(Attends(), Mesh(dp=2), shardc.ddp("dp")).lower(*given)
    machine = replace(CPU, memory_bandwidth=1e15)
    whole, half = (program.schedule(replace(machine, attention=share)).compute_seconds for share in (1.0, 0.5))
    assert half == pytest.approx(2 * whole)
    assert program.schedule(machine).compute_seconds == pytest.approx(whole / machine.matmul)


def test_a_calibrated_machine_is_hardware_by_the_name_of_its_file(tmp_path: Path) -> None:
    cost = CostModel(
        flops=5e10, memory_bandwidth=1e10, attention=0.6, launch=2e-5,
        messages=Messages(1e-4, 5e-5, 2e-5, 0.0, 1e9, 0.5),
    )  # fmt: skip
    cost.save(tmp_path / "cost.json")
    found = find(str(tmp_path / "cost.json"))
    assert found == calibrated(cost)
    assert found.compute_seconds(5e10, 0, torch.float32) == pytest.approx(1 + 2e-5)
    assert found.compute_seconds(3e10, 0, torch.float32, attention=True) == pytest.approx(1 + 2e-5)
    assert found.start_seconds(3) == pytest.approx(5e-5 + 3 * 2e-5)
    with pytest.raises(InputError, match="cannot be read"):
        find(str(tmp_path / "other.json"))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_more_than_two_ranks_reduce_in_a_ring(ranks: int) -> None:
    """Its time is its own; that of a gather, of the same bytes, is that of messages."""
    rows = (Measured("all_reduce", 2, 1e-3, 1e8), Measured("all_reduce", 4, 3e-3, 1e9))
    sent = Messages(1e-4, 5e-5, 2e-5, 0.0, 5e8, 0.5)
    program = shardc.compile(
        nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2))), Mesh(dp=ranks), shardc.ddp("dp"),
        loss=F.mse_loss, options=replace(DIRECT, bucket_size=1 << 30),
    ).lower(torch.empty(64, 256), torch.empty(64, 256))  # fmt: skip
    schedule = program.schedule(calibrated(CostModel(kinds=rows, messages=sent)))
    (found,) = [each for each in schedule.collectives if each.wire > 1000]
    in_messages = 1e-4 + found.wire / 5e8
    ring = 1e-3 * (ranks - 1) + found.wire / 1e9
    assert found.seconds == pytest.approx(in_messages if ranks == 2 else ring)
    priced = schedule.hardware.collective_seconds("all_reduce", schedule.mesh, ("dp",), found.wire)
    assert priced == pytest.approx(in_messages + 7e-5 if ranks == 2 else ring + 5e-5)
    gather = schedule.hardware.collective_seconds("all_gather", schedule.mesh, ("dp",), 1 << 20)
    assert gather == pytest.approx(1e-4 + (1 << 20) / 5e8 + 5e-5 + 2e-5 * (ranks - 1))
