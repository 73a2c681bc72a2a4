"""What cannot be experts is refused, by its line, with what to write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import CaptureError, InputError, PlanError

X = torch.randn(8, 8)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))
        self.router = nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.ones(8))

    def choices(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = self.router(x).softmax(-1).topk(2)
        return scores, chosen


class Loop(Layer):
    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.choices(x)
        out = torch.zeros_like(x)
        for expert in range(4):
            token, place = torch.where(chosen == expert)
            out = out.index_add(0, token, (x[token] @ self.weight[expert]) * scores[token, place, None])
        return out.sum()


class Sorted(Layer):
    """Rows that are sorted by expert and split by how many each gets."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.choices(x)
        sizes = chosen.flatten().bincount(minlength=4).tolist()
        rows = x[chosen.flatten().argsort() // 2].split(sizes)
        return torch.cat([one @ self.weight[at] for at, one in enumerate(rows)]).sum()


class Grouped(Layer):
    def forward(self, x: Tensor) -> Tensor:
        _, chosen = self.choices(x)
        ends = torch.nn.functional.one_hot(chosen.flatten(), 4).sum(0).cumsum(0).to(torch.int32)
        rows = x[chosen.flatten().argsort() // 2]
        return torch._grouped_mm(rows.bfloat16(), self.weight.bfloat16(), offs=ends).float().sum()


class Given(Layer):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.choices(x)
        return self.function(x, chosen, scores, self.weight).sum()


class Reads(Layer):
    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.choices(x)
        return shardc.experts(lambda rows, weight: rows @ weight + self.bias)(x, chosen, scores, self.weight).sum()


@shardc.experts
def over_tokens(rows: Tensor, weight: Tensor) -> Tensor:
    return (rows @ weight).softmax(0)


@shardc.experts
def less_their_mean(rows: Tensor, weight: Tensor) -> Tensor:
    return rows @ weight - rows.mean(0, keepdim=True)


def captured(model: nn.Module) -> None:
    shardc.compile(model, shardc.Mesh(ep=2), shardc.ddp("ep"), backend="eager").lower(X)


@pytest.mark.parametrize("kind", [Loop, Sorted])
def test_loops_over_experts_are_told_what_to_write(kind: type[Layer]) -> None:
    with pytest.raises(CaptureError, match="under @shardc.experts") as caught:
        captured(kind())
    assert "test_bad_input.py:" in str(caught.value)


def test_grouped_products_are_told_what_to_write() -> None:
    with pytest.warns(shardc.ShardcWarning, match="grouped_mm.*\n.*test_bad_input.py.*\n.*under @shardc.experts"):
        plan = shardc.Plan(params={"weight": "_@ep, _, _"})
        shardc.compile(Grouped(), shardc.Mesh(ep=2), plan, backend="eager").lower(X)


@pytest.mark.parametrize("function", [over_tokens, less_their_mean])
def test_functions_that_mix_rows(function: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError, match="mixes the rows of different tokens") as caught:
        captured(Given(function))
    assert "test_bad_input.py" in str(caught.value)


def test_functions_that_read_more_than_they_are_given() -> None:
    with pytest.raises(CaptureError, match="reads bias, which is not among its arguments"):
        captured(Reads())


def test_shapes() -> None:
    weight = torch.randn(4, 8, 8)
    index, scale = torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2)
    for given in (
        (X[0], index, scale, weight),
        (X, index, scale[:, :1], weight),
        (X, index, scale),
        (X, index, scale, X[0]),
    ):
        with pytest.raises(InputError, match="experts get tensors of the shapes"):
            over_tokens(*given)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: shardc.ep("ep", "*.experts", dispatch="quickly"), "dispatch is 'quickly'"),
        (lambda: shardc.ep("ep", "*.experts", capacity=2.0), "a capacity requires dispatch='bounded'"),
        (lambda: shardc.ep("ep", "*.experts", dispatch="bounded"), "dispatch='bounded' needs a capacity"),
        (
            lambda: shardc.ep("ep", "*.experts", dispatch="bounded", capacity=0.5),
            "no room for the rows of an even load",
        ),
        (lambda: shardc.compile(Layer(), shardc.Mesh(ep=2), shardc.ep("ep", "*.experts")), "matches no module"),
        (lambda: shardc.compile(Layer(), shardc.Mesh(ep=2), shardc.ep("ep", "router")), "has no dim for experts"),
        (lambda: shardc.compile(Layer(), shardc.Mesh(dp=2), shardc.ep("ep", "router")), "unknown mesh axis 'ep'"),
    ],
)
def test_plans(make: Callable[[], object], said: str) -> None:
    with pytest.raises((PlanError, shardc.ShardcError), match=said):
        make()


def test_plans_are_kept_as_text_and_json() -> None:
    plan = shardc.fsdp(("dp", "ep")) | shardc.ep("ep", ["*.experts", "moe"], dispatch="bounded", capacity=1.5)
    assert shardc.Plan.from_json(plan.to_json()) == plan
    assert 'ep("ep", experts="moe", dispatch="bounded", capacity=1.5)' in str(plan)
