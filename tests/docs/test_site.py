"""The site: every public name is in the reference, and no link is broken."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardc

ROOT = Path(__file__).parents[2]


def test_the_reference_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: shardc\.(\w+)", (ROOT / "docs/reference.md").read_text(), re.MULTILINE))
    assert set(shardc.__all__) <= listed


def test_the_version_is_in_the_changelog() -> None:
    assert f"\n## {shardc.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "reference" / "index.html").read_text()
    for name in set(shardc.__all__) - {"optim", "local"}:
        assert f'id="shardc.{name}"' in text, name
