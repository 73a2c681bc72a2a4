"""Checks of values are left out of a program, each with a warning that names the user's line."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.utils.import_utils import torch_compilable_check

import shardc
from shardc.errors import CaptureError

Check = Callable[[Tensor], None]


def raises(x: Tensor) -> None:
    if not x.isfinite().all():
        raise ValueError(f"no number in {x}")


def of_source(text: str) -> Check:
    """The function that ``text`` defines, as it stands: pytest writes asserts of test files otherwise."""
    namespace: dict[str, Check] = {}
    exec(compile(text, "model.py", "exec"), namespace)
    return namespace["asserts"]


def calls_assert(x: Tensor) -> None:
    torch._assert(x.isfinite().all(), "no number")


def calls_assert_async(x: Tensor) -> None:
    torch._assert_async(x.isfinite().all())


def calls_assert_async_with_text(x: Tensor) -> None:
    torch._assert_async(x.isfinite().all(), "no number")


def checks_all(x: Tensor) -> None:
    torch._check_tensor_all(x.isfinite(), lambda: "no number")


def checks_all_with(x: Tensor) -> None:
    torch._check_tensor_all_with(ValueError, x.isfinite())


def checks_a_number(x: Tensor) -> None:
    if x.max().item() >= 100 * len(x):
        raise ValueError("too large")


def checks_a_bool(x: Tensor) -> None:
    if not x.isfinite().all().item():
        raise ValueError("no number")


ASSERTS_OF_ITEM = of_source("def asserts(x):\n    assert x.max().item() < 100, 'too large'\n")
ASSERTS = of_source("def asserts(x):\n    assert x.isfinite().all(), 'no number'\n")
CHECKS = [
    raises,
    checks_a_number,
    checks_a_bool,
    ASSERTS,
    ASSERTS_OF_ITEM,
    calls_assert,
    calls_assert_async,
    calls_assert_async_with_text,
    checks_all,
    checks_all_with,
]

TEXT = "raises where values are wrong; the compiled program looks at no values there and goes on"


def warned(check: Check) -> list[str]:
    """What compiling a function that begins with ``check`` warns of; its program computes the rest."""

    def double(x: Tensor) -> Tensor:
        check(x)
        return x * 2

    x = torch.randn(4, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = shardc.compile(double, shardc.Mesh(dp=2), shardc.ddp("dp"), backend="eager")
        torch.testing.assert_close(shardc.Simulation(module)(x, grad=False), x * 2)
    return [str(each.message) for each in caught if issubclass(each.category, shardc.ShardcWarning)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_of_values_is_left_out_with_a_warning(check: Check) -> None:
    code = check.__code__
    assert warned(check) == [f"{code.co_filename}:{code.co_firstlineno + 1} {TEXT}"]


def branches(x: Tensor) -> Tensor:
    return x * 2 if x.max().item() > 0 else x


def keeps_the_number(x: Tensor) -> Tensor:
    largest = x.max().item()
    if largest > 100:
        raise ValueError("too large")
    return x * largest


def checks_a_float(x: Tensor) -> Tensor:
    if bool((x > 100).any()) or float(x.min()) < -100:
        raise ValueError("too large")
    return x


@pytest.mark.parametrize("uses", [branches, keeps_the_number, checks_a_float], ids=lambda uses: uses.__name__)
def test_other_uses_of_numbers_are_refused(uses: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="takes a number out of a tensor"):
        shardc.compile(uses, shardc.Mesh(dp=2), shardc.ddp("dp"), backend="eager").lower(torch.randn(4, 3))


def test_checks_of_transformers_are_left_out() -> None:
    (said,) = warned(lambda x: torch_compilable_check(x.isfinite().all(), "no number"))
    place, _, rest = said.partition(" ")
    assert place.split(":")[0] == inspect.getsourcefile(torch_compilable_check) and rest == TEXT


def test_checks_of_shapes_are_made() -> None:
    def holds(x: Tensor) -> None:
        torch._assert(x.shape[1] == 3, "3 columns")
        torch._check(x.shape[0] == 4)

    assert warned(holds) == []
    with pytest.raises(CaptureError, match="5 columns"):
        warned(lambda x: torch._assert(x.shape[1] == 5, "5 columns"))
