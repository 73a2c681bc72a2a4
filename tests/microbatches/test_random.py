"""Random programs under random plans, in microbatches: right, or refused in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardc
from tests.semantics.random_programs import program, verdict

FAULTS = (17, 51, 166, 175, 187, 316)  # seeds of faults that were mended


def check(seeds: range | tuple[int, ...]) -> None:
    found = []
    for seed in seeds:
        torch._dynamo.reset()
        drawn = program(seed)
        drawn = replace(drawn, plan=drawn.plan | shardc.microbatches(2 + seed % 3))
        if (fault := verdict(drawn)) is not None:
            found.append(f"{fault}\n{drawn}")
    assert not found, "\n\n".join(found)


def test_some_programs() -> None:
    check((*range(4), *FAULTS))


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_in_simulation(part: int) -> None:
    check(range(50 * part, 50 * (part + 1)))
