"""What cannot be traced is refused in shardc's words, with the user's line and what to write in its place."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.bias import causal_lower_right
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


def applies_checkpoint(net: Any, x: Tensor) -> Any:
    return CheckpointFunction.apply(net.linear, True, net.linear(x))  # type: ignore[no-untyped-call]


def looks_up_sparse(net: Any, x: Tensor) -> Tensor:
    return F.embedding(torch.arange(4), net.linear.weight, sparse=True) + x


def sums_bags_sparse(net: Any, x: Tensor) -> Tensor:
    return F.embedding_bag(torch.arange(4).view(4, 1), net.linear.weight, sparse=True) + x


def goes_backward(net: Any, x: Tensor) -> Any:
    net.linear(x).sum().backward()
    return net.linear(x)


def goes_backward_by_function(net: Any, x: Tensor) -> Any:
    torch.autograd.backward([net.linear(x).sum()])
    return net.linear(x)


def sets_a_gradient(net: Any, x: Tensor) -> Any:
    net.linear.weight.grad = torch.ones(4, 4)
    return net.linear(x)


def asks_for_a_gradient(net: Any, x: Tensor) -> Any:
    return net.linear(x) * (2 if net.linear.weight.grad is None else 3)


def hooks_a_parameter(net: Any, x: Tensor) -> Any:
    net.linear.weight.register_hook(lambda grad: grad * 2)
    return net.linear(x)


def hooks_an_accumulation(net: Any, x: Tensor) -> Any:
    net.linear.weight.register_post_accumulate_grad_hook(lambda param: None)
    return net.linear(x)


def retains_a_gradient(net: Any, x: Tensor) -> Any:
    h = net.linear(x)
    h.retain_grad()
    return h * 2


def freezes(net: Any, x: Tensor) -> Any:
    net.linear.weight.requires_grad_(False)
    return net.linear(x)


def asks_the_time(net: Any, x: Tensor) -> Any:
    return net.linear(x) * time.time()


def draws_by_numpy(net: Any, x: Tensor) -> Any:
    return net.linear(x) * float(np.random.default_rng(0).random())


def compares(net: Any, x: Tensor) -> Any:
    return net.linear(x) * (2 if torch.equal(x, x * 2) else 3)


def reduces(net: Any, x: Tensor) -> Any:
    return funcol.all_reduce(net.linear(x), "sum", "0")


def takes_a_causal_bias(net: Any, x: Tensor) -> Tensor:
    bias = causal_lower_right(4, 4)
    return nn.functional.scaled_dot_product_attention(x, x, net.linear(x), attn_mask=bias)


def scans_a_count(net: Any, x: Tensor) -> Tensor:
    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (carry[0] + 1, carry[1] + x / (carry[0] + 1)), carry[1] * 2

    first = torch.zeros((), dtype=torch.int64), torch.zeros_like(x[0])
    return scan(step, first, net.linear(x))[1]


def keeps_a_carry(net: Any, x: Tensor) -> Tensor:
    first = torch.zeros((), dtype=torch.int64), net.linear(x), x
    return while_loop(lambda n, h, x: n < 3, lambda n, h, x: (n + 1, h + x, x), first)[1]


def turns_in_a_branch(net: Any, x: Tensor) -> Tensor:
    x = net.linear(x).unflatten(0, (2, -1))
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.mT.contiguous().mT, (x,))


def passes_too_much(net: Any, x: Tensor) -> Tensor:
    return compares(net, x, 2)


# What forward does -> (what the error says, a part of the line that it names, what it advises).
REFUSED: dict[Callable[[Any, Tensor], Any], tuple[str, str, str]] = {
    scans_a_count: ("carries integers", "return scan", "torch.arange"),
    keeps_a_carry: ("returns a view of its arguments", "return while_loop", ".clone()"),
    turns_in_a_branch: ("in different orders of dims", "return torch.cond", ".contiguous()"),
    passes_too_much: ("arguments that it does not take", "compares(net, x, 2)", "signature"),
    takes_a_causal_bias: ("makes a tensor of a class", "bias = causal_lower_right", "is_causal=True"),
    asks_inference: ("one of inference mode", "is_inference", "h.requires_grad"),
    asks_inference_by_function: ("one of inference mode", "is_inference", "h.requires_grad"),
    applies_checkpoint: ("CheckpointFunction.apply", "apply", "use_reentrant=False"),
    goes_backward: ("calls backward()", ".backward()", "torch.autograd.grad"),
    goes_backward_by_function: ("calls backward()", "torch.autograd.backward", "torch.autograd.grad"),
    sets_a_gradient: ("sets the .grad", ".grad =", "between steps"),
    asks_for_a_gradient: ("reads or sets the .grad", ".grad is None", "between steps"),
    hooks_a_parameter: ("registers a hook of a parameter", "register_hook", "register it once"),
    hooks_an_accumulation: ("registers a hook of a parameter", "register_post", "register it once"),
    retains_a_gradient: ("calls retain_grad()", "retain_grad()", "return the tensor"),
    freezes: ("whether a tensor requires a gradient", "requires_grad_", "h.detach()"),
    asks_the_time: ("asks for the time", "time.time()", "around the call"),
    draws_by_numpy: ("a random number of NumPy's", "default_rng", "torch.rand"),
    compares: ("whether tensors are equal", "torch.equal", "torch.where"),
    reduces: ("calls the collective _c10d_functional.all_reduce", "all_reduce", "shardc.local_map"),
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
    with pytest.raises(CaptureError, match=re.escape(what)) as caught:
        lower(Net(run), torch.ones(4, 4))
    assert line in line_of(caught.value) and fix in (caught.value.fix or "")


@pytest.mark.parametrize("wraps", [lambda y: Out(y), lambda y: {"out": Out(y), "y": y}], ids=["alone", "inside"])
def test_a_class_that_pytrees_do_not_know(wraps: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="returns a Out, a class") as caught:
        lower(Net(lambda net, x: wraps(net.linear(x))), torch.ones(4, 4))
    assert "def forward" in line_of(caught.value) and "register_dataclass(Out)" in (caught.value.fix or "")


class Kind(enum.Enum):
    FIRST = 1


@pytest.mark.parametrize("value", [Kind.FIRST, np.float64(3), b"", torch.device("cpu")], ids=repr)
def test_what_no_program_returns(value: Any) -> None:
    with pytest.raises(CaptureError, match="a class that torch's pytrees do not know") as caught:
        lower(Net(lambda net, x: (net.linear(x), value)), torch.ones(4, 4))
    assert "def forward" in line_of(caught.value) and "return tensors, numbers" in (caught.value.fix or "")


@pytest.mark.parametrize("run", [lambda x: x * np.sqrt(x.shape[1]), lambda x: x.reshape(int(np.prod(x.shape)))])
def test_numbers_of_numpy(run: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(16.0).view(4, 4)
    net = Net(lambda net, x: run(net.linear(x)))
    module = shardc.compile(net, Mesh(dp=2), fsdp("dp"), backend="eager")
    torch.testing.assert_close(shardc.Simulation(module)(x), net(x).detach())


class Cached(nn.Module):
    @functools.cached_property
    def table(self) -> Tensor:
        return torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


@pytest.mark.filterwarnings("ignore:.*changes its attribute")
def test_a_cached_property() -> None:
    module = shardc.compile(Cached(), Mesh(dp=2), fsdp("dp"), backend="eager")
    assert torch.equal(shardc.Simulation(module)(torch.ones(4, 4)), torch.arange(4.0).expand(4, 4))


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
