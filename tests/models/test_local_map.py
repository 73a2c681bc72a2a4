"""Regions that communicate by themselves: their results and gradients are those of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import PlanError, RuleError
from tests.models.alike import trains_alike

WIDTH, BATCH = 8, 8


def column_then_row(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return shardc.local.all_reduce(torch.tanh(x @ up.t()) @ down.t(), "tp")


def scattered(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gathered = shardc.local.all_gather(x, "tp", dim=1)
    return shardc.local.reduce_scatter(torch.tanh(gathered @ up.t()) @ down.t(), "tp", dim=1)


def pending(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.tanh(x @ up.t()) @ down.t()


def own_columns(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Everything whole: each rank computes a block of columns, by its index, and gathers the rest."""
    y = torch.tanh(x @ up.t()) @ down.t()
    width = y.shape[1] // shardc.local.size("tp")
    here = shardc.local.index("tp") * width + torch.arange(width)
    return shardc.local.all_gather(y.index_select(1, here), "tp", dim=1)


def exchanged(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Rows become columns and back, by all-to-all."""
    y = shardc.local.all_to_all(x, "tp", split=1, join=0)
    y = shardc.local.all_to_all(y * y, "tp", split=0, join=1)
    return torch.tanh(y @ up.t()) @ down.t()


SPLIT = ("@tp, _", "_, @tp")  # the features between the two products
REGIONS = {
    "all-reduce": (column_then_row, ("@dp, _", *SPLIT), "@dp, _"),
    "gather and scatter": (scattered, ("@dp, @tp", *SPLIT), "@dp, @tp"),
    "pending sum": (pending, ("@dp, _", *SPLIT), "@dp, _{sum:tp}"),
    "index": (own_columns, ("@dp, _", "_, _", "_, _"), "@dp, _"),
    "whole batch": (own_columns, ("_, _", "_, _", "_, _"), "_, _"),
    "all-to-all": (exchanged, ("@tp, _", "_, _", "_, _"), "@tp, _"),
}


class Net(nn.Module):
    def __init__(self, region: object) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH, 16) / 3)
        self.region, self.last = region, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.region(F.gelu(self.last(x)), self.up, self.down)
        return x + self.last(made[0] if isinstance(made, tuple) else made)


@pytest.mark.parametrize("name", REGIONS)
def test_equals_one_device(name: str) -> None:
    function, ins, outs = REGIONS[name]
    region = shardc.local_map(function, in_layouts=ins, out_layouts=outs)
    plan = shardc.fsdp("dp", threshold=0) | shardc.Plan(params={"up": "@(tp,dp), _", "down": "@dp, @tp"})
    trains_alike(Net(region), (torch.randn(BATCH, WIDTH),), {"dp": 2, "tp": 2}, plan)


def test_several_results_some_without_a_gradient() -> None:
    def top(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x.argmax(1)

    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.region = shardc.local_map(top, in_layouts="@dp, _", out_layouts=("@dp, _", "@dp"))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, at = self.region(self.linear(x))
            return y, (y * F.one_hot(at, WIDTH)).sum(1)

    trains_alike(Top(), (torch.randn(BATCH, WIDTH),), {"dp": 2}, shardc.fsdp("dp", threshold=0))


def lowered(function: object, ins: object, outs: object) -> shardc.Program:
    model = Net(shardc.local_map(function, in_layouts=ins, out_layouts=outs))  # type: ignore[arg-type]
    module = shardc.compile(model, shardc.Mesh(dp=2, tp=2), shardc.ddp("dp"))
    return module.lower(torch.empty(BATCH, WIDTH))


MISTAKES = {
    "a shard of another size": (
        lambda x, up, down: torch.tanh(x @ up.t()) @ down.t(), ("@dp, _", "_, _", "_, _"), "@dp, @tp", RuleError,
        "result 0 is [4, 8] on a rank; of the whole [8, 8] a shard at [8@dp,8@tp] is [4, 4]",
        "return this rank's shard, or change out_layouts[0] = '@dp, @tp'",
    ),
    "shards that do not fit together": (
        lambda x, up, down: torch.tanh(x @ up.t()) @ down.t(), ("@dp, @tp", "_, _", "_, _"), "@dp, _", RuleError,
        "it fails on shards of shapes [4, 4], [16, 8], [8, 16]: ",
        "make it work on one rank's shards of its in_layouts as it does on whole tensors",
    ),
    "an axis that is not there": (
        lambda x, up, down: x, ("@pp, _", "_, _", "_, _"), "@dp, _", PlanError,
        "unknown mesh axis 'pp'; the mesh is dp=2 tp=2", "use one of ['dp', 'tp']",
    ),
    "results without a layout": (
        lambda x, up, down: (x, x), ("_, _",) * 3, ("_, _",), RuleError,
        "it returns 2 tensors and has 1 out_layouts", "give one layout for each tensor that it returns",
    ),
    "a pending argument": (
        lambda x, up, down: x, ("_, _{sum:tp}", "_, _", "_, _"), "_, _", RuleError,
        "in_layouts[0] is [8,8]{sum:tp}, with a pending reduction",
        "take the argument whole, or split; the reduction is then done before the region",
    ),
    "a pending maximum": (
        lambda x, up, down: x, ("_, _",) * 3, "_, _{max:tp}", RuleError,
        "out_layouts[0] is [8,8]{max:tp}, and only a sum may be left pending",
        "do the reduction in the function, with shardc.local",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    function, ins, outs, kind, said, fix = MISTAKES[name]
    with pytest.raises(kind) as error:
        lowered(function, ins, outs)
    assert said in error.value.what
    assert error.value.fix == fix
    assert __file__ in (error.value.source or error.value.plan_entry)


def test_under_plain_torch_compile() -> None:
    region = shardc.local_map(lambda x, w: torch.tanh(x @ w.t()), in_layouts=("_, _", "_, _"), out_layouts="_, _")

    def gradients(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3).t().requires_grad_()
        return list(torch.autograd.grad(function(x, weight).square().sum(), [x, weight]))

    compiled = torch.compile(lambda x, w: region(x, w), backend="aot_eager")
    for mine, other in zip(gradients(compiled), gradients(region), strict=True):
        torch.testing.assert_close(mine, other)
