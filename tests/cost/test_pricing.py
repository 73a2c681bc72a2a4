"""One price of a step of a reshard, whether layouts are chosen by a cost model or by hardware whose links differ."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from itertools import combinations

import pytest
import torch
from torch import nn

import shardc
from shardc.cost import hardware
from shardc.cost.hardware import A100, CPU, H100, Hardware, calibrated, price, route
from shardc.cost.model import CostModel, Measured, Messages, Pricing
from shardc.cost.redistribute import seconds, steps
from shardc.ir.comm_volume import KINDS
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes.options import Options
from tests.layouts import every_layout

MESH = Mesh(dp=4, tp=8)  # tp inside a node of eight, dp across nodes
MODEL = CostModel(kinds=tuple(Measured(kind, 4, 1e-5, 1e10) for kind in ("all_gather", "all_to_all")))
MEASURED = calibrated(CostModel(messages=Messages(1e-4, 2e-5, 3e-6, 1e-6, 1e9, 0.5), launch=1e-6))
ALL = pytest.mark.parametrize("cost", [CostModel(), MODEL, H100, hardware.CPU, MEASURED])


def groups(mesh: Mesh) -> list[tuple[str, ...]]:
    whole = [axes for n in (1, 2) for axes in combinations(mesh.axes, n)]
    return [*whole, ("tp:1x2",), ("tp:2x4",), ("dp", "tp:1x2")]


def test_a_cost_model_knows_how_many_ranks_a_group_has() -> None:
    for kind in KINDS.values():
        for axes, ranks in ((("dp",), 4), (("tp",), 8), (("dp", "tp"), 32), (("tp:1x2",), 2), ((), 1)):
            assert MODEL.collective_seconds(kind, MESH, axes, 1e6) == MODEL.best_seconds(kind, ranks, 1e6)


def test_hardware_knows_the_links_of_a_group() -> None:
    for kind in KINDS.values():
        for axes in groups(MESH):
            expected = price(H100, kind, route(MESH, axes, H100.node), 10**6).seconds
            assert H100.collective_seconds(kind, MESH, axes, 10**6) == expected
    # What starts a collective by its own core pays for that too: for a message to each other rank.
    assert MEASURED.collective_seconds("all_gather", MESH, ("tp",), 0) == pytest.approx(1e-4 + 7e-6 + 2e-5 + 7 * 3e-6)
    assert H100.collective_seconds("all_gather", Mesh(dp=1), ("dp",), 0) == 0.0


@ALL
def test_nothing_is_below_the_bound(cost: Pricing) -> None:
    for kind in KINDS.values():
        for mesh in (MESH, Mesh(dp=16, tp=4), Mesh(dp=2, tp=64)):
            for axes in groups(mesh):
                for wire in (0, 10**4, 10**9):
                    assert cost.least_seconds(wire) <= cost.collective_seconds(kind, mesh, axes, wire)


def test_compute_is_priced_in_its_dtype() -> None:
    flops = 1e12
    half, single = (H100.compute_seconds(flops, 0, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert half < single == H100.compute_seconds(flops, 0)
    assert H100.compute_seconds(flops, 0, torch.bfloat16, attention=True) == pytest.approx(half * 2)
    assert H100.copy_seconds(1) == H100.kernel
    assert MODEL.compute_seconds(flops, 0, torch.bfloat16, attention=True) == MODEL.compute_seconds(flops, 0)


@ALL
def test_a_reshard_costs_what_its_steps_cost(cost: Pricing) -> None:
    layouts = every_layout(Mesh(a=2, b=4), (16, 16), (4, 4))
    pairs = random.Random(0).sample([(src, dst) for src in layouts for dst in layouts if src != dst], 60)
    for src, dst in pairs:
        total = 0.0
        for step in steps(src, dst, 4, cost):
            moved = step.wire_bytes(4)
            collective = cost.collective_seconds(step.kind, src.mesh, step.axes, moved)
            total += collective if step.kind in KINDS.values() else cost.copy_seconds(8 * step.dst.local_numel)
        assert seconds(src, dst, 4, cost) == pytest.approx(total, rel=1e-12)


def test_links_decide_on_the_steps() -> None:
    """A gather over both axes at once has all network cards of a node at its disposal; one over dp alone has one."""
    src, dst = Layout.parse("[4096@(dp,tp),4096]", MESH), Layout.parse("[4096,4096]", MESH)
    ways = [[(step.kind, step.axes) for step in steps(src, dst, 4, cost)] for cost in (CostModel(), H100)]
    assert ways == [[("all_gather", ("dp",)), ("all_gather", ("tp",))], [("all_gather", ("dp", "tp"))]]


def test_buckets_hide_the_latency_of_the_links_between_nodes() -> None:
    assert Options(cost=H100).bucket_bytes() == int(20 * (6.6e-6 + 2.7e-6) * 50e9 * 0.8)
    assert Options().bucket_bytes() == 8 << 20
    messages = CostModel(messages=Messages(1e-4, 2e-5, 3e-6, 1e-6, 1e9, 0.5))
    assert Options(cost=messages).bucket_bytes() == int(20 * (1e-4 + 2e-5 + 3e-6) * 1e9)
    assert Options(cost=messages, p2p_collectives=False).bucket_bytes() == 8 << 20


def test_buckets_on_gpus_are_sized_by_the_links() -> None:
    """By the cost if it describes GPUs, else by H100; a size in the plan or in the options goes first."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    plan, sized = shardc.fsdp("dp"), shardc.fsdp("dp") | shardc.Plan(bucket_size=5)
    assert [Options().with_plan_settings(plan, device).bucket_size for device in (gpu, cpu)] == [H100, None]
    assert Options(cost=A100).with_plan_settings(plan, cpu).bucket_size == A100
    assert Options(cost=CPU).with_plan_settings(plan, cpu).bucket_size is None
    assert Options(bucket_size=H100).with_plan_settings(sized, gpu).bucket_size == 5
    assert Options(bucket_size="1 MiB").with_plan_settings(sized, gpu).bucket_bytes() == 1 << 20
    assert Options(bucket_size=H100).in_flight_bytes() == 80e9 / 64


