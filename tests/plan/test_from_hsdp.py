"""The arguments of hyper-parallel's hsdp(): meanings, units, defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardc
from shardc.errors import PlanError
from shardc.plan import Plan, fsdp, hsdp_plan, parse_plan, precision, resolve_params

PLANS: list[tuple[dict[str, Any], Plan]] = [
    ({}, fsdp("dp", 1, 64 * 1024) | Plan(reduce="sum", overlap=False, bucket_size=0)),
    (
        {"shard_size": 2, "threshold": 1, "optimizer_level": "level3", "comm_async": True},
        fsdp("dp", 3, 1024, 2) | Plan(reduce="sum", bucket_size=0),
    ),
    (
        {"optimizer_level": "level2", "grad_scale": 0.25, "reduce_dtype": torch.float32, "axis": ("a", "b")},
        fsdp(("a", "b"), 2, 64 * 1024)
        | precision(reduce=torch.float32)
        | Plan(reduce="sum", grad_scale=0.25, overlap=False, bucket_size=0),
    ),
    (
        {"enable_grad_accumulation": True, "comm_async": True, "comm_fusion": True},
        fsdp("dp", 1, 64 * 1024) | Plan(reduce="sum", accumulate=True, bucket_size=-1),
    ),
    (
        {"comm_async": True, "comm_fusion": True, "bucket_size": 8, "threshold": 0},
        fsdp("dp", 1) | Plan(reduce="sum", bucket_size=8192),
    ),
]


@pytest.mark.parametrize("at", range(len(PLANS)))
def test_meanings(at: int) -> None:
    arguments, plan = PLANS[at]
    assert hsdp_plan(**arguments) == plan


CELLS: dict[str, dict[str, Any]] = {
    "1": {"optimizer_level": "level3", "threshold": 0},
    "2": {"shard_size": 1, "reduce_dtype": torch.float64},
}


def test_cells_of_their_own() -> None:
    """A call for one cell has hyper-parallel's defaults; its level, sizes and dtype are by glob."""
    plan = hsdp_plan(2, 0, "level2", reduce_dtype=torch.float32, comm_async=True, axis="dp", cells=CELLS)
    assert plan == (
        fsdp(
            "dp", 2, 0, 2, overrides={"1.*": -1, "2.*": 1}, levels={"1.*": 3, "2.*": 1},
            thresholds={"1.*": 0, "2.*": 64 * 1024},
        )
        | precision(reduce=torch.float32)
        | precision(modules="1")
        | precision(reduce=torch.float64, modules="2")
        | Plan(reduce="sum", bucket_size=0)
    )  # fmt: skip
    assert Plan.from_json(plan.to_json()) == plan and parse_plan(repr(plan)) == plan
    params = {f"{at}.weight": ((8, 8), 4) for at in range(3)}
    found = resolve_params(plan, shardc.Mesh(dp=4), params)
    assert {name: (str(p.storage), p.level) for name, p in found.items()} == {
        "0.weight": ("[8@dp:2x2,8]", 2), "1.weight": ("[8@dp,8]", 3), "2.weight": ("[8,8]", 1),
    }  # fmt: skip
    small = hsdp_plan(cells={"0": {"threshold": 0}, "[01]": {"threshold": 1}})  # of 256 B, and the last match wins
    assert {str(p.storage) for p in resolve_params(small, shardc.Mesh(dp=4), params).values()} == {"[8,8]"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"shard_size": 0}, "shard_size=0 is not positive or -1"),
    ({"shard_size": 2.0}, "shard_size=2.0 is not positive or -1"),
    ({"threshold": -1}, "threshold=-1 is not a number of KB, 0 or more"),
    ({"optimizer_level": "level4"}, "optimizer_level='level4' is not one of ['level1', 'level2', 'level3']"),
    ({"optimizer_level": 3}, "optimizer_level=3 is not one of ['level1', 'level2', 'level3']"),
    ({"enable_grad_accumulation": 1}, "enable_grad_accumulation=1 is not True or False"),
    ({"grad_scale": 1}, "grad_scale=1 is not a float, such as 0.5"),
    ({"reduce_dtype": "float32"}, "reduce_dtype='float32' is not a torch.dtype"),
    ({"comm_async": None}, "comm_async=None is not True or False"),
    ({"comm_fusion": 0}, "comm_fusion=0 is not True or False"),
    ({"bucket_size": -2}, "bucket_size=-2 is not a number of KB, or -1"),
    ({"use_eager_hook": "yes"}, "use_eager_hook='yes' is not True or False"),
    ({"optimizer_level": ["level1"]}, "optimizer_level=['level1'] is not one of ['level1', 'level2', 'level3']"),
    ({"cells": ["up"]}, """cells=['up'] is not a table such as {"layers.*": {"threshold": 0}}"""),
]


