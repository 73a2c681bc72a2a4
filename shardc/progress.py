"""Progress bar of a compile, at a terminal."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import TypeVar

import torch.distributed as dist
from tqdm import tqdm

from shardc.logs import STAGES, timed_each

# Seconds before the bar appears.
PATIENCE = 3.0
T = TypeVar("T")


def steps(items: Collection[T], what: str) -> Iterator[T]:
    """Yields ``items``, with a progress bar on the first rank's terminal after 3 seconds; logs the seconds of each."""
    speaks = not dist.is_initialized() or dist.get_rank() == 0
    bar = tqdm(items, f"shardc: {what}", leave=False, delay=PATIENCE, disable=None if speaks else True)
    yield from timed_each(bar, what) if STAGES.isEnabledFor(logging.INFO) else bar
