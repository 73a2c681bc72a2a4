"""``Plan(prefetch=...)``: the gathers of listed modules start before a module computes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardc
from shardc.errors import PlanError
from shardc.plan import Plan, parse_plan
from tests.models.alike import relative

X = torch.randn(8, 16, dtype=torch.float64)
PLAN = shardc.fsdp("dp")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(5))).double()


def compiled(plan: Plan, flight: int = 0, **options: Any) -> Any:
    options = {"bucket_size": 0, "max_in_flight": flight, **options}
    return shardc.compile(
        model(), shardc.Mesh(dp=2), plan, loss=F.mse_loss, backend="eager", options=shardc.Options(**options)
    )


def started(program: Any, stage: str, before: str) -> set[str]:
    """The layers whose gathers have started when the product of ``before`` runs."""
    lines = program.text(stage).splitlines()
    at = next(at for at, line in enumerate(lines) if re.match(rf"\s+%(d\.)?{before}\.mm", line))
    return {m[1] for line in lines[:at] if (m := re.match(r"\s+%(\d)\.weight.*= _c10d_functional.all_gather", line))}


def test_what_is_listed_has_started() -> None:
    plan = PLAN | Plan(prefetch={"1": ["3", "4"], "4": ["1"]})
    with_it, without = (compiled(said, 1 << 20 if said is plan else 0).lower(X, X) for said in (plan, PLAN))
    assert started(without, "schedule", "1") == {"0", "1", "2"}
    tight = compiled(plan, 2 * 16 * 16 * 8).lower(X, X)  # two of them in flight
    for program in (with_it, tight):
        assert started(program, "schedule", "1") >= {"0", "1", "3", "4"}
        assert "1" in started(program, "schedule.backward", "4")
    assert "1" not in started(without, "schedule.backward", "4")


def test_buckets_casts_kept_parts_and_host() -> None:
    for more in (
        shardc.precision(param=torch.bfloat16),
        shardc.offload("*"),
        shardc.fsdp("dp", reshard_after_forward=2),
    ):
        mesh = shardc.Mesh(dp=4)
        options = shardc.Options(max_in_flight=16 * 16 * 8 * 2, p2p_collectives=True, bucket_size=1)
        plan = PLAN | more | Plan(prefetch={"0": ["3"], "4": ["1"]})
        module = shardc.compile(model(), mesh, plan, loss=F.mse_loss, backend="eager", options=options)
        program = module.lower(X, X)
        for stage, before, layer in (("schedule", "0", "3"), ("schedule.backward", "4", "1")):
            lines = program.text(stage).splitlines()
            at = next(at for at, line in enumerate(lines) if re.match(rf"\s+%(d\.)?{before}\.mm", line))
            assert any(re.match(rf"\s+%{layer}\.weight.*all_gather", line) for line in lines[:at]), (more, stage)


def test_values_are_the_same() -> None:
    source = model()
    sim = shardc.Simulation(compiled(PLAN | Plan(prefetch={"0": ["4", "2"], "4": ["0"]}), -1))
    expected = F.mse_loss(source(X), X)
    expected.backward()
    assert relative(sim(X, X), expected.detach()) < 1e-9
    sim.backward()
    for name, param in source.named_parameters():
        assert relative(sim.grad(name), param.grad) < 1e-9, name


def test_it_is_read_back(tmp_path: Any) -> None:
    plan = Plan(prefetch={"layers.0": ["layers.1", "layers.2"], "a": ["b"]}, reduce="sum")
    text = 'Plan(prefetch={"layers.0": ["layers.1", "layers.2"], "a": ["b"]}, reduce="sum")'
    assert repr(plan) == text and parse_plan(text) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "parameters of layers.1, layers.2" in plan.describe()
    assert plan | Plan(prefetch={"a": ["c"]}) != plan == plan | Plan(prefetch={"a": ["b"]}) | plan


@pytest.mark.parametrize(
    ("prefetch", "options", "said"),
    [
        ({"9": ["1"]}, {}, r"there is no module '9'\n  plan entry: prefetch\[\"9\"\] = \[\"1\"\]"),
        ({"1": ["x"]}, {}, "there is no module 'x'"),
        ({"0": ["1", "2"]}, {"flight": 2048}, "4096 B of gathers would be in flight when '0' computes"),
        ({"0": ["2"]}, {"overlap": False}, "cannot start before '0' computes"),
    ],
)
def test_what_cannot_be(prefetch: Any, options: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        compiled(PLAN | Plan(prefetch=prefetch), **options).lower(X, X).text("schedule")


@pytest.mark.parametrize("given", [3, {"0": "1"}, {"0": [1]}])
def test_what_is_no_list(given: Any) -> None:
    with pytest.raises(PlanError):
        Plan(prefetch=given)
