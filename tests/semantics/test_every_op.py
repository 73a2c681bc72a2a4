"""Every entry of torch's op database, compiled: right, right with a warning, or refused with its source line.

Each entry's samples run in simulation on three meshes, split over dims that a draw by the entry's name chooses; outputs
and gradients are one device's. What a rank decides for itself is seen on real ranks alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.testing._internal import common_methods_invocations

from tests.ranks import run_ranks
from tests.semantics.op_cases import (
    COARSE,
    COARSE_IN_INDUCTOR,
    MESHES,
    NAMES,
    Case,
    Shifted,
    cases,
    on_ranks,
    verdict,
)

PARTS = 64


def unseeded() -> None:
    """Lets random ops draw: the database runs them under a seed of its own, which no graph can hold."""
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


@pytest.fixture(autouse=True)
def _drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", None)
    unseeded()


def chosen(entries: range, count: int) -> Iterator[Case]:
    for at in entries:
        torch._dynamo.reset()
        yield from cases(at, count)


def simulate(entries: range, count: int, meshes: int) -> None:
    """``count`` samples of each entry, each on so many of the meshes, by turns."""
    found, right = [], 0
    for number, case in enumerate(chosen(entries, count)):
        for mesh in (MESHES * 2)[number % len(MESHES) :][:meshes]:
            said = verdict(case, mesh)
            right += said.startswith(("right", "whole"))
            if said.startswith("WRONG"):
                found.append(f"{case.name}, sample {case.at} on {mesh} with {case.plan(mesh)}: {said}")
    assert not found, "\n".join(found)
    assert right, "nothing was compared"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_some_entries() -> None:
    """A few spread over the database, each on one of the meshes."""
    simulate(range(7, len(NAMES), 40), 1, 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_in_simulation(part: int) -> None:
    simulate(range(part, len(NAMES), PARTS), 2, 3)


def shifted(entries: range, count: int) -> None:
    """Samples whose operands have a parameter added, rows split under FSDP: five of them over two ranks, most often."""
    found = []
    for at in entries:
        torch._dynamo.reset()
        for case in cases(at, count, Shifted):
            said = verdict(case, {"dp": 2})
            if said.startswith("WRONG"):
                found.append(f"{case.name}, sample {case.at}: {said}")
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore")
def test_some_entries_beside_parameters() -> None:
    shifted(range(5, len(NAMES), 80), 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_beside_parameters(part: int) -> None:
    shifted(range(part, len(NAMES), PARTS), 200)


def check_on_ranks(entries: range, mesh: dict[str, int], backend: str) -> None:
    unseeded()
    found = []
    for case in chosen(entries, 1):
        coarse = COARSE_IN_INDUCTOR if backend == "inductor" else COARSE
        said = verdict(case, mesh, partial(on_ranks, backend=backend), coarse)
        if said.startswith("WRONG"):
            found.append(f"{case.name}, sample {case.at} on {mesh} with {case.plan(mesh)}: {said}")
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("ranks", [2, 3])
def test_on_ranks(ranks: int, part: int) -> None:
    """Every entry on two ranks or on three, by turns."""
    run_ranks(ranks, partial(check_on_ranks, range(2 * part + ranks - 2, len(NAMES), 16), {"dp": ranks}, "eager"))


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_through_inductor(part: int) -> None:
    run_ranks(2, partial(check_on_ranks, range(11 + 17 * part, len(NAMES), 68), {"dp": 2}, "inductor"))
