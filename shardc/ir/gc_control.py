"""Garbage collection, put off while much is made that stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: over a large graph it takes longer than the work.

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
    """As `uncollected`; what was made counts as old then, so that the next collection does not go through it either."""
    with uncollected():
        yield
        if not gc.get_freeze_count():  # what the user froze stays frozen
            gc.freeze()
            gc.unfreeze()
