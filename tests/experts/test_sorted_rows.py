"""Layers in the manner of torchtitan run with a forward of the user's: their tokens travel; no expert is gathered."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardc
from shardc.custom_ops import expert_functions
from shardc.errors import CaptureError
from tests.experts import sorted_rows
from tests.experts.alike import trains_alike
from tests.experts.models import batch
from tests.experts.sorted_rows import Decoder, MoE, OtherMoE, build, documented
from tests.experts.test_models import WAYS
from tests.models.alike import relative
from tests.models.zoo import in_float64

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


@shardc.experts
def low(rows: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    x, w1, w2, w3 = rows.bfloat16(), w1.bfloat16(), w2.bfloat16(), w3.bfloat16()
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2).to(rows.dtype)


class Low(MoE):
    forward = documented("routed", expert=low)


def test_grouped_products_are_in_bf16() -> None:
    torch.manual_seed(0)
    model = Decoder(MoE, hidden_dim=16)
    for layer in model.layers:
        layer.experts.use_grouped_mm = True
    plan = shardc.fsdp("ep") | shardc.ep("ep", "*.experts")
    ours = copy.deepcopy(model)
    for layer in ours.layers:
        layer.__class__ = Low
    sim = shardc.Simulation(shardc.compile(ours, shardc.Mesh(ep=2), plan, backend="eager"))
    loss = model(**batch())["loss"]
    loss.backward()
    assert relative(sim(**batch())["loss"], loss.detach()) < 1e-3
    sim.backward()
    for name, param in model.named_parameters():
        assert relative(sim.grad(name), param.grad, 1e-3) < 0.03, name
    (name, *_) = expert_functions.bodies_in(sim.state.cache.program_for((), batch()).whole("localize"))
    assert {one.dtype for one in expert_functions.body_of(name).saved} == {torch.bfloat16}


@pytest.mark.parametrize("grouped", [False, True], ids=["loop", "grouped products"])
def test_layers_as_they_are_shipped_are_told_what_to_write(grouped: bool) -> None:
    """With the line of the loop, or of the product that is computed whole on each rank."""
    with in_float64():
        model = Decoder(MoE, hidden_dim=16)
        for layer in model.layers:
            layer.experts.use_grouped_mm = grouped
        plan = shardc.fsdp("ep") | shardc.ep("ep", "*.experts")
        module = shardc.compile(model, shardc.Mesh(ep=2), plan, backend="eager")
        if grouped:
            with pytest.warns(shardc.ShardcWarning, match="grouped_mm") as said:
                module.lower(**batch())
            text = next(str(w.message) for w in said if "grouped_mm" in str(w.message))
        else:
            with pytest.raises(CaptureError) as caught:
                module.lower(**batch())
            text = str(caught.value)
    assert f"{sorted_rows.__file__}:" in text and "write one expert as a function under @shardc.experts" in text
