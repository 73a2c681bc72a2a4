"""`LostRanks`: after a failed wait for other ranks, finds the ranks to look at first. Requests to torch's store are
made by `BoundedStore`, which returns in time even if the store's process is stopped.

A rank that gives up a wait publishes for whom it waited. The first one also calls the roll: the listener threads
(`shardc.runtime.gloo.listen`) of all ranks answer, and it publishes which ranks did not: they died or were stopped. If
all answer, the rank to look at is one that others wait for and that has not given up to wait itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late  # the builtin one from Python 3.11 on
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize

import torch.distributed as dist

_Request = tuple["Future[Any]", str, tuple[Any, ...]]


class BoundedStore(dist.Store):
    """Passes requests to ``store`` on a separate thread, so that a caller can give up if there is no answer.

    A TCPStore waits without end for the process that keeps it: rank 0, if no launcher does.

    Args:
        store: a connection that nobody else uses.
        timeout: of waits for keys.

    Attributes:
        limit: seconds in which a request is answered, else it raises RuntimeError; ``timeout`` by default.
    """

    def __init__(self, store: Any, timeout: timedelta) -> None:
        super().__init__()
        store.set_timeout(timeout)
        self._timeout, self.limit = timeout, timeout.total_seconds()
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._unanswered: Future[Any] | None = None
        # The thread has no reference to this object: it ends, and frees the connection, when this is deleted.
        Thread(target=_serve, args=(store, self._requests), name="shardc-store", daemon=True).start()
        finalize(self, self._requests.put, None)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._ask("compare_set", key, expected, value)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, timeout or self._timeout)

    def _ask(self, name: str, *args: Any) -> Any:
        """Calls the store's method ``name`` and returns its result. Raises RuntimeError if that takes too long, or if
        an earlier request is still unanswered.
        """
        # While a request is unanswered the thread waits: further ones would only queue behind it.
        if self._unanswered is None or self._unanswered.done():
            answer: Future[Any] = Future()
            self._requests.put((answer, name, args))
            try:
                return answer.result(self.limit)
            except Late:
                self._unanswered = answer
        raise RuntimeError(f"the store has not answered for {self.limit:g} seconds")


def _serve(store: Any, requests: SimpleQueue[_Request | None]) -> None:
    """Runs the calls of the store in the queue ``requests``, one after the other, until one is None."""
    while (request := requests.get()) is not None:
        answer, name, args = request
        try:
            answer.set_result(getattr(store, name)(*args))
        except BaseException as error:
            answer.set_exception(error)


_ROLL = 3.0  # seconds in which a rank answers
_PAUSE = 0.02


class LostRanks:
    """Finds the ranks that keep others waiting, after a wait failed. Each rank has one such object per mesh.

    Args:
        prefix: prefix of the keys in the store.
        rank, ranks: global rank of this process, and those of the mesh.
    """

    def __init__(self, prefix: str, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self._waits, self._roll = f"{prefix}waits for/", f"{prefix}roll/"
        self._calls = False  # whether this rank calls the roll

    def give_up(self, store: BoundedStore, ranks: Sequence[int], call: Callable[[dist.Store], None]) -> None:
        """Publishes that this rank gave up waiting for ``ranks``. From now on, each request to the store is given up
        after a few seconds.

        Args:
            call: called if this is the first rank to give up; sends the message to answer to all listener threads.
        """
        store.limit = min(store.limit, _ROLL)
        store.set(f"{self._waits}{self.rank}", json.dumps(list(ranks)))
        name = str(self.rank)
        # A rank that has called the roll finds itself there again, and calls it once only.
        if store.compare_set(f"{self._roll}caller", "", name).decode() == name and not self._calls:
            self._calls = True
            call(store)

    def answer(self, store: dist.Store) -> None:
        """Publishes in the store that this rank is alive. The listener thread calls this when a rank calls the roll."""
        store.set(f"{self._roll}{self.rank}", "")
        store.add(f"{self._roll}answers", 1)

    def to_look_at(self, store: dist.Store, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks to look at first, after this rank gave up waiting for ``ranks``. These are the ranks that
        do not answer the roll call, if there are any.

        If all answer, follows who waits for whom, from ``ranks`` on, and returns those that have not given up.
        """
        if silent := self._silent(store):
            return silent
        seen, work, not_waiting = {self.rank}, [*ranks], []
        while work:
            rank = work.pop(0)
            if rank in seen:
                continue
            seen.add(rank)
            if store.check([f"{self._waits}{rank}"]):  # it gave up, too: look at those for whom it waited
                work += json.loads(store.get(f"{self._waits}{rank}"))
            else:
                not_waiting.append(rank)
        # All have given up if ranks wait for each other in a circle.
        return sorted(not_waiting) or [*ranks]

    def _silent(self, store: dist.Store) -> list[int]:
        """Returns the ranks that did not answer the roll call, that is, did not publish in the store that they are
        alive. Returns [] if the rank that calls the roll does not publish them in time.
        """
        end, outcome_key = time.monotonic() + _ROLL, f"{self._roll}silent"
        if self._calls:  # this rank called the roll: it waits for the answers, and publishes who is silent
            while time.monotonic() < end and store.add(f"{self._roll}answers", 0) < len(self.ranks):  # 0: reads it
                time.sleep(_PAUSE)
            if not store.check([outcome_key]):
                silent = [rank for rank in self.ranks if not store.check([f"{self._roll}{rank}"])]
                store.set(outcome_key, json.dumps(silent))
        while not store.check([outcome_key]):
            if time.monotonic() > end + 1:  # a second for the caller's check of each rank, above
                return []
            time.sleep(_PAUSE)
        silent_ranks: list[int] = json.loads(store.get(outcome_key))
        return silent_ranks
