"""What is traced in the place of a function of torch gives what the function gives, and the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._subclasses.fake_tensor import FakeTensorMode

import shardc
from shardc.capture.replacements import instance_norm, traceable_functions
from shardc.errors import CaptureError


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
        for pad in (None, 1, -4, -1)
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
    with traceable_functions():
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
    with traceable_functions(), pytest.raises((ValueError, NotImplementedError)):
        F.embedding_bag(ids(3, 5), draw(6, 2), **bad)


def test_wrong_sizes_are_refused() -> None:
    with traceable_functions(), pytest.raises(ValueError, match="target"):
        F.multilabel_margin_loss(draw(4, 5), LABELS[:, :1])


def test_torch_compile_afterwards() -> None:
    """What Dynamo learns of torch during a capture, it learns of torch's own functions."""
    get_torch_obj_rule_map.cache_clear()
    args = draw(6, 2), ids(5), torch.tensor([0, 2])
    shardc.compile(torch.nn.Linear(2, 3).double(), shardc.Mesh(dp=2), shardc.ddp("dp")).lower(draw(4, 2))
    bags = torch.compile(lambda *args: torch.embedding_bag(*args)[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(bags(*args), torch.embedding_bag(*args)[0])


COUNTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "counts": lambda x, ids: torch.bincount(ids, minlength=9),
    "of a method": lambda x, ids: ids.to(torch.int32).bincount(minlength=9),
    "weighted": lambda x, ids: torch.bincount(ids, x[:, 0], minlength=9),
    "weighted by float32": lambda x, ids: torch.bincount(ids, weights=x[:, 0].float(), minlength=9),
    "histogram": lambda x, ids: torch.histc(x, 5, -2.0, 2.0),
    "histogram between extremes": lambda x, ids: torch.histc(x, 5),
}


class Counts(nn.Module):
    def __init__(self, count: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), count

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.count(x, ids)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_over_a_split_batch(name: str, mesh: dict[str, int]) -> None:
    model, inputs = Counts(COUNTS[name]).double(), (draw(12, 4), torch.arange(12) % 7)
    sim = shardc.Simulation(shardc.compile(model, shardc.Mesh(mesh), shardc.fsdp("dp"), backend="eager"))
    ours, theirs = sim(*inputs, grad=False)[1], model(*inputs)[1]
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6 if theirs.dtype == torch.float32 else 1e-9, atol=0)
    if "ist" not in name:
        with pytest.raises((IndexError, RuntimeError)):
            sim(inputs[0], inputs[1] + 3, grad=False)


@pytest.mark.parametrize(
    ("count", "match"),
    [
        (lambda x, ids: torch.bincount(ids), r"bincount(.|\n)*test_functional.py:\d+(.|\n)*minlength=n"),
        (lambda x, ids: torch.unique(ids), r"unique values(.|\n)*test_functional.py:\d+(.|\n)*minlength=n"),
        (lambda x, ids: ids.unique_consecutive(), r"unique values(.|\n)*test_functional.py:\d+"),
    ],
)
def test_counts_without_a_bound_are_refused(count: Callable[[Tensor, Tensor], Tensor], match: str) -> None:
    module = shardc.compile(Counts(count).double(), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    with pytest.raises(CaptureError, match=match):
        module.lower(draw(12, 4), ids(12))


@pytest.fixture
def autocast_of_cuda() -> Iterator[None]:
    """Autocast for CUDA, which `torch.autocast` leaves off on a machine without it."""
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", dtype)


@pytest.mark.usefixtures("autocast_of_cuda")
def test_an_instance_norm_keeps_its_dtype_under_autocast() -> None:
    """A group norm would be computed, and returned, in float32."""
    with FakeTensorMode():
        x, weight = torch.empty(2, 4, 5, device="cuda", dtype=torch.bfloat16), torch.empty(4, device="cuda")
        out = instance_norm(x, weight, weight, None, None, True, 0.1, 1e-5, True)
        assert out.dtype == torch.instance_norm(x, weight, weight, None, None, True, 0.1, 1e-5, True).dtype
        assert torch.group_norm(x, 4, weight, weight).dtype != out.dtype
