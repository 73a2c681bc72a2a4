"""The time that is left, and where it went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Counts the seconds since it was made.

    Attributes:
        seconds: seconds spent, by stage.
    """

    def __init__(self, limit: float) -> None:
        self.started = time.perf_counter()
        self.limit = limit
        self.seconds: dict[str, float] = {}

    def over(self) -> bool:
        """Return whether the limit has passed."""
        return time.perf_counter() - self.started > self.limit

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