def test_hardware_travels_without_its_hash() -> None:
    assert hash(H100) == hash(hardware.find("h100"))
    again = pickle.loads(pickle.dumps(H100))
    assert again == H100 and isinstance(again, Hardware) and "_hash" not in vars(again)


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", sorted(hardware.KNOWN))
def test_float32_products_are_priced_by_the_setting_of_torch(name: str) -> None:
    described = hardware.find(name)
    high = described.at("high")
    flops = 1e12
    for dtype, attention in ((torch.bfloat16, False), (torch.float64, False), (torch.float32, True)):
        assert high.compute_seconds(flops, 1, dtype, attention) == described.compute_seconds(flops, 1, dtype, attention)
    ratio = described.compute_seconds(flops, 1) / high.compute_seconds(flops, 1)
    assert ratio == pytest.approx(1.0 if described.is_host else described.tf32 / dict(described.flops)[torch.float32])
    assert high.at("highest") == described and described.at("medium").peak(torch.float32) == high.peak(torch.float32)


def test_a_program_is_priced_at_the_precision_that_it_was_compiled_under(precision: None) -> None:
    model, x = nn.Sequential(nn.Linear(4096, 4096)), torch.empty(4096, 4096, device="meta")
    times = {}
    for setting in ("highest", "high"):
        torch.set_float32_matmul_precision(setting)
        program = shardc.compile(model.to("meta"), shardc.Mesh(dp=2), shardc.fsdp("dp")).lower(x)
        torch.set_float32_matmul_precision("highest")
        schedule = program.schedule("h100")
        times[setting] = sum(run.seconds for run in schedule.runs if run.kernel.flops)
        assert schedule.hardware.precision == setting
    assert times["highest"] / times["high"] == pytest.approx(494.7 / 67, rel=0.01)
