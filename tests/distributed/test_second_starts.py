"""Scenarios of other tests in a first start, and in a second one in processes of its own, find the oracle."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.distributed import test_checkpoint, test_dynamic, test_no_sync, test_train
from tests.ranks import Check, run_ranks
from tests.semantics import test_unused_outputs

FEW: list[Check] = [
    partial(test_unused_outputs.steps_equal_one_devices, "fsdp3"),
    partial(test_train.trains_as_one_device, "mlp", "fsdp3", {"dp": 2}, "eager"),  # and then evaluates
]
SCENARIOS = [
    *FEW,
    test_unused_outputs.outputs_one_after_the_other,
    partial(test_unused_outputs.held_back, "fsdp2"),
    partial(test_no_sync.some_are_held_back, "fsdp3"),
    partial(test_dynamic.trains_at_many_sizes, "tp+sp", "eager"),
    test_dynamic.marked_dims_are_dynamic,
    test_checkpoint.saved_on_one_mesh_resumes_on_others,
    test_checkpoint.unsharded_checkpoint_resumes,
]


def test_some_twice(tmp_path: Path) -> None:
    for _ in range(2):
        run_ranks(2, *FEW, programs=tmp_path)
    assert list(tmp_path.glob("*/*/program.json")), "nothing was stored"


@pytest.mark.slow
def test_each_twice() -> None:
    for _ in range(2):
        run_ranks(2, *SCENARIOS)
