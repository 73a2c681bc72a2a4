"""Comparisons between ranks through the store: of their next `Event`, and of methods that all ranks must call.

`Comparisons` are of events: each rank publishes the hash of its own, and the last one to arrive the verdict.

`Meeting` is for methods: a rank that calls one alone raises at once, and the others run on. The first rank that calls
it opens an attempt in the store, which the others join. The attempt fails if another rank's listener thread
(`shardc.runtime.gloo.listen`) reports that its rank goes on to its next event, waits in a collective of torch with a
rank of the attempt, or ends.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from shardc.errors import MeshError
from shardc.ir.code import is_versioned
from shardc.runtime.events import Event, Lines, Place, ended, late_ranks

# An event's number, or a list with a name (or the rank that failed) first; sent as JSON.
Message = int | Sequence[int | str | None]
BEFORE = "differ before"  # verdict: the ranks differ at an earlier event
_SAME = "same"
_LONGEST_PAUSE = 0.05  # seconds between reads of the store


class Comparisons:
    """Compares events (calls, backwards) with other ranks through the store, under keys that start with ``prefix``.

    Args:
        rank, ranks: global rank of this process, and those of the mesh.
        place: returns a rank as text.

    Attributes:
        asked: numbers of events that other ranks compare and at which this rank has not arrived.
        answered: numbers of the latest events at which it has.
    """

    def __init__(self, prefix: str, rank: int, ranks: Sequence[int], place: Place) -> None:
        self.prefix, self.rank, self.ranks, self.place = prefix, rank, ranks, place
        self.asked: set[int] = set()
        self.answered: deque[int] = deque(maxlen=64)
        self._last: int | None = None
        self._last_text: str | None = None  # store key of this rank's last text
        self._published: set[str] = set()  # hashes of events

    def publish(self, store: dist.Store, event: Event) -> None:
        """Publishes the (topic, text) lines of ``event`` in the store, under the event's hash, unless this rank has
        done so.
        """
        if event.key not in self._published:
            store.set(f"{self.prefix}what/{event.key}", json.dumps(event.lines))
            self._published.add(event.key)

    def lines(self, store: dist.Store, key: str) -> Lines:
        """Reads from the store the (topic, text) lines of the event with hash ``key``, which a rank has published."""
        entry: Lines = json.loads(store.get(f"{self.prefix}what/{key}"))
        return entry

    def key_prefix(self, number: int) -> str:
        """Returns the prefix of the store keys for event ``number``, such as "<prefix>7/"."""
        return f"{self.prefix}{number}/"

    def arrive(
        self, store: dist.Store, number: int, key: str, announce: Callable[[dist.Store, Message], None]
    ) -> tuple[int, str] | None:
        """Publishes this rank's hash ``key`` of event ``number``. Compares it with that of the rank that came first.

        Args:
            announce: called with ``number`` if this rank is the first, and with ``["differs", number, rank, key]`` if
                it differs from the first: ranks that have answered may be in a collective, where none waits for the
                verdict.

        Returns:
            None if the first rank has the same hash, else (rank, hash) of the first.
        """
        prefix, entry = self.key_prefix(number), f"{self.rank} {key}"
        self.answered.append(number)
        self.asked.discard(number)
        # The first rank sets the hash that the others compare with.
        first = store.compare_set(f"{prefix}first", "", entry).decode()
        store.set(f"{prefix}here/{self.rank}", "")
        if first == entry:
            announce(store, number)
        first_rank, first_key = first.split()
        if first_key != key:
            store.set(f"{prefix}verdict", entry)
            announce(store, ["differs", number, self.rank, key])
            return int(first_rank), first_key
        # The last rank of those with the same hash.
        if store.add(f"{prefix}came", 1) == len(self.ranks):
            store.set(f"{prefix}verdict", _SAME)
        return None

    def wait(self, store: dist.Store, number: int) -> tuple[int, str] | str | None:
        """Waits until all ranks have arrived at event ``number``, or two of them were found to differ. Returns how they
        differ.

        Returns:
            None if all do the same; (rank, hash) of one that does not; `BEFORE` if they differ at an earlier event.

        Raises:
            MeshError: a rank has ended, or did not arrive within the store's timeout.
        """
        prefix = self.key_prefix(number)
        self._wait(store, prefix)
        verdict = store.get(f"{prefix}verdict").decode()
        if verdict == BEFORE:
            return BEFORE
        if verdict != _SAME:
            rank, key = verdict.split()
            return int(rank), key
        # All ranks are here, so all have read the verdict of the event that was compared last: its keys can go.
        last, self._last = self._last, number
        if last is not None and self.rank == self.ranks[0]:
            for name in ("first", "came", "verdict", *(f"here/{rank}" for rank in self.ranks)):
                store.delete_key(f"{self.key_prefix(last)}{name}")
        return None

    def _wait(self, store: dist.Store, prefix: str) -> None:
        """Polls the store until the verdict of an event is there. Raises MeshError if a rank has ended or does not
        arrive in time. ``prefix`` is the event's `key_prefix`.
        """
        pause, end = 0.0005, time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]
        while True:
            try:
                if store.check([f"{prefix}verdict"]):
                    return
                # Ended ranks are looked for only in long waits: each request to the store takes time.
                gone = [r for r in self.ranks if pause == _LONGEST_PAUSE and store.check([f"{self.prefix}gone/{r}"])]
                # A rank may also have ended after it arrived.
                missing = next((rank for rank in gone if not store.check([f"{prefix}here/{rank}"])), None)
            except RuntimeError as error:  # the store does not answer
                raise late_ranks(store, prefix, self.ranks, self.place) or error from error
            if missing is not None:
                raise ended(self.place(missing), self.ranks)
            if time.monotonic() > end and (late := late_ranks(store, prefix, self.ranks, self.place)) is not None:
                raise late
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def publish_text(self, store: dist.Store, number: int, text: str) -> None:
        """Publishes this rank's ``text`` at event ``number``, for `texts_at`."""
        store.set(f"{self.key_prefix(number)}said/{self.rank}", text)

    def texts_at(self, store: dist.Store, number: int, ranks: Iterable[int]) -> dict[int, str]:
        """Maps each of ``ranks`` (indices on the mesh) to the text that it published at event ``number``, by
        `publish_text`.

        It deletes this rank's text of the previous call from the store.
        """
        if self._last_text is not None:
            store.delete_key(self._last_text)
        self._last_text = f"{self.key_prefix(number)}said/{self.rank}"
        return {rank: store.get(f"{self.key_prefix(number)}said/{self.ranks[rank]}").decode() for rank in ranks}

    def count_reader(self, store: dist.Store, number: int) -> str:
        """Counts this rank among those that have read how event ``number`` differs between ranks. Returns the store
        key that is set when all ranks have read it.
        """
        all_heard = f"{self.key_prefix(number)}all heard"
        if store.add(f"{self.key_prefix(number)}heard", 1) == len(self.ranks):  # the last reader
            store.set(all_heard, "")
        return all_heard

    def refuse(self, store: dist.Store, number: int) -> bool:
        """Ends the comparison of event ``number``, at which this rank waits, with the verdict `BEFORE`: ranks
        differed, or one failed, before this event. A verdict that is already there stays. Returns whether the verdict
        is `BEFORE`.
        """
        return store.compare_set(f"{self.key_prefix(number)}verdict", "", BEFORE).decode() == BEFORE


