"""Progress of a compile, for a person who waits for it at a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeVar

import torch.distributed as dist
from tqdm import tqdm

# Seconds: what takes less says nothing.
PATIENCE = 3.0
T = TypeVar("T")


def steps(items: Collection[T], what: str) -> Iterator[T]:
    """``items``, with a bar on the first rank's terminal once they take more than some seconds."""
    speaks = not dist.is_initialized() or dist.get_rank() == 0
    yield from tqdm(items, f"shardc: {what}", leave=False, delay=PATIENCE, disable=None if speaks else True)
