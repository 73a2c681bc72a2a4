"""Golden files: `check` compares a text with a file; ``SHARDC_UPDATE_GOLDEN=1`` writes the file instead."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check(text: str, name: str) -> None:
    """Fails with a diff where ``text`` is not what ``tests/golden/<name>.txt`` holds."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("SHARDC_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    expected = path.read_text() if path.exists() else ""
    if text != expected:
        diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), str(path), "now", lineterm="")
        raise AssertionError(
            "\n".join([*diff, "", "if this is meant: SHARDC_UPDATE_GOLDEN=1 pytest, and read the diff"])
        )
