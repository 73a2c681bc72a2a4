"""A kind of entry from outside: a class says all about it, and it compiles, prints and is saved as any other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardc
from shardc.errors import PlanError
from shardc.ir.mesh import Mesh
from shardc.plan import ParamPlan, Plan, fsdp, parse_plan, tp
from shardc.plan.entries import Entry
from shardc.plan.match import matching
from shardc.plan.placed import Placed


@dataclass(frozen=True)
class Whole(Entry):
    """The parameters that ``glob`` matches are stored whole, whatever entries before it say."""

    glob: str

    def store(self, stored: ParamPlan, param: Placed, view: Mesh | None) -> ParamPlan:
        if not matching(self.glob, param.names):
            return stored
        return replace(stored, storage=param.layout, padded=param.layout.shape, storage_cause=str(self))


def whole(glob: str) -> Plan:
    return Plan.of([Whole(glob)])


PLAN = fsdp("dp") | whole("*.bias") | whole("*.bias") | tp("tp", colwise=["0"])
TEXT = 'fsdp("dp", level=3) | Whole(glob="*.bias") | tp("tp", colwise=["0"])'


def test_it_compiles() -> None:
    module = shardc.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), Mesh(dp=2, tp=2), PLAN)
    program = module.lower(torch.ones(4, 4))
    inputs = [line.strip() for line in program.text("seed").splitlines() if line.strip().startswith("param")]
    assert inputs == ["param %0.weight: f32[8@(tp,dp),4]", "param %0.bias: f32[8@tp]"]
    assert program.schedule().table()


def test_it_prints() -> None:
    assert repr(PLAN) == TEXT and parse_plan(TEXT, {"Whole": whole}) == PLAN
    assert (
        f"\n{PLAN.describe()}\n"
        == """
what          of              where
fsdp level 3  inputs, params  storage over dp
Whole                         glob="*.bias"
tp colwise    0               over tp
"""
    )


def test_it_is_saved_and_read_back(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", {"Whole": whole}) == PLAN
    with pytest.raises(PlanError, match="unknown key 'Whole' in a plan"):
        Plan.load(tmp_path / "plan.json")
