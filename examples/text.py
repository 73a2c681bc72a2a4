"""Real text that every machine has: the source of the running Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data", "encodings"}


def standard_library(limit: int = 4_000_000) -> Tensor:
    """The first ``limit`` bytes of the library's modules in order of their names, ``uint8[n]``."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batch(text: Tensor, step: int, *, size: int, length: int) -> tuple[Tensor, Tensor]:
    """The global batch of one step: ``(tokens, targets)``, both ``i64[size, length]``, the same on every rank."""
    starts = torch.randint(len(text) - length, (size, 1), generator=torch.Generator().manual_seed(step))
    windows = text[starts + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def show(tokens: Tensor) -> str:
    """Bytes ``[n]`` as text."""
    return bytes(tokens.tolist()).decode(errors="replace")
