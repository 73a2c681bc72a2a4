"""Every form of plan on a GPU, beside the same model on it without shardc: a world of one, and two ranks over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.correct import FORMS, VARIANTS, run
from benchmarks.gpu.ranks import World
from tests.benchmarks.test_gpu import rows_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FORMS)
def test_a_world_of_one(name: str, variant: str, tmp_path: Path) -> None:
    world = World("cuda", 0, 1, str(tmp_path))
    world.enter("one")
    try:
        run(name, variant, world)
    finally:
        world.leave()


def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "cuda", "--ranks", "2", "--variants", "eager/f32,inductor/bf16")
    assert [row.case for row in rows if row.result not in ("ok", "skipped")] == []
    assert len(rows) == 2 * len(FORMS)
