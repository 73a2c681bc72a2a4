"""Context managers that pause Python's garbage collector while large, long-lived graphs are built."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Context manager and decorator that pauses garbage collection in the block or function.

    Over a large graph the collector takes longer than the work itself.
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
    """Context manager that pauses garbage collection in the block. Afterwards all objects are in the oldest generation,
    which is rarely scanned.
    """
    with uncollected():
        yield
        if not gc.get_freeze_count():  # objects that the user froze stay frozen
            gc.freeze()
            gc.unfreeze()
