"""Scenarios of other tests with the store on: a first start, and a second one in processes of its own, find the oracle.

The suite's other tests have the store off (tests/conftest.py).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.distributed import test_no_sync
from tests.ranks import run_ranks
from tests.semantics import test_unused_outputs

SCENARIOS = [
    partial(test_unused_outputs.steps_equal_one_devices, "fsdp3"),
    test_unused_outputs.outputs_one_after_the_other,
    partial(test_unused_outputs.held_back, "fsdp2"),
    partial(test_no_sync.some_are_held_back, "fsdp3"),
]


def test_unused_outputs_twice(tmp_path: Path) -> None:
    for _ in range(2):
        run_ranks(2, SCENARIOS[0], programs=tmp_path)
    assert list(tmp_path.glob("*/*/program.json")), "nothing was stored"


@pytest.mark.slow
def test_each_twice(tmp_path: Path) -> None:
    for _ in range(2):
        run_ranks(2, *SCENARIOS, programs=tmp_path)
