"""A thread of a rank that hears when other ranks ask what it does, and how to interrupt what this rank waits for."""

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

_TAG = 0x5B00  # of messages that nobody sends
_LOOKS = 0.2  # seconds between looks, a small request each; c10d would log every wait that times out
NOTHING, END = "", "end"  # in the place of an entry: there is none so far, and there will be none


class Listener(Thread):
    """Reads a list of entries in the store, ``log/1`` and so on, as they come.

    It ends with its world, with the store and with the interpreter.

    Args:
        store: its own connection.
        log: the list's key, which is the count of its entries too.
        heard: a method that is called with ``store`` and each entry.
    """

    def __init__(self, store: dist.Store, log: str, heard: Callable[[dist.Store, str], None]) -> None:
        super().__init__(name="shardc-listener", daemon=True)
        self._store, self._log = store, log
        # It keeps nothing alive: a world's port is free again when its last group is gone.
        self._heard, self._world = WeakMethod(heard), ref(dist.group.WORLD)
        self._ends = Event()
        _listening.add(self)

    def run(self) -> None:
        at = 1
        with suppress(RuntimeError):  # the store is gone, and somebody will notice
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
        heard = self._heard()
        if heard is not None:
            heard(self._store, entry)

    def end(self) -> None:
        """Ends it, if that can be had within moments."""
        self._ends.set()
        self.join(2.0)


_listening: WeakSet[Listener] = WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that comes back from the store into an interpreter that is gone would abort the process."""
    for listener in list(_listening):
        if listener.is_alive():
            listener.end()


class Stopped(BaseException):
    """Raised in the midst of what a thread does, where no handler of its own may catch it."""


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raises ``error`` in a thread, at its next call, jump back or start of a function.

    It cannot be taken back: Python 3.11 and 3.12 would look for it for ever, and hang where a debugger or a profiler is
    on.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def interrupt(groups: Iterable[dist.ProcessGroup]) -> None:
    """Makes what waits for messages on ``groups`` raise, on this rank and soon on its peers; they are of no use then.

    Gloo has no way to abort. But a wait there that times out closes all connections of its group, so that everything
    else that waits on it raises too: this is one for a message that nobody sends.
    """
    for group in groups:
        if group.size() == 1:
            continue
        if dist.get_backend(group) != "gloo":
            group.abort()
            continue
        devices = getattr(group._get_backend(torch.device("cpu")).options, "_devices", ())
        peers = [peer for peer in range(group.size()) if peer != group.rank()]
        # Each device has connections of its own, and tags take turns. Where a peer has closed its own already, a wait
        # for it ends at once and closes nothing: any other may still be waited for.
        for peer, number in product(peers, range(max(len(devices), 1))):
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _TAG + number).wait(timedelta(milliseconds=1))
