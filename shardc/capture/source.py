"""Finds lines of the user's code, as ``file:line``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from torch import fx

from shardc.ir.told import told_place


def frames(trace: str) -> list[str]:
    """Return ``file:line`` of each frame in a traceback's text, the innermost last."""
    return [f"{file}:{line}" for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace)]


def line_of(node: fx.Node) -> str:
    """Return the user's line that a traced node comes from; empty if there is none."""
    return user_frame(frames(node.meta.get("stack_trace") or ""))


def user_frame(frames: Iterable[str]) -> str:
    """Return the innermost of ``frames`` that is in the user's code, not torch's, shardc's or Python's; or empty."""
    user_frames = [frame for frame in frames if told_place(frame.rpartition(":")[0]) is None]
    return user_frames[-1] if user_frames else ""


def defined_at(function: Any) -> str:
    """Return the line on which a function is defined; empty for one without Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
