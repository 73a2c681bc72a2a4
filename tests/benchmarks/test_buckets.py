"""The table of bucket sizes: the default is within 3 % of the best fixed size."""

from __future__ import annotations

import pytest

from benchmarks.buckets import rows
from examples.models.llama import LlamaConfig

SMALL = LlamaConfig(1024, 1024, 4, heads=8, kv_heads=8, hidden=4096)


@pytest.mark.parametrize("mesh", ["dp=256", "dp=8,tp=8"])
@pytest.mark.slow
def test_the_default_is_near_the_best(mesh: str) -> None:
    *fixed, default = (float(row[3]) for row in rows(mesh, "h100", (1, 16), SMALL))
    assert default <= 1.03 * min(fixed)
