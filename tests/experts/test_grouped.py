"""Experts by grouped products, which run on a GPU in bf16, give what they give one after the other."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import shardc
from shardc.custom_ops import expert_functions, expert_ops
from tests.experts.models import Own, batch, build
from tests.models.alike import relative

ENDS = ([3, 3, 9, 12], [0, 0, 0, 12], [12, 12, 12, 12], [1, 2, 3, 4], [0, 0, 0, 0])


@cache
def body(name: str, dtype: torch.dtype = torch.float32) -> expert_functions.Body:
    plan = shardc.ep("ep", "*experts")
    model = Own(inner=16).to(dtype) if name == "wide" else build(name, dtype)
    module = shardc.compile(model, shardc.Mesh(ep=2), plan, backend="eager")
    (found, *_) = expert_functions.bodies_in(module.lower(**batch()).whole("localize"))
    return expert_functions.body_of(found)


def both(
    name: str, ends: list[int], room: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> list[list[Tensor]]:
    """The results of forward and gradient, one after the other and grouped; what no row filled counts as zero."""
    torch.manual_seed(0)
    x, grad = torch.randn(6, 16, dtype=dtype), torch.randn(6, 16, dtype=dtype)
    take, scale = torch.randint(0, 6, (room,)), torch.rand(room, 1, dtype=dtype)
    params = [torch.randn(4, *shape, dtype=dtype) / 4 for shape in SHAPES.get(name, WIDE)]
    given, it, found = (take, scale, torch.tensor(ends), params), body(name, dtype), []
    assert it.grouped_forward is not None and it.grouped_backward is not None
    for whether in (False, True):
        monkeypatch.setattr(expert_ops, "suits", lambda *_, whether=whether: whether)
        made, *saved = torch.ops.shardc_experts.run(x, *given, 12, True, it.name)
        gradients = torch.ops.shardc_experts.run_gradient(grad, x, *given, saved, 12, True, it.name)
        gradients[1] = gradients[1][: ends[-1]]
        found.append([made, *(one[: ends[-1]] for one in saved), *gradients])
    return found


SHAPES = {"qwen3-moe": [(24, 16), (16, 12)], "own": [(12, 16), (12, 16), (16, 12)]}
WIDE = [(16, 16)] * 3


@pytest.mark.parametrize("room", [12, 40])
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_grouped_is_one_after_the_other(name: str, ends: list[int], room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for one, other in zip(*both(name, ends, room, torch.float32, monkeypatch), strict=True):
        assert relative(other, one, 1e-3) < 1e-5


def test_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    for one, other in zip(*both("wide", ENDS[0], 20, torch.bfloat16, monkeypatch), strict=True):
        assert one.dtype == other.dtype and relative(other.float(), one.float(), 1e-3) < 0.02


def test_bodies_that_do_more_have_no_grouped_form() -> None:
    it = body("gpt-oss")
    assert it.grouped_forward is None and it.grouped_backward is None


@pytest.mark.parametrize("way", ["gather", "send", "bounded"])
def test_training(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_ops, "suits", lambda *_: True)
    bound = {"capacity": 1.5} if way == "bounded" else {}
    model = build("own", torch.float32)
    plan = shardc.fsdp("ep") | shardc.ep("ep", "experts", dispatch=way, **bound)
    sim = shardc.Simulation(shardc.compile(build("own", torch.float32), shardc.Mesh(ep=2), plan, backend="eager"))
    loss = model(**batch())["loss"]
    loss.backward()
    assert relative(sim(**batch())["loss"], loss.detach()) < 1e-5
    sim.backward()
    for name, param in model.named_parameters():
        assert relative(sim.grad(name), param.grad, 1e-3) < 1e-4, name