_DONE = "all came"
_LONG = 25  # samples in the same event, before a rank compares it with the others; doubled if all is well
_STUCK = 15  # samples in the same call of a collective, before a rank refuses


class Meeting:
    """Checks that all ranks call the same collective method, and reports a rank that calls it alone. There is one
    object per rank and mesh.

    Args:
        prefix: prefix of the keys in the store.
        rank, ranks: global rank of this process, and those of the mesh.
        place: returns a rank as text.

    Attributes:
        invited: another rank's attempt that this one has not joined: the number of the event before it, and its name.
    """

    def __init__(self, prefix: str, rank: int, ranks: Sequence[int], place: Place) -> None:
        self.prefix, self.rank, self.ranks, self.place = prefix, rank, ranks, place
        self.invited: tuple[int, str] | None = None
        self._joined = ""  # name of the last attempt that this rank joined or opened
        self._failed: tuple[int, str] = (-1, "")  # event and reason of its last failed attempt
        self._samples = StackSamples()

    def meet(
        self,
        store: dist.Store,
        number: int,
        method: str,
        log: Callable[[dist.Store, Message], None],
        check: Callable[[], None],
    ) -> None:
        """Waits until all ranks call the collective method named ``method``. ``number`` is the number of this rank's
        last event.

        Args:
            log: sends a message to the listener threads of all ranks.
            check: raises if another rank has failed; called while waiting.

        Raises:
            MeshError: another rank does something else, has ended, or does not arrive within the store's timeout.
        """
        # The first rank names the attempt; a second method at the same event refuses it.
        attempt_key, new_attempt = f"{self.prefix}meet/{number}", f"{self.rank}.{time.time_ns()}"
        self._joined = attempt = store.compare_set(attempt_key, "", new_attempt).decode()
        self.invited = None
        prefix = f"{self.prefix}meet/{attempt}/"
        if attempt == new_attempt:  # this rank is the first
            store.set(f"{prefix}method", method)
            log(store, ["meet", number, attempt])
        elif (other := store.get(f"{prefix}method").decode()) != method:
            self._refuse(store, number, attempt, f"rank {self.rank} calls {method} where others call {other}")
        store.set(f"{prefix}here/{self.rank}", "")
        if store.add(f"{prefix}came", 1) == len(self.ranks):  # this rank is the last
            store.delete_key(attempt_key)  # so that the next method at this event opens a new attempt
            store.compare_set(f"{prefix}verdict", "", _DONE)
        verdict = self._wait(store, prefix, number, attempt, check)
        if verdict != _DONE:
            self._failed = number, verdict
            raise MeshError(
                f"{method} is for all ranks of the mesh. Rank {self.rank} called it, but {verdict}",
                fix="call it on every rank at the same place, outside of `if rank == 0:`; use what it returns on one",
            )

    def _wait(self, store: dist.Store, prefix: str, number: int, attempt: str, check: Callable[[], None]) -> str:
        """Polls the store for the verdict of a call of a collective method, whose keys start with ``prefix``, and
        returns its text. Sets the verdict itself if a rank has ended; raises if a rank does not arrive in time.
        """
        pause, end = 0.0005, time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]
        while not store.check([f"{prefix}verdict"]):
            check()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            # Ended ranks are looked for only in long waits: each request to the store takes time.
            gone = [rank for rank in self.ranks if pause == 0.05 and store.check([f"{self.prefix}gone/{rank}"])]
            if gone:
                self._refuse(store, number, attempt, f"rank {gone[0]} has ended")
            elif time.monotonic() > end and (late := late_ranks(store, prefix, self.ranks, self.place)) is not None:
                raise late
        return store.get(f"{prefix}verdict").decode()

    def _refuse(self, store: dist.Store, number: int, attempt: str, why: str) -> None:
        """Ends a rank's wait in a collective method with an error: sets the verdict of that call (``attempt``) in the
        store to the reason ``why``. A verdict that is already there stays.

        The next call of a method then opens a new attempt.
        """
        if store.compare_set(f"{self.prefix}meet/{attempt}/verdict", "", why).decode() == why:
            store.delete_key(f"{self.prefix}meet/{number}")

    def on_attempt(self, store: dist.Store, number: int, attempt: str, now: Callable[[], int]) -> None:
        """Records (`invited`) that another rank waits for this one in a collective method, which it called after event
        ``number``; returns at once. ``attempt`` names that call in the store.

        Args:
            now: returns the number of this rank's last event; the attempt is refused if that is a later one.
        """
        # This rank has joined it, or opened it: an attempt's name is "<rank that opened it>.<time>".
        if attempt == self._joined or attempt.partition(".")[0] == str(self.rank):
            return
        self.invited = number, attempt
        if (event := now()) > number:  # after the line above, so that an event that begins now sees the invitation
            self.on_event(store, event, "later step")

    def on_event(self, store: dist.Store, event: int, what: str) -> None:
        """Called when this rank begins event number ``event``. If another rank waits for this rank in a collective
        method (`invited`) that was due before this event, its wait is ended with an error.

        Args:
            what: the event as text.
        """
        invited = self.invited
        if invited is not None and event > invited[0]:
            self.invited = None
            self._refuse_invited(store, *invited, f"rank {self.rank} went on to a {what}")

    def refuse_if_stuck(self, store: dist.Store) -> None:
        """Refuses another rank's call of a collective method (`invited`) if this rank has waited long in a torch
        collective with that rank. The listener thread runs this check often.
        """
        invited = self.invited
        if invited is None:
            return
        # The name of an attempt begins with the rank that opened it.
        if (where := self._samples.stuck(int(invited[1].partition(".")[0]), _STUCK)) is not None:
            self.invited = None
            self._refuse_invited(store, *invited, f"rank {self.rank} waits in {where}")

    def _refuse_invited(self, store: dist.Store, number: int, attempt: str, why: str) -> None:
        """Ends another rank's wait in a collective method with an error for the reason ``why``. ``attempt`` is the
        name of that call in the store.

        If an attempt of this rank at the same event failed, its reason is given: the other rank came late and opened a
        new one.
        """
        self._refuse(store, number, attempt, self._failed[1] if self._failed[0] == number else why)

    def publish_end(self, store: dist.Store) -> None:
        """Publishes in the store that this rank's process ends, so that other ranks do not wait for it."""
        store.set(f"{self.prefix}gone/{self.rank}", "")


