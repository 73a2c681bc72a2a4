"""Where in the user's code something comes from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from torch import fx

from shardc.ir.told import told_place


def frames(trace: str) -> list[str]:
    """``file:line`` of each frame in a traceback's text, the innermost last."""
    return [f"{file}:{line}" for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace)]


def line_of(node: fx.Node) -> str:
    """The user's line that a traced node comes from; empty if there is none."""
    return users_own(frames(node.meta.get("stack_trace") or ""))


def users_own(frames: Iterable[str]) -> str:
    """The innermost of ``frames`` that is neither torch's, shardc's nor Python's; empty if there is none."""
    user_frames = [frame for frame in frames if told_place(frame.rpartition(":")[0]) is None]
    return user_frames[-1] if user_frames else ""


def defined_at(function: Any) -> str:
    """Where a function is defined, as ``file:line``; empty where it has no code of Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
