"""Where in the user's code something comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import torch
from torch import fx

_NOT_THE_USERS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def frames(trace: str) -> list[str]:
    """``file:line`` of each frame in a traceback's text, the innermost last."""
    return [f"{file}:{line}" for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace)]


def line_of(node: fx.Node) -> str:
    """The user's line that a traced node comes from; empty if there is none."""
    return users_own(frames(node.meta.get("stack_trace") or ""))


def users_own(frames: Iterable[str]) -> str:
    """The innermost of ``frames`` that is neither torch's nor shardc's; empty if there is none."""
    own = [frame for frame in frames if not frame.startswith(_NOT_THE_USERS)]
    return own[-1] if own else ""
