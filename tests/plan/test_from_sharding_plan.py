"""hyper-parallel's sharding plans as plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardc.errors import PlanError
from shardc.plan import Plan


@dataclass
class TheirPlacement:
    """A placement as hyper-parallel has them: torch's questions, not torch's class."""

    kind: str
    dim: int = 0
    split_factor: int = 1
    reduce_op: str = "sum"

    def is_replicate(self) -> bool:
        return self.kind == "replicate"

    def is_partial(self) -> bool:
        return self.kind == "partial"


@dataclass
class TheirLayout:
    alias_placements: Any


WHOLE, FIRST = TheirPlacement("replicate"), TheirPlacement("shard")

CASES: dict[str, tuple[dict[str, Any], Plan]] = {
    "aliases": (
        {
            "plan": {"mlp.weight": ("None", "tp"), "up.weight": (("tp", "dp"), "None")},
            "input_plan": {"input": ("dp", "None")},
            "output_plan": {"output": ("dp", "tp"), "relu.output": ("dp", "None")},
        },
        Plan(
            params={"mlp.weight": (None, "tp"), "up.weight": (("tp", "dp"), None)},
            inputs=("dp", None),
            outputs=("dp", "tp"),
            activations={"relu:output": ("dp", None)},
            dtensor_outputs=True,
        ),
    ),
    "placements": (
        {"plan": {"w": (Shard(0), Replicate())}, "input_plan": {"relu.input": [(Shard(0), Replicate()), None]}},
        Plan(
            params={"w": (Shard(0), Replicate())},
            activations={"relu:input": [(Shard(0), Replicate()), None]},
            dtensor_outputs=True,
        ),
    ),
    "several inputs, and one by keyword": (
        {"input_plan": {"input": [("dp", "None"), ("None",)], "attn.input": {"x": ("dp", "None"), "mask": ("dp",)}}},
        Plan(
            inputs=[("dp", None), (None,)],
            activations={"attn:input": {"x": ("dp", None), "mask": ("dp",)}},
            dtensor_outputs=True,
        ),
    ),
    "layouts": (
        {
            "plan": {"w": TheirLayout((FIRST, WHOLE)), "v": TheirLayout((("tp", "dp"), "None"))},
            "input_plan": {
                "input": TheirLayout((TheirPlacement("shard", 1, 2), TheirPlacement("partial", 0, 1, "prod")))
            },
        },
        Plan(
            params={"w": (Shard(0), Replicate()), "v": (("tp", "dp"), None)},
            inputs=(_StridedShard(1, split_factor=2), Partial("product")),
            dtensor_outputs=True,
        ),
    ),
    "nothing said": (
        {"input_plan": {"relu.input": None}, "output_plan": {"output": None}, "return_local_tensor": ["relu"]},
        Plan(dtensor_outputs=False),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_plans(case: str) -> None:
    arguments, plan = CASES[case]
    assert set(Plan.from_sharding_plan(**arguments).entries) == set(plan.entries)


def test_errors() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_sharding_plan(input_plan={"relu": ("dp",)})
    assert str(caught.value) == (
        "key 'relu' ends in neither input nor output\n  plan entry: Plan.from_sharding_plan(\"relu\")\n"
        '  fix: write "relu.input" or "relu.output"'
    )
    with pytest.raises(PlanError, match='input_plan is a list, not a dict\n(.|\n)*fix: write {"input": '):
        Plan.from_sharding_plan(input_plan=[("dp", "None")])  # type: ignore[arg-type]
    with pytest.raises(PlanError) as caught:
        Plan.from_sharding_plan(plan={"w": 3})
    assert str(caught.value) == (
        '3 is not a spec\n  plan entry: plan["w"]\n  fix: write ("dp", None), (Shard(0), Replicate()) or "@dp, _"'
    )
