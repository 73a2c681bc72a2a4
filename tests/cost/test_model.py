"""The cost model: what it adds up, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardc.__main__ import main
from shardc.cost.model import CostModel, Measured, Messages
from shardc.errors import InputError

COST = CostModel(
    latency=1e-3,
    hop=1e-4,
    bandwidth=1e6,
    flops=1e9,
    memory_bandwidth=1e8,
    kinds=(Measured("all_reduce", 2, 2e-3, 5e5), Measured("all_reduce", 8, 4e-3, 2.5e5)),
)


def test_seconds_are_messages_hops_and_bytes() -> None:
    assert COST.seconds("all_gather", 2, 1e6) == pytest.approx(1e-3 + 1e-4 + 1)
    assert COST.seconds("all_gather", 4, 1e6, messages=3) == pytest.approx(3 * (1e-3 + 3e-4) + 1)
    assert COST.seconds("all_gather", 1, 1e6) == 0


def test_a_measured_kind_is_priced_by_the_nearest_group() -> None:
    assert COST.seconds("all_reduce", 2, 1e6) == pytest.approx(2e-3 + 2)
    assert COST.seconds("all_reduce", 4, 1e6) == pytest.approx(2e-3 + 2e-4 + 2)
    assert COST.seconds("all_reduce", 16, 1e6) == pytest.approx(4e-3 + 8e-4 + 4)


def test_a_collective_is_priced_by_its_fastest_algorithm() -> None:
    rows = [("all_to_all", 1e9), ("reduce_scatter", 1e8), ("all_gather", 1e10), ("all_reduce", 1e8)]
    cost = CostModel(memory_bandwidth=1e12, kinds=tuple(Measured(kind, 2, 1e-4, speed) for kind, speed in rows))
    # The exchange, and a pass over the two terms and their sum.
    assert cost.best_seconds("reduce_scatter", 2, 1e6) == pytest.approx(1e-4 + 1e-3 + 3e-6)
    assert cost.best_seconds("all_gather", 2, 1e6) == cost.seconds("all_gather", 2, 1e6)
    assert cost.best_seconds("all_reduce", 2, 2e6) == pytest.approx(2e-4 + 1e-3 + 3e-6 + 1e-4)
    assert cost.best_seconds("all_to_all", 2, 1e6) == cost.seconds("all_to_all", 2, 1e6)
    unmeasured = CostModel(kinds=())
    for kind, _ in rows:
        assert unmeasured.best_seconds(kind, 4, 1e6) == unmeasured.seconds(kind, 4, 1e6)


def test_nothing_is_below_the_bound() -> None:
    for kind in ("all_gather", "all_reduce"):
        for ranks in (2, 8):
            assert COST.least_seconds(1e5) <= COST.seconds(kind, ranks, 1e5)


def test_compute_is_bound_by_operations_or_by_memory() -> None:
    assert COST.compute_seconds(1e9, 1e6) == 1
    assert COST.compute_seconds(1e6, 1e8) == 1


def test_the_file_round_trips(tmp_path: Path) -> None:
    COST.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == COST
    whole = replace(COST, attention=0.5, launch=1e-5, messages=Messages(1e-4, 2e-5, 3e-6, 1e-6, 1e9, 0.5))
    whole.save(tmp_path / "new" / "cost.json")
    assert CostModel.load(tmp_path / "new" / "cost.json") == whole


@pytest.mark.parametrize(
    "text", ["not json", "[1]", '{"latency": 1, "speed": 2}', '{"kinds": [{"kind": "all_reduce"}]}', "{}"]
)
def test_another_file_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(InputError, match=r"cost\.json is not a cost model .*\n  fix: write it with python -m shardc"):
        CostModel.load(tmp_path / "cost.json")
    with pytest.raises(InputError, match="cannot be read: No such file"):
        CostModel.load(tmp_path / "other.json")


@pytest.mark.slow
def test_calibrate_measures_every_kind_on_pairs_and_on_all_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--ranks", "3", "--runs", "1", "--out", str(tmp_path / "cost.json")]) == 0
    cost = CostModel.load(tmp_path / "cost.json")
    kinds = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute_ranks"]
    assert [(row.kind, row.ranks) for row in cost.kinds] == [(kind, ranks) for ranks in (2, 3) for kind in kinds]
    assert min(min(row.latency, row.bandwidth) for row in cost.kinds) > 0
    assert min(cost.latency, cost.bandwidth, cost.flops, cost.memory_bandwidth) > 0
    assert min(cost.attention, cost.launch) > 0
    assert cost.messages is not None and cost.messages.bandwidth > 0
    assert min(cost.messages) >= 0 and cost.messages.share < 1
    assert capfd.readouterr().out.count("\n") == 13


def test_calibrate_needs_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--ranks", "1"]) == 2
    assert capsys.readouterr().err == "shardc: error: --ranks 1: one rank has no peers; use 2 or more\n"
