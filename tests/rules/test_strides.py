"""Ops whose rule says that they take any strides give the same wherever in memory their operands lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardc.passes.padded_values import lies_like
from shardc.rules import RULES
from shardc.rules.proof import COARSER, COMPUTED, Sample, close
from shardc.rules.rule import ANY
from tests.rules.samples import samples

aten = torch.ops.aten


# --- the same elements elsewhere in memory


def in_order(x: Tensor, *order: int) -> Tensor:
    """``x``, dense, with its dims in memory in this order, the slowest first."""
    back = [order.index(dim) for dim in range(x.ndim)]
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def cut_out(x: Tensor) -> Tensor:
    """``x`` as every other element of a larger tensor, which has NaN between them."""
    large = torch.zeros([2 * n + 1 for n in x.shape], dtype=x.dtype)
    if x.dtype.is_floating_point or x.dtype.is_complex:
        large.fill_(float("nan"))
    return large[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)].copy_(x)


def behind(x: Tensor) -> Tensor:
    """``x``, contiguous, behind one element of a larger tensor."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


LAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda x: in_order(x, *reversed(range(x.ndim))),
    "channels last": lambda x: in_order(x, 0, *range(2, x.ndim), 1) if x.ndim > 2 else x,
    "matrices transposed": lambda x: in_order(x, *range(x.ndim - 2), x.ndim - 1, x.ndim - 2) if x.ndim > 1 else x,
    "cut out": cut_out,
    "behind another": behind,
}


def tensors_of(sample: Sample) -> list[tuple[Any, Tensor]]:
    """The operands of a call by place: (argument, place in a list or None)."""
    out: list[tuple[Any, Tensor]] = []
    for key, x in [*enumerate(sample.args), *sample.kwargs.items()]:
        if isinstance(x, Tensor):
            out.append(((key, None), x))
        elif isinstance(x, (list, tuple)):
            out += [((key, at), item) for at, item in enumerate(x) if isinstance(item, Tensor)]
    return out


def with_tensor(sample: Sample, place: Any, x: Tensor) -> Sample:
    key, at = place
    args, kwargs = list(sample.args), dict(sample.kwargs)
    held: Any = args if isinstance(key, int) else kwargs
    if at is None:
        held[key] = x
    else:
        held[key] = [x if i == at else item for i, item in enumerate(held[key])]
    return replace(sample, args=tuple(args), kwargs=kwargs)


def variants(sample: Sample) -> Iterator[tuple[str, Sample, Sample]]:
    """(how, the call on contiguous operands, the same call on one operand, or all, that lie otherwise)."""
    operands = tensors_of(sample)
    for how, lay in LAYS.items():
        every = sample
        for number, (place, x) in enumerate(operands):
            made = lay(x)
            if len(operands) > 1 and made.stride() != x.stride():
                yield f"operand {number} {how}", sample, with_tensor(sample, place, made)
            every = with_tensor(every, place, made)
        yield f"all {how}", sample, every
    for number, (place, x) in enumerate(operands):
        for dim in [dim for dim, n in enumerate(x.shape) if n > 1]:
            expanded = x.narrow(dim, 0, 1).expand(x.shape)
            yield (
                f"operand {number} expanded along {dim}",
                with_tensor(sample, place, expanded.contiguous()),
                with_tensor(sample, place, expanded),
            )


def differences(sample: Sample) -> list[str]:
    """Under which lays the results are others, or the op refuses."""
    out = []
    for how, contiguous, other in variants(sample):
        try:
            expected = contiguous.dense()
        except RuntimeError:
            continue  # not of such values
        try:
            made = other.dense()
        except RuntimeError as error:
            out.append(f"{sample}, {how}: {str(error).splitlines()[0]}")
            continue
        for number, (got, want) in enumerate(zip(made, expected, strict=True)):
            if got is None or want is None:
                continue
            tolerance = sample.tolerance or COARSER.get(got.dtype, COMPUTED)
            if got.shape != want.shape or got.dtype != want.dtype or not close(got, want, tolerance):
                out.append(f"{sample}, {how}: result {number} is another")
    return out


REWRITTEN = ("aten.view.default", "aten._unsafe_view")  # on a rank they are a reshape
TAKE_ANY = [op for op, rule in RULES.items() if rule.strides == ANY and op not in REWRITTEN]


@pytest.mark.parametrize("part", range(20))
def test_ops_take_any_strides(part: int) -> None:
    tried = [differences(x) for op in TAKE_ANY[part::20] for x in samples(op) if x.defined and x.device == "cpu"]
    assert [difference for each in tried for difference in each] == []


def test_ops_that_do_not_are_found() -> None:
    """The proof tells: these are not on the list since it found them."""
    for op in ("aten.view_as_complex", "aten.isin", "aten._scaled_dot_product_flash_attention_for_cpu"):
        assert RULES[op].strides != ANY
        assert any(differences(sample) for sample in samples(op))


def laid(shape: list[int], strides: list[int]) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=torch.float16, device="meta")


TRACED = laid([2, 4, 8, 64], [2048, 64, 256, 1])  # [b, h, s, e] of a product [b, s, h e]
OF_ONE = laid([2, 4, 8, 64], [512, 0, 64, 1])  # heads that one head was expanded to


@pytest.mark.parametrize(
    ("x", "traced", "fits"),
    [
        (laid([2, 2, 8, 64], [1024, 64, 128, 1]), TRACED, True),
        (laid([2, 2, 8, 64], [4096, 64, 512, 1]), TRACED, True),  # a part of a fused product
        (laid([2, 2, 8, 64], [1024, 512, 64, 1]), TRACED, False),  # another order
        (laid([2, 1, 8, 64], [512, 512, 1, 8]), TRACED, False),  # kernels want the last dim of stride 1
        (laid([2, 2, 8, 64], [0, 64, 128, 1]), TRACED, False),  # one row for all
        (laid([2, 2, 8, 64], [1096, 64, 137, 1]), TRACED, False),  # rows that no vector begins at
        (laid([2, 2, 8, 64], [1024, 64, 128, 1]), None, False),
        (laid([2, 2, 8, 64], [1024, 512, 64, 1]), None, True),
        (laid([2, 2, 8, 64], [512, 0, 64, 1]), OF_ONE, True),
        (laid([2, 2, 8, 64], [1024, 512, 64, 1]), OF_ONE, True),  # as many copies
    ],
)
def test_what_lies_like_the_trace(x: Tensor, traced: Tensor | None, fits: bool) -> None:
    """A kernel of CUDA that took the traced strides takes those that fit: order, stride 1 and vectors are the same."""
    assert lies_like(x, traced) == fits
