"""The page "Works with": each line says yes or no, and names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?!---|library)(.+?) \| (yes|no) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def rows() -> list[tuple[str, ...]]:
    return ROW.findall((ROOT / "docs/works_with.md").read_text())


def test_every_line_is_complete() -> None:
    text = (ROOT / "docs/works_with.md").read_text()
    lines = [x for x in text.splitlines() if x.startswith("| ") and not x.startswith(("| ---", "| library"))]
    assert len(lines) == len(rows()) >= 40
    assert sum(works == "yes" for _, works, *_ in rows()) >= 34
    assert len({what for what, *_ in rows()}) == len(rows())


def test_every_line_names_tests_that_there_are() -> None:
    for what, _, _, shown in rows():
        named = re.findall(r"(tests/\S+\.py)::(\w+)", shown)
        assert named, what
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{what}: {path}::{name}"


def test_a_line_of_a_library_that_need_not_be_there_has_its_version_and_day() -> None:
    """Such a test is skipped without its library."""
    for what, _, _, shown in rows():
        path, name = re.findall(r"(tests/\S+\.py)::(\w+)", shown)[0]
        source = (ROOT / path).read_text()
        body = source[source.index(f"def {name}(") :].split("\n\n\n")[0]
        is_skipped = "importorskip(" in body and not what.startswith(("Adafactor", "schedules of"))
        assert is_skipped == bool(re.search(r"\([\w-]+ [\d.]+, \d{4}-\d\d-\d\d\)$", shown)), what
