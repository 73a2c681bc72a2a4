"""`Listener`: a thread that reads the messages that ranks send each other, and functions that interrupt this rank."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import product
from threading import Event, Thread
from weakref import WeakMethod, WeakSet, ref

import torch
import torch.distributed as dist

_TAG = 0x5B00  # tag of messages that are never sent
_LOOKS = 0.2  # seconds between polls; c10d would log each blocking wait that times out
NOTHING, END = "", "end"  # passed to ``on_message`` if there is no new entry, and at the end


class Listener(Thread):
    """Thread that reads a log in the store, entries ``log/1``, ``log/2``, ..., as they appear.

    It ends with the process group's world, the store or the interpreter.

    Args:
        store: a connection for this thread only.
        log: key prefix of the entries.
        on_message: bound method, called with ``store`` and each entry.
    """

    def __init__(self, store: dist.Store, log: str, on_message: Callable[[dist.Store, str], None]) -> None:
        super().__init__(name="shardc-listener", daemon=True)
        self._store, self._log = store, log
        # Weak references: a world frees its port when its last group is deleted.
        self._on_message, self._world = WeakMethod(on_message), ref(dist.group.WORLD)
        self._ends = Event()  # set to end the thread
        _listening.add(self)

    def run(self) -> None:
        """Passes each entry of the log to ``on_message`` as it appears; `NOTHING` each time that there is none yet, and
        `END` at the end.
        """
        at = 1
        with suppress(RuntimeError):  # the store is gone; the main thread will raise
            while dist.group.WORLD is not None and dist.group.WORLD is self._world():
                key = f"{self._log}/{at}"
                if self._store.check([key]):
                    self._tell(self._store.get(key).decode())
                    at += 1
                    continue
                self._tell(NOTHING)
                if self._ends.wait(_LOOKS):
                    break
            self._tell(END)

    def _tell(self, entry: str) -> None:
        """Passes ``entry`` (a message from the log, `NOTHING` or `END`) to the method ``on_message``, unless the object
        of that method is gone.
        """
        on_message = self._on_message()
        if on_message is not None:
            on_message(self._store, entry)

    def end(self) -> None:
        """Asks the thread to end, and waits up to 2 seconds for it."""
        self._ends.set()
        self.join(2.0)


_listening: WeakSet[Listener] = WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends all listeners at exit: a thread that returns into a finalised interpreter would abort the process."""
    for listener in list(_listening):
        if listener.is_alive():
            listener.end()


class Stopped(BaseException):
    """Raised by `raise_in` in another thread; a BaseException, so that ``except Exception`` does not catch it."""


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raises ``error`` asynchronously in another thread, at its next call, backward jump or function start.

    It cannot be revoked: Python 3.11 and 3.12 would search for it forever, and hang under a debugger or profiler.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def interrupt(groups: Iterable[dist.ProcessGroup]) -> None:
    """Makes pending operations on process groups raise, on this rank and soon on its peers. The groups cannot be used
    afterwards.

    Gloo cannot abort. But a wait that times out closes all connections of its group, so this waits for a message that
    is never sent.
    """
    for group in groups:
        if group.size() == 1:  # it has no connections
            continue
        if dist.get_backend(group) != "gloo":
            group.abort()
            continue
        devices = getattr(group._get_backend(torch.device("cpu")).options, "_devices", ())
        peers = [peer for peer in range(group.size()) if peer != group.rank()]
        # Each device has its own connections, used in turn by tag. A wait for a peer that has closed its side ends at
        # once and closes nothing, so wait for all peers.
        for peer, number in product(peers, range(max(len(devices), 1))):
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _TAG + number).wait(timedelta(milliseconds=1))
