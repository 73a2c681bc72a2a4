"""Custom ops that write to their arguments: their meaning, on views too, and the layouts that rules give them."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import CaptureError, RuleError
from shardc.ir.parse import parse
from shardc.ir.text import dump
from tests.higher_order.on_ranks import equal_one_device
from tests.models.alike import trains_alike
from tests.ranks import run_ranks

MESHES: tuple[tuple[dict[str, int], str], ...] = (({"dp": 2}, "dp"), ({"dp": 3}, "dp"), ({"a": 2, "b": 2}, "a"))


@torch.library.custom_op("shardc_in_place::relu_", mutates_args={"x"})
def relu_(x: Tensor) -> None:
    x.relu_()


@torch.library.custom_op("shardc_in_place::halve_", mutates_args={"x"})
def halve_(x: Tensor) -> None:
    """Has no rule, unlike the others."""
    x.mul_(0.5)


@torch.library.custom_op("shardc_in_place::scale_", mutates_args={"x", "sums"})
def scale_(x: Tensor, sums: Tensor, by: Tensor, factor: float = 2.0) -> Tensor:
    before = x.clone()
    x.mul_(by).mul_(factor)
    sums.add_(1.0)
    return before - x


@torch.library.custom_op("shardc_in_place::each_", mutates_args={"xs", "other"})
def each_(xs: list[Tensor], other: Tensor | None = None) -> None:
    for x in xs if other is None else (*xs, other):
        x.tanh_()


LIBRARY = torch.library.Library("shardc_in_place", "FRAGMENT")
LIBRARY.define(
    "add_(Tensor(a!) self, Tensor other) -> Tensor(a!)", tags=tuple(filter(None, [getattr(torch.Tag, "inplace", None)]))
)
LIBRARY.impl("add_", lambda x, other: x.add_(other), "CompositeExplicitAutograd")
torch.library.register_fake("shardc_in_place::add_", lambda x, other: x, lib=LIBRARY)
scale_.register_fake(lambda x, sums, by, factor=2.0: torch.empty_like(x))


@pytest.fixture(autouse=True)
def _rules() -> None:
    with_rules()


def with_rules() -> None:
    shardc.register_rule("shardc_in_place::relu_", "... -> ...")
    shardc.register_rule("shardc_in_place::add_", "i j, i j -> i j")
    shardc.register_rule("shardc_in_place::scale_", "n d, d, d -> n d, n d, d", reduction={"n": "whole"})


class Scaled(torch.autograd.Function):
    """A kernel in place with its gradient, as libraries of kernels have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, sums = x.clone(), torch.zeros_like(weight)
        scale_(out, sums, weight)
        ctx.save_for_backward(x, weight)
        return out + sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = grad.clone()
        relu_(dx)
        relu_(dx.neg_())
        return (grad * 2 * weight, (grad * 2 * x).sum(0) + 0 * dx.sum(0))


class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(4, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(self.first(x), self.weight)


class Views(nn.Module):
    """Writes through views of one tensor, to a buffer and to lists."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.register_buffer("counts", torch.zeros(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        with torch.no_grad():
            relu_(y[:, 1])
            relu_(y[:, 2:])
            halve_(y.view(-1))
            relu_(y.t())
            left, right = y[:, :2], y[:, 2:]
            each_([left, right])
            each_([y[:2]], y[2:4])
            if hasattr(torch.Tag, "inplace"):  # before torch 2.13 such ops cannot be traced
                torch.ops.shardc_in_place.add_(y.t(), y.t().clone()).mul_(2)
            gate = torch.ones(12, 6, dtype=x.dtype)
            moved = scale_(gate, self.counts, self.counts + 1)
        return self.first(y), moved * gate


@pytest.mark.parametrize(("mesh", "axis"), MESHES)
@pytest.mark.parametrize("net", [Kernel, Views])
def test_trains_as_on_one_device(net: type[nn.Module], mesh: dict[str, int], axis: str) -> None:
    torch.manual_seed(0)
    trains_alike(net(), (torch.randn(12, 4),), mesh, shardc.fsdp(axis, threshold=0))


def lowered(net: nn.Module) -> shardc.Program:
    with torch.no_grad():
        module = shardc.compile(net, shardc.Mesh(dp=2), shardc.Plan(inputs=[("dp", None)]), backend="eager")
        program = module.lower(torch.randn(12, 4))
    assert isinstance(program, shardc.Program)
    return program


class Calls(nn.Module):
    def __init__(self, *ops: Any) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        for op in self.ops:
            op(y)
        return y


def test_a_rule_keeps_the_layout() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardc.ShardcWarning)
        text = lowered(Calls(relu_)).text("propagate")
    assert "%relu_: f32[12@dp,4] = shardc_functional.relu_.shardc_in_place(%mul)" in text


def test_without_a_rule_it_is_whole_with_a_warning_of_op_line_and_bytes() -> None:
    what = r"no rule for shardc_in_place.halve_.default \(halve_\): .*whole on every rank, 192 bytes"
    with pytest.warns(shardc.ShardcWarning, match=rf"{what}(.|\n)*source: .*test_in_place_ops.py:\d+"):
        text = lowered(Calls(halve_)).text("propagate")
    assert "%halve_: f32[12,4] = shardc_functional.halve_.shardc_in_place(%mul as [12,4])" in text


def test_text_and_parse() -> None:
    for net in (Calls(relu_), Views()):
        text = lowered(net).text("localize")
        gm = parse(text)
        assert dump(gm, shardc.Mesh(dp=2)) == text


def both(y: Tensor) -> None:
    each_([y[:2], y[1:3]])


def test_arguments_that_share_elements_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"each_.*share memory(.|\n)*source: .*test_in_place_ops.py:\d+(.|\n)*clone"):
        lowered(Calls(both))


def test_a_rule_that_does_not_fit_the_signature() -> None:
    shardc.register_rule("shardc_in_place::relu_", "i j, j -> i j")
    with pytest.raises(RuleError, match=r"relu_(.|\n)*source: .*test_in_place_ops.py:\d+"):
        lowered(Calls(relu_))
    shardc.register_rule("shardc_in_place::relu_", "i -> i")
    with pytest.raises(RuleError, match=r"relu_(.|\n)*source: .*test_in_place_ops.py:\d+"):
        lowered(Calls(relu_))


def steps(found: bool) -> None:
    with_rules()
    equal_one_device((Kernel,), (torch.randn(12, 4, dtype=torch.float64),), ("eager", "inductor"), found)


def test_on_two_ranks_and_from_the_store(tmp_path: Path) -> None:
    run_ranks(2, partial(steps, False), programs=tmp_path)
    run_ranks(2, partial(steps, True), programs=tmp_path)
