"""A rank that compiled a program and one that loaded it derive the same from it: unused outputs, sums, evaluations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from tests.ranks import run_ranks
from tests.state import assert_same

OUTPUTS = 3
SUBSETS = list(chain.from_iterable(combinations(range(OUTPUTS), n) for n in range(1, OUTPUTS + 1)))


class Heads(nn.Module):
    """A trunk, a head behind a head, a head of its own, and a parameter that two outputs share."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.up = nn.Linear(6, 8), nn.Linear(8, 8)
        self.a, self.b, self.c = nn.Linear(8, 4), nn.Linear(4, 6), nn.Linear(8, 2)
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.norm(self.up(self.trunk(x).tanh()).reshape(-1, 8)) + 0.0 * self.drop(x).sum()
        first = self.a(hidden)
        return first, self.b(first.tanh()), self.c(hidden) + self.b.weight.sum()


PLANS = {
    "ddp": ({"dp": 2}, shardc.ddp("dp")),
    "fsdp2": ({"dp": 2}, shardc.fsdp("dp", level=2)),
    "fsdp3": ({"dp": 2}, shardc.fsdp("dp")),
    "tp": ({"tp": 2}, shardc.tp("tp", colwise=["trunk"], rowwise=["up"])),
    "hsdp": ({"rep": 2, "dp": 2}, shardc.hsdp("rep", "dp")),
    "fsdp tp": ({"dp": 2, "tp": 2}, shardc.fsdp("dp") | shardc.tp("tp", colwise=["trunk"], rowwise=["up"])),
}
# Folders of stored programs by rank; "-" is an empty one of the rank's own.
STARTS = {"first": "new", "second": "new", "rank 0 compiles": "-new", "rank 1 compiles": "new-"}


def folder_of(root: Path, start: str) -> Path:
    rank = dist.get_rank()
    empty = {"rank 0 compiles": rank == 0, "rank 1 compiles": rank == 1}.get(start, False)
    return root / (f"empty {start}" if empty else "shared")


def heads() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


def compiled(source: nn.Module, plan: str, **more: Any) -> Any:
    sizes, entries = PLANS[plan]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    options = shardc.Options(**more.pop("options", {}))
    return shardc.compile(source, mesh, entries, options=options, **more)


def steps(module: Any, source: nn.Module, first: str, every: Sequence[tuple[int, ...]] = SUBSETS) -> None:
    """Losses of every subset of the outputs, some held back, evaluations between, as on one device."""
    draw = torch.Generator().manual_seed(0)
    if first == "evaluation":
        evaluates(module, source, draw)
    for at, used in enumerate(every):
        for net in (module, source):
            net.zero_grad()
        if at % 3 == 2:  # another subset, held back, in front of it
            with module.no_sync():
                backward(module, source, SUBSETS[-at], draw)
        backward(module, source, used, draw)
        assert_same(module, source, grads=True)
        if at % 3 == 1:
            evaluates(module, source, draw)


def backward(module: Any, source: nn.Module, used: tuple[int, ...], draw: torch.Generator) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=draw)
    for net, given in ((module, module.shard_inputs(x)), (source, x)):
        out = net(given)
        sum(out[at].square().mean() * (at + 1) for at in used).backward()  # type: ignore[union-attr]


def evaluates(module: Any, source: nn.Module, draw: torch.Generator) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=draw)
    for net in (module, source):
        net.eval()
    with torch.no_grad():
        ours, theirs = module(module.shard_inputs(x)), source(x)
    for mine, whole in zip(ours, theirs, strict=True):
        rows = whole.chunk(whole.shape[0] // mine.shape[0])
        assert any(torch.allclose(mine, part, rtol=1e-9, atol=1e-12) for part in rows)
    for net in (module, source):
        net.train()


def start(
    root: Path, plan: str, start: str, first: str = "step", used: Sequence[tuple[int, ...]] = SUBSETS, **more: Any
) -> None:
    os.environ["SHARDC_STORE"] = str(folder_of(root, start))
    source = heads()
    module = compiled(source, plan, **more)
    steps(module, source, first, used)
    stored: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stored, [program.from_store for program in module.shardc.programs.values()][0])
    loaded = {"first": len(stored) - 1, "second": len(stored)}.get(start, len(stored) - 1)
    assert stored.count(True) == loaded, stored


def starts(root: Path, plan: str, ranks: int, **more: Any) -> None:
    folder = root / "-".join([plan, *map(str, more.values())]).replace(" ", "")
    run_ranks(ranks, *(partial(start, folder, plan, name, **more) for name in STARTS))


def saved_and_used(folder: Path) -> None:
    """``precompiled=`` takes the route of the program that was saved."""
    source = heads()
    fresh = compiled(source, "fsdp3", backend="eager")
    if dist.get_rank() == 0:
        fresh.lower(torch.randn(8, 6, dtype=torch.float64)).save(folder)
    dist.barrier()
    steps(compiled(source, "fsdp3", backend="eager", precompiled=folder), source, "step")


def test_a_first_start(tmp_path: Path) -> None:
    run_ranks(2, partial(start, tmp_path, "fsdp3", "first", backend="eager", used=SUBSETS[:2]))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "fsdp2", "fsdp3", "tp"])
def test_two_ranks(tmp_path: Path, plan: str) -> None:
    starts(tmp_path, plan, 2, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["hsdp", "fsdp tp"])
def test_four_ranks(tmp_path: Path, plan: str) -> None:
    starts(tmp_path, plan, 4, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"p2p_collectives": False}, {"bucket_size": 0}, {"p2p_collectives": False, "bucket_size": -1}], ids=str
)
def test_however_collectives_are_written(tmp_path: Path, options: dict[str, Any]) -> None:
    starts(tmp_path, "fsdp3", 2, backend="eager", options=options)


@pytest.mark.slow
def test_an_evaluation_comes_first(tmp_path: Path) -> None:
    starts(tmp_path, "fsdp3", 2, backend="eager", first="evaluation")


@pytest.mark.slow
def test_through_inductor(tmp_path: Path) -> None:
    starts(tmp_path, "fsdp3", 2)


@pytest.mark.slow
def test_a_saved_program(tmp_path: Path) -> None:
    run_ranks(2, partial(saved_and_used, tmp_path))
