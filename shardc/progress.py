"""Progress bar of a compile, at a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeVar

import torch.distributed as dist
from tqdm import tqdm

# Seconds before the bar appears.
PATIENCE = 3.0
T = TypeVar("T")


def steps(items: Collection[T], what: str) -> Iterator[T]:
    """Yields ``items``, with a progress bar on the first rank's terminal after 3 seconds."""
    speaks = not dist.is_initialized() or dist.get_rank() == 0
    yield from tqdm(items, f"shardc: {what}", leave=False, delay=PATIENCE, disable=None if speaks else True)
