"""The budget of work and time of a solve, and the time spent by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Counts work, which is the same on every machine, and the seconds since its creation.

    Attributes:
        spent: entries of tables that were visited.
        seconds: seconds spent, by stage.
    """

    def __init__(self, seconds: float, work: float) -> None:
        self.started = time.perf_counter()
        self.limit, self.work = seconds, work
        self.spent = 0
        self.seconds: dict[str, float] = {}

    def spend(self, entries: int) -> None:
        """Count entries of tables that are visited."""
        self.spent += entries

    def over(self) -> bool:
        """Return whether the work or the time is used up."""
        return self.spent > self.work or time.perf_counter() - self.started > self.limit

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
