"""The arithmetic of the benchmark's report, on made-up measurements."""

from __future__ import annotations

import json

from benchmarks.report import Result, fastest, markdown, ratio, to_json, verdicts

LIMIT = Result("tiny", "ddp", "limit", "limit", (0.1, 0.3, 0.2), 2.0, 2**20, 0, 0, 9.0)
EAGER = Result("tiny", "ddp", "DDP", "ddp/eager", (0.5, 0.4, 0.9), 1.0, 3 * 2**20, 4_000_000, 3, 7.50001)
COMPILED = Result("tiny", "ddp", "DDP", "ddp/compiled", (0.4, 0.4, 0.1), 30.0, 2**21, 4_000_000, 3, 7.5)
OTHER = Result("tiny", "ddp", "SimpleFSDP", "other", (0.6,), 30.0, 2**21, 4_000_000, 1, 7.5)
OURS = Result("tiny", "ddp", "shardc", "shardc/ddp", (0.3, 0.3), 12.34, 2**21, 2_500_000, 1, 7.4925)
BROKEN = Result("tiny", "ddp", "DDP", "ddp/broken", error="RuntimeError: no such device")
ALL = [LIMIT, EAGER, COMPILED, OTHER, OURS, BROKEN]

EXPECTED = """\
# One training step, side by side

- two ranks

## tiny, ddp

The last loss of the same training on one device: 7.50000.

| row          |   median ms |   min ms |   x limit |   x best peer |   first step s |   peak MiB |   collectives |   sent MB |   last loss |   off by |
|--------------|-------------|----------|-----------|---------------|----------------|------------|---------------|-----------|-------------|----------|
| limit        |         200 |      100 |      1.00 |          0.50 |            2.0 |          1 |             0 |      0.00 |     9.00000 |          |
| ddp/eager    |         500 |      400 |      2.50 |          1.25 |            1.0 |          3 |             3 |      4.00 |     7.50001 |    1e-06 |
| ddp/compiled |         400 |      100 |      2.00 |          1.00 |           30.0 |          2 |             3 |      4.00 |     7.50000 |    0e+00 |
| other        |         600 |      600 |      3.00 |          1.50 |           30.0 |          2 |             1 |      4.00 |     7.50000 |    0e+00 |
| shardc/ddp   |         300 |      300 |      1.50 |          0.75 |           12.3 |          2 |             1 |      2.50 |     7.49250 |    1e-03 |
| ddp/broken   |             |          |           |               |                |            |               |           |             |          |

- shardc/ddp: 1.50x of limit, 0.75x of ddp/compiled, 0.50x of other
- ddp/broken did not run: RuntimeError: no such device
"""  # noqa: E501


def test_median_and_minimum_are_of_the_timed_steps() -> None:
    assert (EAGER.median, EAGER.minimum) == (0.5, 0.4)


def test_fastest_is_the_peer_with_the_least_median() -> None:
    """Not the least minimum, not the limit, not shardc, not a row that failed."""
    assert fastest(ALL) == COMPILED
    assert fastest(ALL, ["limit"]) == LIMIT
    assert fastest(ALL, ["SimpleFSDP", "shardc"]) == OURS
    assert fastest([LIMIT, OURS, BROKEN]) is None


def test_ratio_is_of_medians_and_none_without_the_other() -> None:
    assert ratio(OURS, LIMIT) == 0.3 / 0.2
    assert ratio(OURS, None) is None


def test_verdicts_name_the_best_of_every_kind() -> None:
    assert verdicts(ALL) == ["shardc/ddp: 1.50x of limit, 0.75x of ddp/compiled, 0.50x of other"]
    assert verdicts([OURS]) == []


def test_markdown_is_whole() -> None:
    assert markdown(ALL, {"tiny": 7.5}, ["two ranks"]) == EXPECTED


def test_json_holds_every_step() -> None:
    read = json.loads(to_json([OURS, BROKEN], {"tiny": 7.5}, ["two ranks"]))
    assert read["single_device_loss"] == {"tiny": 7.5}
    assert [Result(**{**row, **{key: tuple(row[key]) for key in ("seconds", "issued")}}) for row in read["rows"]] == [
        OURS,
        BROKEN,
    ]