@pytest.mark.parametrize("at", range(len(REFUSED)))
def test_refused(at: int) -> None:
    arguments, text = REFUSED[at]
    with pytest.raises(PlanError) as caught:
        hsdp_plan(**arguments)
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    assert str(caught.value) == f"{text}\n  plan entry: hsdp_plan({shown})"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("level3", "cells['up']='level3' is not a table of arguments of hsdp()"),
        ({"level": 3}, "cells['up']='level' is not one of ['shard_size', 'threshold', 'optimizer_level', 'reduce_d"),
        ({"grad_scale": 0.5}, "cells['up']='grad_scale' is not one of"),
        ({"threshold": "64"}, "threshold='64' is not a number of KB"),
        ({"optimizer_level": "level0"}, "optimizer_level='level0' is not one of"),
    ],
)
def test_refused_of_cells(said: Any, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        hsdp_plan(cells={"up": said})
    assert str(caught.value).startswith(text)


def test_threshold_is_in_kilobytes() -> None:
    params = {"below": ((1023,), 1), "at": ((512, 2), 1)}
    found = resolve_params(hsdp_plan(threshold=1), shardc.Mesh(dp=4), params)
    assert [str(plan.storage) for plan in found.values()] == ["[1023]", "[512@dp,2]"]


def module(plan: Plan) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    return model, shardc.compile(model, shardc.Mesh(dp=4), plan, backend="eager")


@pytest.mark.parametrize("shard_size", [-1, 2, 1])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sum_by_default_and_a_mean_divided_once(reduce: str, shard_size: int) -> None:
    """Each rank's own loss is a mean over its rows; gradients are the sum, or the mean, of the ranks' gradients."""
    model, sharded = module(hsdp_plan(shard_size, threshold=0) | (Plan(reduce="mean") if reduce == "mean" else Plan()))
    sim = shardc.Simulation(sharded)
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    out = sim(x)
    tangents = [2 * (o - t) / t.numel() for o, t in zip(out.chunk(4), y.chunk(4), strict=True)]
    sim.backward(torch.cat(tangents))
    losses = torch.stack([F.mse_loss(model(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)])
    getattr(losses, reduce)().backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(sim.grad(name), param.grad, rtol=1e-12, atol=1e-14)


def test_fused_or_one_by_one() -> None:
    counts, waits = {}, {}
    for fused in (False, True):
        for overlapped in (False, True):
            plan = hsdp_plan(threshold=0, comm_fusion=fused, comm_async=overlapped)
            backward = module(plan)[1].lower(torch.empty(8, 8, dtype=torch.float64)).backward
            assert backward is not None
            nodes = [n for n in backward.graph.nodes if n.op == "call_function"]
            starts = [n for n in nodes if "reduce" in str(n.target)]
            counts[fused] = len(starts)
            ahead = [n for n in starts if not any("wait" in str(after.target) for after in _behind(nodes, n))]
            waits[fused, overlapped] = len(ahead)
    assert counts == {False: 4, True: 1}
    assert waits[False, False] == waits[True, False] == 0
    assert waits[False, True] > 0


def _behind(nodes: list[Any], start: Any) -> list[Any]:
    """What follows ``start``, but for the items of its results, as far as the first op that is neither."""
    at = nodes.index(start) + 1
    while "getitem" in str(nodes[at].target):
        at += 1
    return nodes[at : at + 1]
