"""Settings of the host's heap: malloc's trimming between steps, and garbage collection during a compile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

# The largest block that moves glibc's thresholds, DEFAULT_MMAP_THRESHOLD_MAX, less malloc's header.
_BLOCK = (32 << 20) - 8192
_OBJECTS = 20_000  # new objects per collection, instead of Python's 700


@cache
def keep_heap() -> None:
    """Makes glibc keep the memory that a step frees, so that the next one takes no page faults (thousands a step).

    Glibc trims the heap's top when more than a threshold is free. The threshold adapts to twice the largest freed
    block, up to 64 MiB (mallopt(3), M_MMAP_THRESHOLD), so this frees such a block once per process, untouched. It does
    nothing if thresholds are set by hand, or under another malloc.
    """
    torch.empty(_BLOCK, dtype=torch.uint8)


@contextmanager
def frozen() -> Iterator[None]:
    """Context manager: garbage collection skips objects that exist already, and runs less often.

    The objects of a compile trigger full collections, which would traverse all of torch: a tenth of the time to the
    first step.
    """
    if gc.get_freeze_count():  # an outer block or the user froze it
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(thresholds[0], _OBJECTS) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
