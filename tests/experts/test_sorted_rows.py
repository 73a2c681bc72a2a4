"""Layers in the manner of torchtitan run unchanged: their tokens travel; no expert is gathered."""

from __future__ import annotations

from functools import partial

import pytest

import shardc
from shardc.capture import sorted_experts
from tests.experts.alike import trains_alike
from tests.experts.models import batch
from tests.experts.sorted_rows import GroupedExperts, MoE, OtherMoE, build
from tests.experts.test_models import WAYS

MESHES = ({"ep": 2}, {"ep": 4}, {"dp": 2, "ep": 2})


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_layers(mesh: dict[str, int], way: dict[str, object]) -> None:
    plan = shardc.fsdp(tuple(mesh)) | shardc.ep("ep", "*.experts", **way)
    sim = trains_alike(build, batch(), mesh, plan)
    assert sim.buffer("layers.0.tokens_per_expert").sum() == 2 * 2 * 24


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_experts_in_a_layer_of_other_code(way: dict[str, object]) -> None:
    forms = {form[:2] for form in sorted_experts.other_forms(build(OtherMoE))}
    assert forms == {(GroupedExperts, "forward")} and (MoE, "forward") in {
        form[:2] for form in sorted_experts.other_forms(build())
    }
    mesh = {"dp": 2, "ep": 2}
    plan = shardc.fsdp(tuple(mesh)) | shardc.ep("ep", "*.experts", **way)
    trains_alike(partial(build, OtherMoE), batch(), mesh, plan)
