"""`LostRanks`: finds the ranks to look at first when a wait for others has failed, through the store.

A rank that gives up a wait publishes for whom it waited. The first one also calls the roll: the listener threads
(`shardc.runtime.gloo.listen`) of all ranks answer, and it publishes which ranks did not: they died or were stopped. If
all answer, the rank to look at is one that others wait for and that has not given up to wait itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from shardc.runtime.bounded_store import BoundedStore

_ROLL = 3.0  # seconds in which a rank answers
_PAUSE = 0.02


class LostRanks:
    """Ranks that others wait for in vain: one object per rank and mesh.

    Args:
        prefix: prefix of the keys in the store.
        rank, ranks: global rank of this process, and those of the mesh.
    """

    def __init__(self, prefix: str, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self._waits, self._roll = f"{prefix}waits for/", f"{prefix}roll/"
        self._calls = False  # whether this rank calls the roll

    def give_up(self, store: BoundedStore, ranks: Sequence[int], call: Callable[[dist.Store], None]) -> None:
        """Publishes that this rank gave up waiting for ``ranks``. From now on the store has to answer soon.

        Args:
            call: called if this is the first rank to give up; sends the message to answer to all listener threads.
        """
        store.limit = min(store.limit, _ROLL)
        store.set(f"{self._waits}{self.rank}", json.dumps(list(ranks)))
        mine = str(self.rank)
        if store.compare_set(f"{self._roll}caller", "", mine).decode() == mine and not self._calls:
            self._calls = True
            call(store)

    def answer(self, store: dist.Store) -> None:
        """Answers the roll call, on the listener thread."""
        store.set(f"{self._roll}{self.rank}", "")
        store.add(f"{self._roll}answers", 1)

    def first(self, store: dist.Store, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks to look at first, after `give_up` of ``ranks``: those that do not answer.

        If all answer, these are of ``ranks``, those that they waited for, and so on, the ones that have not given up.
        """
        if silent := self._silent(store):
            return silent
        seen, work, first = {self.rank}, [*ranks], []
        while work:
            rank = work.pop(0)
            if rank in seen:
                continue
            seen.add(rank)
            if store.check([f"{self._waits}{rank}"]):
                work += json.loads(store.get(f"{self._waits}{rank}"))
            else:
                first.append(rank)
        return sorted(first) or [*ranks]

    def _silent(self, store: dist.Store) -> list[int]:
        """Returns the ranks that did not answer the roll call; [] if its caller has not come to tell."""
        end, outcome = time.monotonic() + _ROLL, f"{self._roll}silent"
        if self._calls:
            while time.monotonic() < end and store.add(f"{self._roll}answers", 0) < len(self.ranks):
                time.sleep(_PAUSE)
            if not store.check([outcome]):
                silent = [rank for rank in self.ranks if not store.check([f"{self._roll}{rank}"])]
                store.set(outcome, json.dumps(silent))
        while not store.check([outcome]):
            if time.monotonic() > end + 1:  # the caller looks at each rank
                return []
            time.sleep(_PAUSE)
        silent_ranks: list[int] = json.loads(store.get(outcome))
        return silent_ranks
