"""Clones of module trees share what the original shares, and nothing with the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardc.ir.clone import clone_tree, subclass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.empty = nn.ModuleList()
        self.none = None
        self.register_parameter("absent", None)
        self.width = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = Block()
        self.again = self.a
        self.b.fc.weight = self.a.fc.weight


def test_clone() -> None:
    model = Model()
    model.b.eval()
    seen: list[str] = []

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        copy = tensor.detach().clone() + 1
        return nn.Parameter(copy) if isinstance(tensor, nn.Parameter) else copy

    clone = clone_tree(model, make)
    assert seen == ["a.scale", "a.fc.weight", "a.fc.bias", "b.scale", "b.fc.bias"]
    assert clone.again is clone.a and clone.b.fc.weight is clone.a.fc.weight
    assert isinstance(clone, Model) and isinstance(clone.a.empty, nn.ModuleList) and len(clone.a.empty) == 0
    assert clone.a.absent is None and clone.a.none is None and clone.a.width == 3
    assert (clone.training, clone.a.training, clone.b.training) == (True, True, False)
    assert clone.state_dict().keys() == model.state_dict().keys()
    assert [n for n, _ in clone.named_modules()] == [n for n, _ in model.named_modules()]
    for (_, mine), (_, theirs) in zip(clone.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(mine, theirs + 1)
    # Changes of one do not reach the other.
    clone.a.register_buffer("more", torch.ones(1))
    clone.a.register_forward_hook(lambda *_: None)
    assert "more" not in model.a._buffers and not model.a._forward_hooks
    x = torch.ones(3)
    assert torch.equal(clone.b(x), (x @ (model.b.fc.weight + 1).T + model.b.fc.bias + 1) * 2)


class Loud:
    def forward(self, x: torch.Tensor) -> str:
        return "loud"

    def __call__(self, x: torch.Tensor) -> str:
        return self.forward(x)


def test_subclass() -> None:
    model = clone_tree(Block(), lambda _, tensor: tensor)
    subclass(model, Loud, nn.Module, {})
    assert isinstance(model, Block) and isinstance(model, Loud) and type(model).__name__ == "ShardedBlock"
    assert model(torch.ones(3)) == "loud"


def test_functions_hold_what_is_the_clones_and_share_the_rest() -> None:
    """A cell that others may change is theirs, too."""
    model: Any = Model()
    calls, count = [], 0

    def counts(x: torch.Tensor, *, of: nn.Module = model.a) -> torch.Tensor:
        nonlocal count
        count += 1
        calls.append(model)
        return x * of.fc.weight.sum()  # type: ignore[union-attr, operator]

    counts.label, counts.__module__ = "kept", "elsewhere"  # type: ignore[attr-defined]
    plain = lambda x: len(calls)  # noqa: E731
    model.counts, model.plain, model.again_counts = counts, plain, [counts]
    clone: Any = clone_tree(model, lambda _, tensor: nn.Parameter(tensor.detach() * 2))
    x = torch.ones(3)
    assert torch.equal(clone.counts(x), 2 * model.counts(x)) and count == 2
    assert calls == [clone, model] and clone.plain is plain
    assert clone.counts is not counts and clone.again_counts == [clone.counts]
    assert (clone.counts.label, clone.counts.__module__, clone.counts.__name__) == ("kept", "elsewhere", "counts")
    assert not hasattr(clone.counts, "__wrapped__")
    assert model.counts is counts and counts.__kwdefaults__ == {"of": model.a}
