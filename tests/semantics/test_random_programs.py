"""Random programs under random plans on random meshes: right, or refused in words; a failure prints its program."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

from tests.ranks import run_ranks
from tests.semantics.random_programs import on_ranks, program, verdict

PER_PART = 50


def check(seeds: range, ranks: int | None = None, backend: str | None = None) -> None:
    """Runs the programs of ``seeds``, in simulation or, with a ``backend``, on the ranks of this process group."""
    found = []
    for seed in seeds:
        torch._dynamo.reset()
        made = program(seed, ranks)
        said = verdict(made) if backend is None else verdict(made, partial(on_ranks, backend))
        if said is not None:
            found.append(f"{said}\n{made}")
    assert not found, "\n\n".join(found)


def test_some_programs() -> None:
    check(range(8))


@pytest.mark.skipif("SEED" not in os.environ, reason="SEED=17 runs the program of that seed")
def test_one_program() -> None:
    check(range(int(os.environ["SEED"]), int(os.environ["SEED"]) + 1))


@pytest.mark.long
@pytest.mark.parametrize("part", range(40))
def test_in_simulation(part: int) -> None:
    check(range(PER_PART * part, PER_PART * (part + 1)))


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("ranks", [2, 3])
def test_on_ranks(ranks: int, part: int) -> None:
    first = 10_000 * ranks + 25 * part
    run_ranks(ranks, partial(check, range(first, first + 25), ranks, "eager"))


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_through_inductor(part: int) -> None:
    run_ranks(2, partial(check, range(50_000 + 10 * part, 50_000 + 10 * (part + 1)), 2, "inductor"))
