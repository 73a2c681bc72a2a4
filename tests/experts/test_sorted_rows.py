"""Layers in the manner of torchtitan run unchanged: their tokens travel; no expert is gathered."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardc
from shardc.capture import sorted_experts
from shardc.ir import bodies
from tests.experts.alike import trains_alike
from tests.experts.models import batch
from tests.experts.sorted_rows import Decoder, GroupedExperts, MoE, OtherMoE, build
from tests.experts.test_models import WAYS
from tests.models.alike import relative

MESHES = ({"ep": 2}, {"ep": 4}, {"dp": 2, "ep": 2})


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_layers(mesh: dict[str, int], way: dict[str, object]) -> None:
    plan = shardc.fsdp(tuple(mesh)) | shardc.ep("ep", "*.experts", **way)
    sim = trains_alike(build, batch(), mesh, plan)
    assert sim.buffer("layers.0.tokens_per_expert").sum() == 2 * 2 * 24


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_experts_in_a_layer_of_other_code(way: dict[str, object]) -> None:
    mesh = {"dp": 2, "ep": 2}
    plan = shardc.fsdp(tuple(mesh)) | shardc.ep("ep", "*.experts", **way)
    trains_alike(partial(build, OtherMoE), batch(), mesh, plan)


def test_grouped_products_are_in_bf16() -> None:
    torch.manual_seed(0)
    model = Decoder(hidden_dim=16)
    for layer in model.layers:
        layer.experts.use_grouped_mm = True
    plan = shardc.fsdp("ep") | shardc.ep("ep", "*.experts")
    sim = shardc.Simulation(shardc.compile(copy.deepcopy(model), shardc.Mesh(ep=2), plan, backend="eager"))
    loss = model(**batch())["loss"]
    loss.backward()
    assert relative(sim(**batch())["loss"], loss.detach()) < 1e-3
    sim.backward()
    for name, param in model.named_parameters():
        assert relative(sim.grad(name), param.grad, 1e-3) < 0.03, name
    (name, *_) = bodies.bodies_in(sim.state.program_for((), batch()).whole("localize"))
    assert {one.dtype for one in bodies.body_of(name).saved} == {torch.bfloat16}


class Turned(GroupedExperts):
    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        w1, w2, w3 = self.w1[0], self.w2[0], self.w3[0]
        return (F.silu(x @ w3.transpose(0, 1)) * (x @ w1.transpose(0, 1))) @ w2.transpose(0, 1)


class Clamped(GroupedExperts):
    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        w1, w2, w3 = self.w1[0], self.w2[0], self.w3[0]
        return (F.silu(x @ w1.transpose(0, 1)) * torch.clamp(x @ w3.transpose(0, 1), 0)) @ w2.transpose(0, 1)


def test_code_that_is_another_is_left_as_it_is() -> None:
    def replaced(model: torch.nn.Module) -> set[object]:
        return {kind for kind, *_ in sorted_experts.other_forms(model)}

    assert replaced(build()) == {MoE, GroupedExperts} and replaced(build(OtherMoE)) == {GroupedExperts}
    assert replaced(GroupedExperts(4, 4, 2)) == {GroupedExperts}
    assert replaced(Turned(4, 4, 2)) == replaced(Clamped(4, 4, 2)) == set()
