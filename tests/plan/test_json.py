"""Plan files: exact round trips, and each error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardc.errors import PlanError
from shardc.plan import Plan, fsdp, hsdp, parse_plan, precision, tp

EVERYTHING = (
    hsdp(shard=("dp", "cp"), level=2, threshold=64)
    | tp("tp", colwise=["*.up"], rowwise=["*.down"], vocab=["tok"])
    | precision(torch.bfloat16, reduce=torch.float32, buffers=torch.float16, full_precision_eval=True)
    | Plan(
        params={
            "a": (("tp", "dp"), None),
            "b": "(3 _@tp), _",
            "c": (Partial("max"), Partial(), Shard(-1)),
            "d": {"tp": Shard(0)},
        },
        inputs=[None, {"mask": (_StridedShard(0, split_factor=2), Replicate())}],
        outputs="...",
        activations={"norm": ["~, _", None, ("dp",)], "attn.input": {"mask": ()}},
        reduce="sum",
        grad_scale=0.25,
        dtensor_outputs=True,
    )
)
KEPT = fsdp("a", reshard_after_forward=8) | hsdp("dp", "rep", reshard_after_forward={"*": 4, "embed.*": -1})


@pytest.mark.parametrize(
    "plan", [Plan(), fsdp("dp"), fsdp("dp", shard_size=2, overrides={"*.bias": 1}), KEPT, EVERYTHING]
)
def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and hash(loaded) == hash(plan) and repr(loaded) == repr(plan) == repr(parse_plan(repr(plan)))


def test_the_file(tmp_path: Path) -> None:
    plan = fsdp("dp") | Plan(params={"w": (("tp", "dp"), None)}, inputs={"x": (Shard(0),)}, activations={"m": "~, ~"})
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == {
        "shardc_plan": 1,
        "calls": [
            {"fsdp": {"axis": "dp", "level": 3}},
            {
                "Plan": {
                    "params": {"w": [["tp", "dp"], None]},
                    "inputs": {"x": {"placements": ["Shard(0)"]}},
                    "activations": {"m": "~, ~"},
                }
            },
        ],
    }


ERRORS: dict[str, tuple[Any, str]] = {
    "not JSON": (
        "{",
        "plan.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n"
        "  source: plan.json:1",
    ),
    "not a plan": ([], "plan.json is not a plan file\n  fix: write it with plan.save(path)"),
    "another version": (
        {"shardc_plan": 7},
        "plan.json is a plan of version 7; this shardc reads 1\n  fix: save the plan again with this shardc",
    ),
    "unknown key": (
        {"shardc_plan": 1, "call": []},
        "unknown key 'call' in a plan file\n  source: plan.json\n  fix: did you mean 'calls'?",
    ),
    "unknown constructor": (
        {"shardc_plan": 1, "calls": [{"fsdq": {}}]},
        "unknown key 'fsdq' in a plan\n  source: plan.json\n  fix: did you mean 'fsdp'?",
    ),
    "unknown argument": (
        {"shardc_plan": 1, "calls": [{"fsdp": {"axis": "dp", "treshold": 3}}]},
        "unknown key 'treshold' in fsdp\n  source: plan.json\n  fix: did you mean 'threshold' or 'thresholds'?",
    ),
    "unknown argument, none near": (
        {"shardc_plan": 1, "calls": [{"ddp": {"axis": "dp", "zzz": 3}}]},
        "unknown key 'zzz' in ddp\n  source: plan.json\n  fix: use one of ['axis']",
    ),
    "missing argument": (
        {"shardc_plan": 1, "calls": [{"tp": {}}]},
        "plan.json: tp() missing 1 required positional argument: 'axis'",
    ),
    "calls is no list": ({"shardc_plan": 1, "calls": 3}, "plan.json: calls is 3, not a list"),
    "a call is no dict": ({"shardc_plan": 1, "calls": [3]}, "plan.json: a call is 3, not a dict"),
    "specs are no dict": (
        {"shardc_plan": 1, "calls": [{"Plan": {"params": 3}}]},
        "plan.json: params is 3, not a dict",
    ),
    "unknown key in a spec": (
        {"shardc_plan": 1, "calls": [{"Plan": {"params": {"w": {"placement": []}}}}]},
        "unknown key 'placement' in a spec\n  source: plan.json\n  fix: did you mean 'placements'?",
    ),
    "not a placement": (
        {"shardc_plan": 1, "calls": [{"Plan": {"params": {"w": {"placements": ["Shard()"]}}}}]},
        "'Shard()' is not a placement\n  source: plan.json\n  fix: write Shard(0), Replicate() or Partial(\"sum\")",
    ),
    "not a dtype": (
        {"shardc_plan": 1, "calls": [{"precision": {"param": "bf16"}}]},
        "param is 'bf16', not a dtype\n  plan entry: precision(...)\n  fix: write torch.bfloat16",
    ),
    "not a spec": (
        {"shardc_plan": 1, "calls": [{"Plan": {"params": {"w": "dp"}}}]},
        "'dp' is not a layout\n  plan entry: params[\"w\"] = 'dp'\n  fix: write it like \"@dp\"",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, text = ERRORS[case]
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(PlanError) as caught:
        Plan.load("plan.json")
    assert str(caught.value) == text