class StackSamples:
    """Detects waits that last long. The listener thread takes samples at intervals: of the main thread's stack, and
    of whether a graph runs.
    """

    def __init__(self) -> None:
        # The collective of the last sample (`_collective`), and the number of samples in a row that showed it.
        self._last: tuple[tuple[int, str] | None, int] = (None, 0)
        # Number of the last sample's event, and the number of samples in a row in which its graphs ran.
        self._runs: tuple[int, int] = (0, 0)
        self._patience = _LONG

    def stuck(self, rank: int, count: int) -> str | None:
        """Samples the main thread's stack. If the last ``count`` samples show the same torch collective with
        ``rank``, returns it as "name (file:line)"; otherwise None.
        """
        entry = _collective(sys._current_frames().get(threading.main_thread().ident or 0), rank)
        self._last = entry, self._last[1] + 1 if entry == self._last[0] else 1
        return entry[1] if entry is not None and self._last[1] >= count else None

    def runs_long(self, number: int, running: bool) -> bool:
        """Counts one sample, of those taken at intervals. Returns True if graphs ran within event ``number`` at many
        samples in a row; each True doubles how many the next one needs.

        Args:
            running: whether a graph runs now.
        """
        self._runs = number, self._runs[1] + 1 if running and number == self._runs[0] else 0
        if self._runs[1] < self._patience:
            return False
        self._patience *= 2
        return True


