"""Ops that take functions, and custom ops that write to their arguments, are refused with their line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import shardc
from shardc.errors import CaptureError


@torch.library.custom_op("shardc_tests::relu_", mutates_args={"x"})
def relu_(x: Tensor) -> None:
    x.relu_()


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def flex(x: Tensor) -> Tensor:
    return flex_attention(x, x, x)


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))


def writes(x: Tensor) -> Tensor:
    y = x * 1
    relu_(y)
    return y


@pytest.mark.parametrize(
    ("function", "what", "fix"),
    [
        (flex, "the higher-order op flex_attention has no sharding rule", "scaled_dot_product_attention"),
        (branches, "the higher-order op cond has no sharding rule", "torch.where"),
        (writes, "shardc_tests.relu_.*, which writes to an argument, has no sharding rule", "returns its result"),
    ],
)
def test_is_refused_with_its_line(function: Callable[[Tensor], Tensor], what: str, fix: str) -> None:
    module = shardc.compile(Net(function), shardc.Mesh(dp=2), shardc.Plan(inputs=[("dp", None, None, None)]))
    with pytest.raises(CaptureError, match=rf"{what}(.|\n)*source: .*test_higher_order.py:\d+(.|\n)*fix: (.|\n)*{fix}"):
        module.lower(torch.randn(2, 2, 16, 16))
