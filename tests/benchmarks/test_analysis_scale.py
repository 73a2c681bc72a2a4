"""The benchmark of analysis at scale runs, and what it predicts does not depend on folding."""

from __future__ import annotations

import pytest

from benchmarks.analysis_scale import row_of

PREDICTED = ("parameters", "collectives", "step", "exposed", "memory", "mfu")


@pytest.mark.long
def test_a_row_is_the_same_folded_and_whole() -> None:
    folded, whole = (row_of(6, 32, "tiny", fold) for fold in (True, False))
    assert [folded[name] for name in PREDICTED] == [whole[name] for name in PREDICTED]
    assert folded["notes"] == ["layers.0 to layers.5: 6 blocks alike, analysed on 4"] and not whole["notes"]
    assert not folded["process_group"]
