"""Random uses of outputs: each line runs, or is refused, as on one device, and leaves what it leaves there."""

from __future__ import annotations

import os
from functools import partial

import pytest

import shardc
from tests.ranks import run_ranks
from tests.semantics.random_outputs import check

PLANS = (shardc.fsdp("dp"), shardc.fsdp("dp", level=1), shardc.fsdp("dp", level=2), shardc.ddp("dp"))


@pytest.mark.skipif("SEED" not in os.environ, reason="SEED=17 runs the use of that seed")
def test_one_use() -> None:
    seed = int(os.environ["SEED"])
    run_ranks(2, partial(check, range(seed, seed + 1), "eager", 2, PLANS[0]))


@pytest.mark.slow
def test_one_rank() -> None:
    run_ranks(1, partial(check, range(40), "eager", 1, PLANS[0]))


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(2, partial(check, range(40, 80), "eager", 2, PLANS[0]))


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_many(part: int) -> None:
    run_ranks(2, partial(check, range(1000 + 100 * part, 1100 + 100 * part), "eager", 2, PLANS[part % 4]))


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_through_inductor(part: int) -> None:
    run_ranks(2, partial(check, range(9000 + 10 * part, 9010 + 10 * part), "inductor", 2, PLANS[part]))
