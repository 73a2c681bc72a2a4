"""``dir(shardc)``: the public names, and nothing that importing them leaves behind."""

from __future__ import annotations

import subprocess
import sys

import shardc


def test_dir_lists_the_public_names_only() -> None:
    """In a process of its own: tests import submodules, each of which binds its name in the package."""
    code = "import shardc, shardc.cli, shardc.debug; print(*dir(shardc))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == sorted([*shardc.__all__, "__version__"])


def test_every_public_name_is_there() -> None:
    assert len(set(shardc.__all__)) == len(shardc.__all__)
    assert all(hasattr(shardc, name) for name in shardc.__all__)
