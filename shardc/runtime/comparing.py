"""Comparisons of `Event`s between ranks through the store: the hash of each rank, and the verdict of all."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from shardc.runtime.events import Event, Lines, ended, late_ranks

BEFORE = "differ before"  # verdict: the ranks differ at an earlier event
_SAME = "same"
_LONGEST_PAUSE = 0.05  # seconds between reads of the store


class Comparisons:
    """Compares events (calls, backwards) with other ranks through the store, under keys that start with ``prefix``.

    Attributes:
        asked: numbers of events that other ranks compare and at which this rank has not arrived.
        answered: numbers of the latest events at which it has.
    """

    def __init__(self, prefix: str, rank: int, ranks: Sequence[int]) -> None:
        self.prefix, self.rank, self.ranks = prefix, rank, ranks
        self.asked: set[int] = set()
        self.answered: deque[int] = deque(maxlen=64)
        self._last: int | None = None
        self._said: str | None = None
        self._told: set[str] = set()

    def tell(self, store: dist.Store, event: Event) -> None:
        """Publishes the description (lines) of ``event`` in the store under its hash, once."""
        if event.key not in self._told:
            store.set(f"{self.prefix}what/{event.key}", json.dumps(event.lines))
            self._told.add(event.key)

    def lines(self, store: dist.Store, key: str) -> Lines:
        """Reads the lines of the event with hash ``key``, which a rank has published."""
        entry: Lines = json.loads(store.get(f"{self.prefix}what/{key}"))
        return entry

    def at(self, number: int) -> str:
        """Returns the prefix of the store keys of event ``number`` (events are counted alike on all ranks)."""
        return f"{self.prefix}{number}/"

    def arrive(
        self, store: dist.Store, number: int, key: str, announce: Callable[[dist.Store, Any], None]
    ) -> tuple[int, str] | None:
        """Publishes this rank's hash ``key`` of event ``number``.

        Args:
            announce: called with ``number`` if this rank is the first, and with ``["differs", number, rank, key]`` if
                it differs from the first: ranks that have answered may be in a collective, where none waits for the
                verdict.

        Returns:
            None if the first rank has the same hash, else (rank, hash) of the first.
        """
        at, mine = self.at(number), f"{self.rank} {key}"
        self.answered.append(number)
        self.asked.discard(number)
        # The first rank sets the hash that the others compare with.
        first = store.compare_set(f"{at}first", "", mine).decode()
        store.set(f"{at}here/{self.rank}", "")
        if first == mine:
            announce(store, number)
        rank, theirs = first.split()
        if theirs != key:
            store.set(f"{at}verdict", mine)
            announce(store, ["differs", number, self.rank, key])
            return int(rank), theirs
        if store.add(f"{at}came", 1) == len(self.ranks):
            store.set(f"{at}verdict", _SAME)
        return None

    def wait(self, store: dist.Store, number: int) -> tuple[int, str] | str | None:
        """Waits until all ranks have arrived at event ``number``.

        Returns:
            None if all do the same; (rank, hash) of one that does not; `BEFORE` if they differ at an earlier event.

        Raises:
            MeshError: a rank has ended, or did not arrive within the store's timeout.
        """
        at = self.at(number)
        self._wait(store, at)
        verdict = store.get(f"{at}verdict").decode()
        if verdict == BEFORE:
            return BEFORE
        if verdict != _SAME:
            rank, key = verdict.split()
            return int(rank), key
        last, self._last = self._last, number
        if last is not None and self.rank == self.ranks[0]:  # all ranks have read the verdict before this one
            for name in ("first", "came", "verdict", *(f"here/{rank}" for rank in self.ranks)):
                store.delete_key(f"{self.at(last)}{name}")
        return None

    def _wait(self, store: dist.Store, at: str) -> None:
        """Polls the store for the verdict at ``at``; raises MeshError if a rank has ended or is late."""
        pause, end = 0.0005, time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]
        while True:
            try:
                if store.check([f"{at}verdict"]):
                    return
                gone = [r for r in self.ranks if pause == _LONGEST_PAUSE and store.check([f"{self.prefix}gone/{r}"])]
                missing = next((rank for rank in gone if not store.check([f"{at}here/{rank}"])), None)
            except RuntimeError as error:  # every store's error class is one
                raise late_ranks(store, at, self.ranks) or error from error
            if missing is not None:
                raise ended(missing, self.ranks)
            if time.monotonic() > end and (late := late_ranks(store, at, self.ranks)) is not None:
                raise late
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def say(self, store: dist.Store, number: int, text: str) -> None:
        """Publishes this rank's ``text`` at event ``number``, for `entries_at`."""
        store.set(f"{self.at(number)}said/{self.rank}", text)

    def entries_at(self, store: dist.Store, number: int, ranks: Iterable[int]) -> dict[int, str]:
        """Reads what ``ranks`` (mesh positions) published by `say` at event ``number``; deletes this rank's last."""
        if self._said is not None:
            store.delete_key(self._said)
        self._said = f"{self.at(number)}said/{self.rank}"
        return {rank: store.get(f"{self.at(number)}said/{self.ranks[rank]}").decode() for rank in ranks}

    def hear_all(self, store: dist.Store, number: int) -> str:
        """Records that this rank has read the difference at ``number``; returns a key that is set once all have."""
        heard = f"{self.at(number)}all heard"
        if store.add(f"{self.at(number)}heard", 1) == len(self.ranks):
            store.set(heard, "")
        return heard

    def refuse(self, store: dist.Store, number: int) -> bool:
        """Ends this rank's wait at event ``number`` with `BEFORE`; returns False if there was a verdict already."""
        return store.compare_set(f"{self.at(number)}verdict", "", BEFORE).decode() == BEFORE
