"""Tells code that a version identifies (torch's, shardc's, Python's) from the user's code."""

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
    """Return the path of a file of torch, shardc or Python, relative to its root; None for others, also of packages
    inside these.
    """
    if file.startswith("<frozen "):
        return file
    for root in TOLD:
        if Path(file).is_relative_to(root) and "-packages" not in (inside := str(Path(file).relative_to(root))):
            return f"{root.name}/{inside}"
    return None


def is_told(code: types.CodeType) -> bool:
    """Return whether ``code`` is torch's, shardc's or Python's, and so identified by their version."""
    return told_place(code.co_filename) is not None


def calling_line() -> str | None:
    """Return ``file:line`` of the innermost frame of user code; None if there is none."""
    stack = ((frame.f_code, line) for frame, line in traceback.walk_stack(None))
    return next((f"{code.co_filename}:{line}" for code, line in stack if not is_told(code)), None)


def is_told_class(cls: type) -> bool:
    return _is_told_name(str(cls.__module__))


def is_told_module(module: types.ModuleType) -> bool:
    return _is_told_name(module.__name__)


@cache
def _is_told_name(module: str) -> bool:
    """Return whether a module is torch's, shardc's or Python's own, and not a user's module that shadows one of
    Python's.
    """
    root = sys.modules.get(module.partition(".")[0])
    file, origin = getattr(root, "__file__", None), getattr(getattr(root, "__spec__", None), "origin", None)
    return origin in ("built-in", "frozen") or file is not None and told_place(file) is not None
