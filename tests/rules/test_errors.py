"""What is wrong with an op, as the user hears it: the op, the line that calls it and what to do."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import CaptureError, RuleError, ShardcError
from shardc.rules import register_rule


@torch.library.custom_op("shardc_test::shifted", mutates_args=())
def shifted(x: Tensor, by: Tensor) -> Tensor:
    return x + by


shifted.register_fake(lambda x, by: torch.empty_like(x))
shifted.register_autograd(lambda ctx, grad: (grad, grad.sum(0)))


@torch.library.custom_op("shardc_test::without_gradient", mutates_args=())
def without_gradient(x: Tensor) -> Tensor:
    return x * 2


without_gradient.register_fake(torch.empty_like)


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), self.linear.bias)


def selected(x: Tensor, bias: Tensor) -> Tensor:
    return x[x > 0].sum()


def places(x: Tensor, bias: Tensor) -> Tensor:
    return torch.nonzero(x).double()


def custom(x: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.shardc_test.shifted(x, bias)


def one_way(x: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.shardc_test.without_gradient(x)


def lowered(function: Callable[[Tensor, Tensor], Tensor], strict: bool = False) -> shardc.Program:
    plan = shardc.fsdp("dp", threshold=0)
    module = shardc.compile(Net(function), shardc.Mesh(dp=2), plan, options=shardc.Options(strict=strict))
    return module.lower(torch.empty(4, 8))


def line_of(function: Callable[..., Tensor]) -> str:
    """The line of a function's only statement."""
    return f"{__file__}:{inspect.getsourcelines(function)[1] + 1}"


def heard(error: type[ShardcError], function: Callable[[Tensor, Tensor], Tensor], strict: bool = False) -> str:
    with pytest.raises(error) as found:
        lowered(function, strict)
    return str(found.value)


@pytest.mark.parametrize("function", [selected, places])
def test_a_shape_that_depends_on_data(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert heard(CaptureError, function) == (
        "Net selects elements by a mask, x[mask], or asks where it holds, nonzero(); how many there are depends on "
        f"values\n  source: {line_of(function)}\n"
        "  fix: keep the shape: torch.where(mask, x, 0), and a mean as (x * mask).sum() / mask.sum()"
    )


def test_a_custom_op_without_a_rule() -> None:
    what = "no rule for shardc_test.shifted.default (shifted): computed whole on every rank, 128 bytes gathered"
    assert heard(RuleError, custom, strict=True) == (
        f"{what}\n  source: {line_of(custom)}\n  fix: shardc.register_rule(op, ...) or strict=False"
    )
    with pytest.warns(shardc.ShardcWarning) as said:
        lowered(custom)
    assert [str(w.message) for w in said if issubclass(w.category, shardc.ShardcWarning)] == [
        f"{what}\n  source: {line_of(custom)}"
    ]


def test_a_custom_op_without_a_gradient() -> None:
    assert heard(CaptureError, one_way).startswith(
        "shardc_test.without_gradient.default, which Net calls, has no gradient\n"
    )


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        (
            "i j, k -> i j k",
            "the rule of shardc_test.shifted.default has 3 dims (i j k) for a tensor of shape [4, 8]",
            "name a factor for every dim, or write ... for any number of leading dims",
        ),
        (
            "i j, i -> i j",
            "the rule of shardc_test.shifted.default gives operand 1 the shape [4], it is [8]",
            "make the rule's factors multiply up to the op's shapes",
        ),
        (
            "i j -> i j",
            "the rule of shardc_test.shifted.default is for 1 operands, the call has 2",
            "separate the operands, and the results, by commas, one for each tensor",
        ),
    ],
)
def test_a_rule_that_does_not_fit(text: str, what: str, fix: str) -> None:
    register_rule("shardc_test::shifted", text)
    try:
        assert heard(RuleError, custom) == f"{what}\n  source: {line_of(custom)}\n  fix: {fix}"
    finally:
        register_rule("shardc_test::shifted", "i j, j -> i j")
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardc.ShardcWarning)
        lowered(custom, strict=True)
