"""The host's heap: between steps, and while something is compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

# The largest block that moves the thresholds of glibc's malloc, DEFAULT_MMAP_THRESHOLD_MAX, but for malloc's own words.
_BLOCK = (32 << 20) - 8192
_OBJECTS = 20_000  # new ones after which garbage is looked for, in place of Python's 700


@cache
def keep_heap() -> None:
    """Lets the process keep the memory that a step frees, so that the next one does not get its pages anew.

    Glibc gives the top of its heap back to the system where more than a threshold of it is free: at the end of a
    backward, when the activations are gone. The next step then takes every page by a fault (on small models thousands
    a step). The threshold follows the program: it is twice the largest block that was freed, up to 64 MiB (mallopt(3),
    M_MMAP_THRESHOLD and M_TRIM_THRESHOLD). This frees such a block, once for a process, and touches none of it. Where
    the thresholds are set by hand, or another malloc is in use, it changes nothing.
    """
    torch.empty(_BLOCK, dtype=torch.uint8)


@contextmanager
def frozen() -> Iterator[None]:
    """A block in which Python's garbage collector leaves out what was there before, and runs less often.

    A compile makes enough objects to start several full collections, and each of them would go through all that torch
    and other libraries have made: a tenth of the time to a first step.
    """
    if gc.get_freeze_count():  # a block around this one, or the user, froze it
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
