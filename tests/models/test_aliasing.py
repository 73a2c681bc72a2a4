"""State and aliasing: what shares storage, stays frozen, changes in place or is used twice equals one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.ir import graph as ir
from shardc.ir import ops
from tests.models.alike import trains_alike

WIDTH, VOCAB, BATCH, LENGTH = 8, 16, 4, 6


class Tied(nn.Module):
    """One matrix under three names, of which the first is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.embed = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.embed.weight = self.head.weight = self.shared.weight
        self.bias = self.head.bias

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens)))) + self.bias


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.requires_grad_(False)
        self.third.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Counting(nn.Module):
    """Buffers of three kinds, changed in forward by what the whole batch holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)
        nn.init.normal_(self.norm.bias)  # of a bias of zeros the first gradient is zero but for noise
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positive", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        with torch.no_grad():
            self.seen += (y > 0).sum()
            self.positive.logical_or_((y > 1).any(0))
            self.mean.lerp_(y.mean(0), 0.1)
        return y * (1 + self.mean)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).add_(1.0)
        h[:, 0] = 2.0
        h[:, 2:4] *= 3.0
        h.masked_fill_(h < -1, 0.5)
        half = h[:, :WIDTH]
        half.mul_(0.5)  # a view: `h` changes with it
        F.relu_(h)
        out = torch.zeros_like(x)
        out += self.down(h)
        return out


class Views(nn.Module):
    """Outputs that are views: of each other, of an input, of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        return y, y.t(), y.view(-1, 2, WIDTH // 2)[:, 1], y[1:], x.view(-1), self.linear.weight.t()


class Twice(nn.Module):
    """One module at two places and called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.two = self.one
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(torch.tanh(self.one(torch.tanh(self.one(x))))))


class TwiceAndTied(nn.Module):
    """One module at two places, whose weight has another name too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.back.weight, self.alike = self.mix.weight, self.back

    def forward(self, x: Tensor) -> Tensor:
        return self.alike(torch.tanh(self.mix(x)))


def rows() -> tuple[Tensor]:
    return (torch.randn(2 * BATCH, WIDTH),)


def tokens() -> tuple[Tensor]:
    return (torch.randint(VOCAB, (BATCH, LENGTH)),)


CASES = {
    "tied": (Tied, tokens, {"colwise": ["mix"], "vocab": ["shared"]}),
    "frozen": (Frozen, rows, {"colwise": ["first"], "rowwise": ["second"]}),
    "buffers": (Counting, rows, {"colwise": ["linear"]}),
    "in place": (InPlace, rows, {"colwise": ["up"], "rowwise": ["down"]}),
    "views": (Views, rows, {"colwise": ["linear"]}),
    "twice": (Twice, rows, {"colwise": ["one.0"], "rowwise": ["last"]}),
    "twice and tied": (TwiceAndTied, rows, {"colwise": ["mix"]}),
}


@pytest.mark.parametrize("plan", ["fsdp", "fsdp+tp"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str, plan: str) -> None:
    make, inputs, split = CASES[name]
    torch.manual_seed(0)
    fsdp = shardc.fsdp("dp", level=3, threshold=0)
    mesh, said = ({"dp": 2}, fsdp) if plan == "fsdp" else ({"dp": 2, "tp": 2}, fsdp | shardc.tp("tp", **split))
    sim = trains_alike(make(), inputs(), mesh, said)
    assert sim.params


def test_a_tied_parameter_is_gathered_and_reduced_once() -> None:
    """One storage, and one reduction of the sum of its gradients."""
    module = shardc.compile(
        Tied(), shardc.Mesh(dp=2), shardc.fsdp("dp", level=2, threshold=0), loss=lambda y: y.square().mean()
    )
    assert [name for name, _ in module.named_parameters()] == ["bias", "shared.weight", "mix.weight", "mix.bias"]
    graph = module.lower(*tokens()).graph("collectives")
    for kind in (ops.all_gather, ops.reduce_scatter):
        shapes = [ir.value(node).shape for node in graph.nodes if node.target is kind]
        assert shapes.count((VOCAB, WIDTH)) == 1
