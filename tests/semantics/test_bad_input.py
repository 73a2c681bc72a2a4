"""Every bad input gives an error of shardc's own that names it; nothing is changed before."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardc.errors import ShardcError
from tests.semantics import bad_calls, bad_input

TABLES = {
    name: getattr(tables, name)
    for tables, names in (
        (bad_input, ("COMPILE", "OPTIONS", "MESHES", "PLANS")),
        (bad_calls, ("CALLS", "LOSSES", "STATE", "RULES")),
    )
    for name in names
}


def check(do: Callable[..., object], error: Any, said: str, *given: Any) -> None:
    with pytest.raises(ShardcError) as caught:
        do(*given)
    assert isinstance(caught.value, error), f"{type(caught.value).__name__}: {caught.value}"
    assert re.search(said, str(caught.value)), str(caught.value)
    assert len(caught.value.what) < 1500


@pytest.mark.parametrize(("table", "what"), [(table, what) for table in TABLES for what in TABLES[table]])
def test_it_is_named(table: str, what: str) -> None:
    check(*TABLES[table][what])


@pytest.mark.parametrize("what", bad_input.FILES)
def test_a_file_is_named(what: str, tmp_path: Path) -> None:
    check(*bad_input.FILES[what], tmp_path)
