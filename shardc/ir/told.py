"""Whose code is told by a version: torch's, shardc's and Python's own."""

from __future__ import annotations

import sys
import sysconfig
import traceback
import types
from functools import cache
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[1]
TOLD = [PACKAGE, Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib"))]


@cache
def told_place(file: str) -> str | None:
    """Return a file of torch, shardc or Python, from its root on; None of others, also of packages that lie within
    these."""
    if file.startswith("<frozen "):
        return file
    for root in TOLD:
        if Path(file).is_relative_to(root) and "-packages" not in (inside := str(Path(file).relative_to(root))):
            return f"{root.name}/{inside}"
    return None


def is_told(code: types.CodeType) -> bool:
    """Return whether ``code`` is told by a version."""
    return told_place(code.co_filename) is not None


def calling_line() -> str | None:
    """Where code that is not told calls torch, shardc or Python, as ``file:line``; None where nothing does."""
    stack = ((frame.f_code, line) for frame, line in traceback.walk_stack(None))
    return next((f"{code.co_filename}:{line}" for code, line in stack if not is_told(code)), None)


def is_told_class(cls: type) -> bool:
    return _is_told_name(str(cls.__module__))


def is_told_module(module: types.ModuleType) -> bool:
    return _is_told_name(module.__name__)


@cache
def _is_told_name(module: str) -> bool:
    """Return whether a module is of torch, shardc or Python, and not the user's under the name of one of Python's."""
    root = sys.modules.get(module.partition(".")[0])
    file, origin = getattr(root, "__file__", None), getattr(getattr(root, "__spec__", None), "origin", None)
    return origin in ("built-in", "frozen") or file is not None and told_place(file) is not None
