"""``python -m shardc rules``: the table, its totals and the coverage of core ATen."""

from __future__ import annotations

import re

import pytest

from shardc.__main__ import main
from shardc.rules import RULES


def test_it_lists_the_ops_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "--op", "aten.mm"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [re.sub(r" {2,}", "  ", line) for line in lines if not line.startswith("-")][:3] == [
        "op  rule  source",
        "aten.mm  i k, k j -> i j  k: sum  own",
        "1 own rules for 2 aten overloads",
    ]


def test_our_rules_cover_core_aten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines() if line.endswith(" own")]
    assert set(RULES) <= set(rows)
    overloads = int(re.search(r"own rules for (\d+) aten overloads", out)[1])  # type: ignore[index]
    covered, total = map(int, re.search(r"core ATen: (\d+) of (\d+)", out).groups())  # type: ignore[union-attr]
    assert overloads >= 350
    assert covered / total >= 0.98
