"""`BoundedStore`: a store of torch whose requests end, also if the process that keeps it is stopped."""

from __future__ import annotations

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
    """Passes requests to ``store`` on a thread of its own, so that a caller is free if there is no answer.

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
        """Returns what the store's method ``name`` returns; raises RuntimeError if that takes too long."""
        if self._unanswered is None or self._unanswered.done():
            answer: Future[Any] = Future()
            self._requests.put((answer, name, args))
            try:
                return answer.result(self.limit)
            except Late:
                self._unanswered = answer
        raise RuntimeError(f"the store has not answered for {self.limit:g} seconds")


def _serve(store: Any, requests: SimpleQueue[_Request | None]) -> None:
    """Runs requests one after the other, until None comes."""
    while (request := requests.get()) is not None:
        answer, name, args = request
        try:
            answer.set_result(getattr(store, name)(*args))
        except BaseException as error:
            answer.set_exception(error)
