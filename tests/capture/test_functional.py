"""What is traced in the place of a function of torch gives what the function gives, and the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map

import shardc
from shardc.capture.replacements import other_forms


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ids(*shape: int) -> Tensor:
    return torch.randint(4, shape)


LABELS = torch.tensor([[0, 3, -1, 1, 2], [-1, 0, 0, 0, 0], [4, 3, 2, 1, 0], [2, -1, -1, -1, -1]])
CASES: dict[str, tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "bags, sum": ("embedding_bag", lambda: (ids(3, 5), draw(6, 2)), {"mode": "sum"}),
    "bags, mean": ("embedding_bag", lambda: (ids(3, 5), draw(6, 2)), {}),
    "bags, max": ("embedding_bag", lambda: (ids(3, 5), draw(6, 2)), {"mode": "max"}),
    "bags, padded sum": ("embedding_bag", lambda: (ids(3, 5), draw(6, 2)), {"mode": "sum", "padding_idx": 1}),
    "bags, padded mean": ("embedding_bag", lambda: (ids(9, 2), draw(4, 2)), {"padding_idx": -3}),
    "bags, padded max": ("embedding_bag", lambda: (ids(9, 2), draw(4, 2)), {"mode": "max", "padding_idx": 1}),
    "bags, weighted": (
        "embedding_bag",
        lambda: (ids(3, 5), draw(6, 2)),
        {"mode": "sum", "per_sample_weights": draw(3, 5)},
    ),
    "bags, offsets": ("embedding_bag", lambda: (ids(8), draw(6, 2), torch.tensor([0, 3, 3])), {}),
    "bags, by frequency": ("embedding_bag", lambda: (ids(3, 5), draw(6, 2)), {"scale_grad_by_freq": True}),
    **{
        f"bags of any sizes, {mode}, padding {pad}": (
            "embedding_bag",
            lambda: (ids(9), draw(6, 2), torch.tensor([0, 3, 3, 8, 9])),
            {"mode": mode, "padding_idx": pad},
        )
        for mode in ("sum", "mean", "max")
        for pad in (None, 1, -4)
    },
    "bags up to the last offset": (
        "embedding_bag",
        lambda: (ids(9), draw(6, 2), torch.tensor([0, 3, 9])),
        {"mode": "sum", "include_last_offset": True, "per_sample_weights": draw(9)},
    ),
    "gaussian": ("gaussian_nll_loss", lambda: (draw(4, 5), draw(4, 5), draw(4, 5).square()), {"full": True}),
    "gaussian, clamped": ("gaussian_nll_loss", lambda: (draw(4, 5), draw(4, 5), draw(4, 1).square()), {"eps": 0.5}),
    "gaussian, one a row": ("gaussian_nll_loss", lambda: (draw(4, 5), draw(4, 5), draw(4).square()), {}),
    "gaussian, number": ("gaussian_nll_loss", lambda: (draw(4, 5), draw(4, 5), 0.5), {"reduction": "sum"}),
    "labels": ("multilabel_margin_loss", lambda: (draw(4, 5), LABELS), {}),
    "labels, apart": ("multilabel_margin_loss", lambda: (draw(4, 5), LABELS), {"reduction": "none"}),
    "labels, one number": ("multilabel_margin_loss", lambda: (draw(), LABELS[0, 0]), {}),
    "labels, one row": ("multilabel_margin_loss", lambda: (draw(5), LABELS[0]), {"reduction": "sum"}),
}


@pytest.mark.parametrize("case", CASES)
def test_other_form(case: str) -> None:
    name, make, kwargs = CASES[case]
    args = make()
    own = getattr(F, name)
    with other_forms():
        assert getattr(F, name) is not own
        found = results(getattr(F, name), args, kwargs)
    assert getattr(F, name) is own
    for ours, theirs in zip(found, results(own, args, kwargs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def results(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What ``function`` gives, and the gradients of its floating-point arguments."""
    fresh = [x.clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in args]
    named = {k: x.clone().requires_grad_() if isinstance(x, Tensor) else x for k, x in kwargs.items()}
    out = function(*fresh, **named)
    leaves = [x for x in [*fresh, *named.values()] if isinstance(x, Tensor) and x.requires_grad]
    weights = torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("bad", [{"mode": "mean", "per_sample_weights": draw(3, 5)}, {"mode": "median"}])
def test_a_wrong_call_is_refused(bad: dict[str, Any]) -> None:
    with other_forms(), pytest.raises((ValueError, NotImplementedError)):
        F.embedding_bag(ids(3, 5), draw(6, 2), **bad)


def test_wrong_sizes_are_refused() -> None:
    with other_forms(), pytest.raises(ValueError, match="target"):
        F.multilabel_margin_loss(draw(4, 5), LABELS[:, :1])


def test_torch_compile_afterwards() -> None:
    """What Dynamo learns of torch during a capture, it learns of torch's own functions."""
    get_torch_obj_rule_map.cache_clear()
    args = draw(6, 2), ids(5), torch.tensor([0, 2])
    shardc.compile(torch.nn.Linear(2, 3).double(), shardc.Mesh(dp=2), shardc.ddp("dp")).lower(draw(4, 2))
    bags = torch.compile(lambda *args: torch.embedding_bag(*args)[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(bags(*args), torch.embedding_bag(*args)[0])
