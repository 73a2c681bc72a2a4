"""Scans over a split sequence: ranks compute in turn what is carried, and send that and no token."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import shardc
from shardc.custom_ops.function_ops import OPS
from shardc.ir.comm_volume import collective_kind
from tests.higher_order.on_ranks import equal_one_device
from tests.models.alike import trains_alike
from tests.ranks import run_ranks

ROWS, LENGTH, WIDTH = 2, 240, 4
MESHES: tuple[dict[str, int], ...] = ({"cp": 2}, {"cp": 3}, {"dp": 2, "cp": 2})


class Scanned(nn.Module):
    """A recurrence whose step has a product, and a sum of what the steps have."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.reverse = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), reverse

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)

        def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            state, total = carry
            state = torch.tanh(self.b(state) + x)
            return (state, total + x * 0.5), state * 2 + x

        start = torch.ones_like(h[:, 0]), torch.zeros_like(h[:, 0])
        (last, total), every = scan(step, start, h, dim=1, reverse=self.reverse)
        return every + last.unsqueeze(1) * total.unsqueeze(1)


class Gated(Scanned):
    """A recurrence whose step scales each number of the state and adds to it, and another one of that."""

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            state = (state * torch.sigmoid(x) - x) / 1.01
            return state, torch.tanh(state.clone())

        last, every = scan(step, torch.ones_like(x[:, 0]), self.a(x), dim=1, reverse=self.reverse)
        return self.b(every) + last.unsqueeze(1)


def plan(mesh: dict[str, int], order: str = "contiguous") -> shardc.Plan:
    cp = shardc.cp("cp", order=order)
    return shardc.fsdp(("dp", "cp"), threshold=0) | cp if "dp" in mesh else cp


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_equals_one_device(mesh: dict[str, int], reverse: bool) -> None:
    for model in (Scanned, Gated):
        trains_alike(model(reverse), (torch.randn(4, LENGTH, WIDTH),), mesh, plan(mesh), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("length", "order"), [(LENGTH + 1, "contiguous"), (LENGTH, "striped"), (LENGTH + 1, "striped")]
)
def test_filling_and_order(length: int, order: str, reverse: bool) -> None:
    for model in (Scanned, Gated):
        trains_alike(model(reverse), (torch.randn(2, length, WIDTH),), {"cp": 3}, plan({"cp": 3}, order), steps=1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("model", [Scanned, Gated])
def test_a_rank_sends_the_state_and_no_token(model: type[nn.Module], reverse: bool) -> None:
    """To each rank but the first, forward and backward. Sums of the weights' gradients are each rank's own.

    Ranks wait for the steps of each other only if these do more than scale each number of the state and add to it.
    """
    ranks = 3
    module = shardc.compile(model(reverse), shardc.Mesh(cp=ranks), plan({"cp": ranks}), loss=lambda y: y.square().sum())
    program = module.lower(torch.empty(ROWS, LENGTH, WIDTH))
    sent: dict[str, list[int]] = {}
    for half in ("partition", "partition.backward"):
        for node in program.graph(half).nodes:
            kind = collective_kind(node) if node.op == "call_function" else None
            if kind is not None:
                sent.setdefault(kind, []).append(node.meta["val"].numel())
    assert sent.pop("permute_ranks") == [ROWS * WIDTH] * 2 * (ranks - 1)
    assert sent.keys() == {"all_reduce"}  # of gradients, and of what the last step carries
    assert max(sent["all_reduce"]) == WIDTH * WIDTH
    scans = [node for half in ("partition", "partition.backward") for node in program.graph(half).nodes
             if node.target is OPS["scan"]]  # fmt: skip
    assert len(scans) == 2 * (2 if model is Gated else ranks)


def on_ranks(found: bool) -> None:
    models = [partial(Scanned, False), partial(Scanned, True), partial(Gated, False)]
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    equal_one_device(models, (x,), ("inductor",), found, plan=shardc.cp("dp", order="contiguous"))


@pytest.mark.medium
def test_on_two_ranks_and_from_the_store(tmp_path: Path) -> None:
    run_ranks(2, partial(on_ranks, False), programs=tmp_path)
    run_ranks(2, partial(on_ranks, True), programs=tmp_path)
