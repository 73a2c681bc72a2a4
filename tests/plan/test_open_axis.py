"""Entries that leave their axis to the mesh, and ``reshard_after_forward`` as FSDP2 means it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.errors import PlanError
from shardc.plan import Plan, ddp, fsdp, hsdp, parse_plan


@pytest.mark.parametrize(
    "plan, named", [(fsdp(), fsdp("data")), (ddp(), ddp("data")), (fsdp(level=2), fsdp("data", 2))]
)
def test_the_only_axis(plan: Plan, named: Plan) -> None:
    assert plan.on(shardc.Mesh(data=4)) == named
    assert named.on(shardc.Mesh(data=4, tp=2)) == named
    assert parse_plan(str(plan)) == plan == Plan.from_json(plan.to_json())


@pytest.mark.parametrize("plan", [None, fsdp(), fsdp("data")])
def test_compile(plan: Plan | None) -> None:
    module = shardc.compile(nn.Linear(8, 4), shardc.Mesh(data=2), plan)
    assert "all_gather(%weight, axis=data)" in module.shardc.lower(torch.empty(4, 8)).text()


@pytest.mark.parametrize("plan", [None, fsdp(), ddp()])
def test_a_mesh_of_several_axes(plan: Plan | None) -> None:
    with pytest.raises(PlanError, match=r"\(\) takes the mesh's only axis, and the mesh dp=2 tp=2 has 2(.|\n)*'dp'"):
        shardc.compile(nn.Linear(8, 4), shardc.Mesh(dp=2, tp=2), plan)


def test_of_one_axis_the_later_entry_holds() -> None:
    mesh = shardc.Mesh(dp=2)
    assert (fsdp() | ddp()).on(mesh) == ddp("dp") == (fsdp("dp") | ddp()).on(mesh)
    assert (fsdp("dp") | fsdp(level=2)).on(mesh) == fsdp("dp", 2)


def test_a_search_beside_an_open_axis() -> None:
    x = torch.empty(8, 8, device="meta")
    found = shardc.find_plan(nn.Linear(8, 8), shardc.Mesh(data=2), x, plan=fsdp(), memory="1 GB")
    assert "data" in found.plan.axes


@pytest.mark.parametrize(
    "given, plan",
    [
        (True, fsdp("dp", 3)),
        (False, fsdp("dp", 2)),
        ({"head.*": False}, fsdp("dp", 3, levels={"head.*": 2})),
        ({"*": 4, "head.*": False}, fsdp("dp", 3, levels={"head.*": 2}, reshard_after_forward=4)),
        ({"*": 4, "head.*": True}, fsdp("dp", levels={"head.*": 3}, reshard_after_forward={"*": 4, "head.*": -1})),
    ],
)
def test_reshard_after_forward(given: Any, plan: Plan) -> None:
    assert fsdp("dp", reshard_after_forward=given) == plan
    wanted = hsdp("dp", "rep") if given is True else hsdp("dp", "rep", 2)
    assert not isinstance(given, bool) or hsdp("dp", "rep", reshard_after_forward=given) == wanted


@pytest.mark.parametrize(
    "given, text",
    [
        ({"level": 1, "reshard_after_forward": True}, "reshard_after_forward=True is level 3, and level is 1"),
        ({"reshard_after_forward": 1}, "is 1, not an integer of 2 or more"),
        ({"reshard_after_forward": "no"}, "is 'no', not a table"),
        ({"reshard_after_forward": {"a": 0.5}}, "is 0.5, not True or False or an integer"),
    ],
)
def test_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        fsdp("dp", **given)