# Collectives that no rank leaves before all have entered.
_COLLECTIVES = {
    "barrier", "monitored_barrier", "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_coalesced",
    "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single", "reduce_scatter",
    "reduce_scatter_tensor",
}  # fmt: skip


def _collective(frame: FrameType | None, rank: int) -> tuple[int, str] | None:
    """Finds the torch collective in which a thread is, from the thread's stack. Returns (id of the call, "name
    (file:line)"); None if there is no collective, or ``rank`` has no part in it.

    Args:
        frame: innermost frame of the stack.
    """
    call, name, last = None, "", ""
    while frame is not None:
        # Frames follow from the inside out: first torch's, then the user's, at which the search ends.
        code = frame.f_code
        if code.co_filename == c10d.__file__ and "group" in frame.f_locals:  # the outermost of these counts
            call, name = frame, f"torch.distributed.{code.co_name}" if code.co_name in _COLLECTIVES else ""
        elif code.co_filename == functional.__file__ and call is None:
            call = frame  # called by an op on DTensors
        elif not is_versioned(code):  # the user's code
            # In no collective, or in one that ranks may leave before others enter (a broadcast).
            if call is None or call.f_code.co_filename == c10d.__file__ and not name:
                return None
            # The group of a DTensor's collective is not looked up, and without one the call is for the world: `rank`
            # counts as a member then.
            group = call.f_locals.get("group") if name else None
            with_rank = not isinstance(group, dist.ProcessGroup) or rank in dist.get_process_group_ranks(group)
            where = f"{name or f'{last}() of a DTensor'} ({code.co_filename}:{frame.f_lineno})"
            return (id(call), where) if with_rank else None
        last, frame = code.co_name, frame.f_back
    return None
