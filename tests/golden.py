"""Golden files: ``SHARDC_UPDATE_GOLDEN=1`` writes the files that `check` compares texts with."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def change(before: str, after: str) -> str:
    """``before`` and ``after`` in one text: a line is marked with - where only the first has it, with + the second."""
    old, new = before.splitlines(), after.splitlines()
    lines = difflib.unified_diff(old, new, n=len(old), lineterm="")
    return "\n".join([line.rstrip() for line in list(lines)[3:]] or old) + "\n"


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
