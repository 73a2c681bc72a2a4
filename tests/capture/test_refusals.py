"""What cannot be traced is refused in shardc's words, with the user's line and what to write in its place."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

import shardc
from shardc import Mesh, fsdp
from shardc.errors import CaptureError, InputError, ShardcError


class Net(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.run = nn.Linear(4, 4), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


@dataclasses.dataclass
class Out:
    y: Tensor


def asks_inference(net: Any, x: Tensor) -> Tensor:
    return x * (2 if net.linear(x).is_inference() else 3)


def asks_inference_by_function(net: Any, x: Tensor) -> Tensor:
    return x * (2 if torch.is_inference(net.linear(x)) else 3)


def reads_grad_fn(net: Any, x: Tensor) -> Tensor:
    h = net.linear(x)
    return x * (2 if h.grad_fn is None else 3)


def applies_checkpoint(net: Any, x: Tensor) -> Any:
    return CheckpointFunction.apply(net.linear, True, net.linear(x))  # type: ignore[no-untyped-call]


def looks_up_sparse(net: Any, x: Tensor) -> Tensor:
    return F.embedding(torch.arange(4), net.linear.weight, sparse=True) + x


def sums_bags_sparse(net: Any, x: Tensor) -> Tensor:
    return F.embedding_bag(torch.arange(4).view(4, 1), net.linear.weight, sparse=True) + x


# What forward does -> (what the error says, a part of the line that it names, what it advises).
REFUSED: dict[Callable[[Any, Tensor], Any], tuple[str, str, str]] = {
    asks_inference: ("one of inference mode", "is_inference", "h.requires_grad"),
    asks_inference_by_function: ("one of inference mode", "is_inference", "h.requires_grad"),
    reads_grad_fn: ("reads the grad_fn", "grad_fn", "h.requires_grad"),
    applies_checkpoint: ("CheckpointFunction.apply", "apply", "use_reentrant=False"),
    looks_up_sparse: ("sparse tensor", "F.embedding", "leave sparse=True out"),
    sums_bags_sparse: ("sparse tensor", "F.embedding_bag", "leave sparse=True out"),
}


def lower(model: nn.Module, *args: Any) -> None:
    shardc.compile(model, Mesh(dp=2), fsdp("dp"), backend="eager").lower(*args)


def line_of(error: ShardcError) -> str:
    assert error.source is not None
    file, _, line = error.source.rpartition(":")
    assert file == __file__
    with open(file) as source:
        return source.readlines()[int(line) - 1]


@pytest.mark.parametrize("run", REFUSED, ids=lambda run: run.__name__)
def test_lines_of_forward(run: Callable[[Any, Tensor], Any]) -> None:
    what, line, fix = REFUSED[run]
    with pytest.raises(CaptureError, match=what) as caught:
        lower(Net(run), torch.ones(4, 4))
    assert line in line_of(caught.value) and fix in (caught.value.fix or "")


@pytest.mark.parametrize("wraps", [lambda y: Out(y), lambda y: {"out": Out(y), "y": y}], ids=["alone", "inside"])
def test_a_class_that_pytrees_do_not_know(wraps: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="returns a Out, a class") as caught:
        lower(Net(lambda net, x: wraps(net.linear(x))), torch.ones(4, 4))
    assert "def forward" in line_of(caught.value) and "register_dataclass(Out)" in (caught.value.fix or "")


def test_no_tensor() -> None:
    with pytest.raises(CaptureError, match="Net returns no tensor") as caught:
        lower(Net(lambda net, x: 3), torch.ones(4, 4))
    assert "def forward" in line_of(caught.value)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (nn.Sequential(nn.LazyLinear(4)), InputError),
        (nn.Embedding(8, 4, sparse=True), CaptureError),
        (nn.EmbeddingBag(8, 4, sparse=True), CaptureError),
    ],
    ids=["lazy", "embedding", "bag"],
)
def test_modules_without_a_line_of_the_users(model: nn.Module, kind: type[ShardcError]) -> None:
    """The error names the line that calls shardc."""
    with pytest.raises(kind) as caught:
        lower(model, torch.arange(4).view(2, 2))
    assert inspect.getsourcelines(lower)[0][1] == line_of(caught.value) and caught.value.fix
