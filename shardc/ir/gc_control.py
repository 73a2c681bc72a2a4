"""Pauses garbage collection while large, long-lived graphs are built."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection: over a large graph it takes longer than the work itself.

    Also a decorator.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def outgrown() -> Iterator[None]:
    """Pause garbage collection, then move all objects to the oldest generation, so that the next run skips them."""
    with uncollected():
        yield
        if not gc.get_freeze_count():  # what the user froze stays frozen
            gc.freeze()
            gc.unfreeze()
