"""Styles of ``parallelize_module`` as plans."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardc.errors import PlanError
from shardc.plan import Plan, tp

CASES: dict[str, tuple[Any, Plan]] = {
    "colwise": ({"a.w1": ColwiseParallel()}, tp("tp", colwise=["a.w1"])),
    "rowwise": ({"layers.*.w2": RowwiseParallel()}, tp("tp", rowwise=["./layers.*.w2"])),
    "colwise, gathered": (
        {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())},
        tp("tp", colwise=["head"]) | Plan(activations={"head:output": {"tp": Replicate()}}),
    ),
    "rowwise, scattered": (
        {"wo": RowwiseParallel(output_layouts=Shard(1))},
        tp("tp", rowwise=["wo"]) | Plan(activations={"wo:output": {"tp": Shard(1)}}),
    ),
    "embedding": (
        {"tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))},
        tp("tp", vocab=["tok"]) | Plan(activations={"tok:output": {"tp": Shard(1)}}),
    ),
    "sequence": (
        {"norm": SequenceParallel(), "drop": SequenceParallel(sequence_dim=0)},
        Plan(
            activations={
                "norm:input": {"tp": Shard(1)},
                "norm:output": {"tp": Shard(1)},
                "drop:input": {"tp": Shard(0)},
                "drop:output": {"tp": Shard(0)},
            }
        ),
    ),
    "prepared": (
        {
            "attn": PrepareModuleInput(
                input_layouts=(Shard(1), None, Shard(1)),
                desired_input_layouts=(Replicate(), None, None),
                input_kwarg_layouts={"mask": Shard(1)},
                desired_input_kwarg_layouts={"mask": Replicate()},
            ),
            "out": PrepareModuleOutput(output_layouts=(None, Shard(2)), desired_output_layouts=(Shard(1), Replicate())),
        },
        Plan(
            activations={
                "attn:input[0]": {"tp": Replicate()},
                "attn:input[mask]": {"tp": Replicate()},
                "out:output[1]": {"tp": Replicate()},
            }
        ),
    ),
    "the root": (
        PrepareModuleInputOutput(
            input_layouts=Shard(0),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(-1),
        ),
        Plan(activations={":input[0]": {"tp": Replicate()}, ":output[0]": {"tp": Shard(-1)}}),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_styles(case: str) -> None:
    styles, plan = CASES[case]
    assert set(Plan.from_styles(styles).entries) == set(plan.entries)


def test_the_axis() -> None:
    styles = {"w1": ColwiseParallel(output_layouts=Replicate())}
    assert Plan.from_styles(styles, axis="x") == tp("x", colwise=["w1"]) | Plan(
        activations={"w1:output": {"x": Replicate()}}
    )


def test_a_model_tells_embeddings_from_linear_modules() -> None:
    model = nn.ModuleDict({"tok": nn.Embedding(10, 8), "pos": nn.Embedding(10, 8), "up": nn.Linear(8, 8)})
    styles = {
        "tok": RowwiseParallel(),
        "pos": ColwiseParallel(),
        "up": RowwiseParallel(input_layouts=Replicate()),
    }
    assert Plan.from_styles(styles, model=model) == tp("tp", rowwise=["up"], vocab=["tok"]) | Plan(
        params={"pos.weight": {"tp": Shard(1)}}
    )


def test_an_unknown_style() -> None:
    class Diagonal(ColwiseParallel):
        pass

    with pytest.raises(PlanError) as caught:
        Plan.from_styles({"w1": Diagonal()})
    assert str(caught.value) == (
        "unknown style Diagonal of 'w1'\n  plan entry: Plan.from_styles({\"w1\": ...})\n"
        "  fix: use the styles of torch.distributed.tensor.parallel, or write layouts with Plan(activations=...)"
    )
