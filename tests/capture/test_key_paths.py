"""Classes that are registered as pytrees without key paths, as outputs and inputs."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import shardc
from shardc.ir.text import leaf_paths


class Output(dict[str, Any]):
    """As diffusers registers its outputs."""


@dataclass
class Record:
    first: Any
    second: Any


class Pair:
    def __init__(self, first: Any, second: Any) -> None:
        self.both = (first, second)


Point = namedtuple("Point", ["first", "second"])
_pytree.register_pytree_node(
    Output, lambda o: (list(o.values()), list(o)), lambda values, keys: Output(zip(keys, values, strict=True))
)
_pytree.register_pytree_node(Record, lambda r: ([r.first, r.second], None), lambda values, _: Record(*values))
_pytree.register_pytree_node(Pair, lambda p: (list(p.both), None), lambda values, _: Pair(*values))


def test_paths_are_keys_attributes_and_positions() -> None:
    tree = {"a": [1, Output(x=2, y=(3,))], "b": Record(4, Pair(5, None)), "c": Point(6, {}), "d": Output()}
    assert [".".join(map(str, path)) for path in leaf_paths(tree)] == [
        "a.0", "a.1.x", "a.1.y.0", "b.first", "b.second.0", "b.second.1", "c.first",
    ]  # fmt: skip
    assert leaf_paths(3) == [()] and leaf_paths([]) == []


class Net(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4).double(), make

    def forward(self, x: Any) -> Any:
        first, second = x if isinstance(x, tuple) else x.values() if isinstance(x, dict) else (x.first, x.second)
        return self.make(self.linear(first), {"nested": second})


X = torch.rand(4, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    "make", [lambda a, b: Output(first=a, second=b), Record, Point], ids=["dict", "class", "tuple"]
)
def test_they_come_out_and_go_in(make: Any) -> None:
    model = Net(make)
    plan = shardc.fsdp("dp") | shardc.Plan(inputs={"x.first": ["dp", None], "x.second": ["dp", None]})
    module = shardc.compile(model, shardc.Mesh(dp=2), plan, backend="eager")
    given = make(X, X * 2)
    got, wanted = shardc.Simulation(module)(given), model(given)
    assert type(got) is type(wanted)
    ours, theirs = _pytree.tree_leaves(got), _pytree.tree_leaves(wanted)
    torch.testing.assert_close(ours, [x.detach() for x in theirs], rtol=1e-9, atol=1e-9)
    assert all(isinstance(x, Tensor) for x in ours) and len(ours) == 2
