"""Mixtures of experts equal one device: models as they are shipped, on every mesh, in every way, however routed."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

import shardc
from shardc.errors import PlanError
from tests.experts.alike import trains_alike
from tests.experts.models import MODELS, batch, build, experts_of, route

ATTENTION = {"colwise": ["*.q_proj", "*.k_proj", "*.v_proj"], "rowwise": ["*.o_proj"]}
WAYS = ({"dispatch": "gather"}, {"dispatch": "send"}, {"dispatch": "bounded", "capacity": 4.0}, {})
MESHES = ({"ep": 2}, {"ep": 4}, {"ep": 3}, {"dp": 2, "ep": 2}, {"ep": 2, "tp": 2}, {"dp": 2, "ep": 2, "tp": 2})
ROUTING = ("as they are", "to one", "to few", "equal")


def plan(name: str, mesh: dict[str, int], way: dict[str, object]) -> shardc.Plan:
    data = tuple(axis for axis in mesh if axis != "tp")
    out = shardc.fsdp(data) | shardc.ep("ep", experts_of(name), **way)
    if "tp" in mesh and name not in ("own", "sorted", "deepseek-v3"):
        out |= shardc.tp("tp", **ATTENTION)
    return out


def routed(name: str, how: str) -> nn.Module:
    model = build(name)
    route(model, how)
    return model


@pytest.mark.parametrize("at, name", list(enumerate(MODELS)))
def test_models(at: int, name: str) -> None:
    mesh, way = MESHES[at % len(MESHES)], WAYS[at % len(WAYS)]
    trains_alike(partial(build, name), batch(), mesh, plan(name, mesh, way))


@pytest.mark.parametrize("how", ROUTING[1:])
@pytest.mark.parametrize("way", WAYS[:3])
def test_hostile_routing(how: str, way: dict[str, object]) -> None:
    mesh = {"dp": 2, "ep": 2}
    trains_alike(partial(routed, "own", how), batch(), mesh, plan("own", mesh, way))


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("rows, length", [(3, 5), (3, 1), (5, 1)])
def test_sizes_that_nothing_divides(way: dict[str, object], rows: int, length: int) -> None:
    mesh = {"ep": 3}
    given = batch(rows, length) | {"labels": batch(rows, length)["input_ids"]}
    trains_alike(partial(build, "own"), given, mesh, plan("own", mesh, way))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_in_every_way(name: str) -> None:
    mesh = {"dp": 2, "ep": 2}
    for way in WAYS[:3]:
        trains_alike(partial(build, name), batch(), mesh, plan(name, mesh, way))


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_on_every_mesh_in_every_way(name: str, mesh: dict[str, int]) -> None:
    for way in WAYS:
        trains_alike(partial(build, name), batch(), mesh, plan(name, mesh, way))


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ROUTING[1:])
def test_models_however_routed(name: str, how: str) -> None:
    for mesh in MESHES:
        for way in WAYS[:3]:
            trains_alike(partial(routed, name, how), batch(), mesh, plan(name, mesh, way))


def test_gradients_in_one_bucket_with_what_goes_on() -> None:
    """The terms of the tokens' gradients are reduced together with those of parameters, which only leave."""
    mesh, way = {"ep": 2, "tp": 2}, {"dispatch": "gather"}
    trains_alike(partial(build, "qwen3-moe"), batch(), mesh, plan("qwen3-moe", mesh, way))


def test_one_token() -> None:
    """Which every rank takes, and computes for its own experts."""
    one = batch(1, 1)
    given = one | {"labels": one["input_ids"]}
    trains_alike(partial(build, "own"), given, {"ep": 2}, shardc.ep("ep", "experts") | shardc.Plan(inputs="_, _"))


@pytest.mark.parametrize("name", [pytest.param("qwen3-moe", marks=pytest.mark.slow), "gpt-oss"])
def test_plans_that_models_carry(name: str) -> None:
    """With the model's own tensor parallelism, in which experts are split between the ranks of its axis, too."""
    both = shardc.Plan.from_hf(build(name), "tp", ep="ep")
    sim = trains_alike(partial(build, name), batch(), {"ep": 2, "tp": 2}, both)
    lines = sim.state.cache.program_for((), batch()).text("localize").splitlines()
    assert any(".run(" in line for line in lines)
    weight = next(line for line in lines if ".mlp.experts.down_proj: " in line)
    assert f": f64[{2 if name == 'qwen3-moe' else 4}," in weight


def test_experts_over_a_part_of_an_axis() -> None:
    trains_alike(partial(build, "own"), batch(), {"ep": 4}, shardc.ep("ep:1x2", "experts"))


@pytest.mark.parametrize("entry", ["_@ep, _, _@tp", "_, _@tp, _", "_@ep, (2 _@tp), _"])
def test_a_plan_that_splits_each_expert_is_told_what_remains(entry: str) -> None:
    plan = shardc.ep("ep", "*.experts") | shardc.Plan(params={"*.experts.gate_up_proj": entry})
    module = shardc.compile(build("qwen3-moe"), shardc.Mesh(ep=2, tp=2), plan, backend="eager")
    with pytest.raises(PlanError, match="splits each of them over tp") as caught:
        module.lower(**batch())
    error, over = caught.value, "tp" if entry.startswith("_,") else "(ep,tp)"
    assert entry in str(error.plan_entry) and "moe.py:" in str(error.source)
    assert f"'model.layers.0.mlp.experts.gate_up_proj': '_@{over}, _, _'" in str(error.fix)
    assert "shardc.ep(...)" in str(error.fix)


def test_what_the_fix_says_trains() -> None:
    layouts = {f"*.experts.{name}": "_@(ep,tp), _, _" for name in ("gate_up_proj", "down_proj")}
    plan = shardc.ep("ep", "*.experts") | shardc.Plan(params=layouts)
    trains_alike(partial(build, "qwen3-moe"), batch(), {"ep": 2, "tp": 2}, plan)
