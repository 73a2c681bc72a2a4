"""Checks that all ranks run the same events: calls of a module, backwards, and compilations of programs.

Events are numbered per mesh. Each rank predicts its next event from the period of its past events. All ranks
have the same past, hence the same prediction. A predicted event costs no message. A rank that deviates publishes the
hash of its event in the store (never by a collective) and waits until every rank has published its own for this number.
On ranks that do not arrive, because their event is the predicted one, a listener thread (`shardc.runtime.gloo.listen`)
publishes it. If the hashes differ, all ranks raise.

If an error is raised on one rank within an event, `RankConsistency.report_error` sends it to the others. They raise it
before their next event, out of a collective, or out of a compilation. After an error, all ranks restart numbering.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Lock, get_ident
from typing import Any
from weakref import WeakMethod, ref

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardc.errors import CollectiveError, MeshError
from shardc.runtime.comparing import BEFORE, Comparisons, Meeting, Message, StackSamples
from shardc.runtime.events import (
    Event,
    Place,
    difference,
    different_waits,
    is_lost,
    look_at,
    look_at_store,
    lost,
    raised,
)
from shardc.runtime.gloo.listen import END, NOTHING, Listener, Stopped, raise_in
from shardc.runtime.lost_ranks import BoundedStore, LostRanks

_PAST = 4096  # events that are remembered
_EVENTS_PER_EPOCH = 1 << 40  # each epoch starts to number at a multiple of this
_HEARD = 2.0  # seconds that a rank waits for the others to read the error, before it raises
_GRACE = 0.4  # seconds in which a rank may raise the same error by itself, before it is interrupted
_STUCK = 25  # samples in the same collective of torch, before a rank reports it to those that compare


class RankConsistency:
    """Checks that all ranks of a mesh run the same sequence of events (calls, backwards, state dicts).

    Args:
        prefix: prefix of the keys in the store, unique per mesh of the process.
        rank, ranks: global rank of this process, and those of the mesh.
        interrupt: bound method that makes a collective in which this rank waits on the mesh raise.

    Attributes:
        number: number of the last event.
        running: whether a compiled graph is running.
        modules: number of modules that ran on the mesh in this epoch.
        alone: whether there is no other rank, so that nothing is compared.
        call: the last call of a module.
        place: returns a rank of the mesh as text.
    """

    def __init__(self, prefix: str, rank: int, ranks: Sequence[int], interrupt: Callable[[], None]) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self.number, self.running, self.modules = 0, False, 0
        self.call: Event | None = None
        # Two meshes of the same ranks number their own events.
        self._prefix = f"{prefix}{','.join(map(str, ranks))}/"
        self.place: Place = str  # how errors name a rank; by its number, until the mesh sets another function
        self._meeting = Meeting(self._prefix, rank, self.ranks, lambda rank: self.place(rank))
        self._comparisons = Comparisons(self._prefix, rank, self.ranks, lambda rank: self.place(rank))
        self._lost = LostRanks(self._prefix, rank, self.ranks)
        self._samples = StackSamples()
        self._interrupt_ref = WeakMethod(interrupt)
        self._past: deque[str] = deque(maxlen=_PAST)  # hashes of past events
        self._period = 1  # the next event is predicted to equal the one so many events before
        self._runs: dict[str, Event] = {}  # events that `runs` registers, by their text
        self._lock = Lock()
        self._waits_at: int | None = None  # number of the event at which this rank waits for a verdict
        self._pending_error: MeshError | None = None  # the error to raise at the next occasion
        self._failure: tuple[int, MeshError] | None = None  # of another rank, and its last event before it
        self._failed_in_event = False  # whether this rank failed within its last event
        # Error of a method that only this rank called.
        self._meeting_error: Callable[[], BaseException | None] = lambda: None
        self._between_events = False  # whether it runs a collective behind its last event
        self._compiling_thread: int | None = None  # the thread that compiles
        self._error_arrived = threading.Event()  # set by the listener thread with `_pending_error`
        self._all_heard_key: str | None = None  # store key that is set when all ranks have read how events differ
        self._broken = False  # whether collectives were aborted, so that the groups cannot be used
        self._store: BoundedStore | None = None
        # The fake backend has no other ranks.
        self.alone = len(self.ranks) == 1 or dist.get_backend() == "fake"

    def enter(self, event: Event, ask: bool = False) -> None:
        """Registers the event that this rank begins, and compares it with those of the other ranks. An event that was
        predicted, since it equals the one a period earlier (as in training), is compared only if a rank asks for it.

        Args:
            ask: compare it even if it was predicted.

        Raises:
            MeshError: on all ranks, if the events differ; if a rank did not arrive within the store's timeout, or
                another rank has raised an error.
        """
        if self.alone:
            return
        self._check(self.number + 1)
        if self._meeting.invited is not None:  # another rank waits in `meet` for this one
            self._meeting.on_event(self._connected(), self.number + 1, event.lines[0][1])
        past, key = self._past, event.key  # the key is a hash of the event
        # Predicted: the event one period ago. None if fewer are known.
        expected = past[-self._period] if self._period <= len(past) else None
        # Not predicted: the new period is the distance to the last occurrence of this event, if there is one.
        if key != expected:
            distance = next((at for at, done in enumerate(reversed(past), 1) if done == key), None)
            self._period = distance or self._period
        with self._lock:
            past.append(key)
            self.number += 1
        if ask or key != expected:
            self._compare(event)
        elif self._comparisons.asked:  # another rank did not predict an event that this one has passed
            self._answer_if_asked()

    def meet(self, method: str) -> None:
        """Waits until all ranks call ``method``. Raises MeshError as soon as another rank goes on without calling it
        (see `Meeting`).
        """
        if self.alone:
            return
        try:
            check = partial(self._check, self.number + 1)  # raises errors of other ranks while this one waits
            self._meeting.meet(self._connected(), self.number, method, self._log, check)
        except MeshError as error:
            self._meeting_error = ref(error)  # `report_error` does not send it: only ranks that called raise
            raise

    def exchange(self, event: Event, text: str, ranks: Iterable[int]) -> dict[int, str]:
        """Publishes ``text`` at ``event``, and waits for the texts that other ranks publish there. Returns index on
        the mesh -> text, for each of ``ranks``.

        Raises:
            MeshError: as `enter`.
        """
        store = self._connected()
        self._comparisons.publish_text(store, self.number + 1, text)
        self.enter(event, ask=True)
        return self._comparisons.texts_at(store, self.number, ranks)

    @contextmanager
    def runs(self, what: str = "") -> Iterator[None]:
        """Context manager around collectives that are part of event ``what``, which it registers. If ranks differ
        meanwhile, the collectives are interrupted and raise.

        Args:
            what: "" registers no event: the block is a part of the latest.
        """
        if what:
            self.enter(self._runs.setdefault(what, Event((("event", what),))))
        self.running = True
        try:
            self._check(self.number)
            yield
        except BaseException:
            # `report_error` then makes ranks raise that are in this event, too.
            self._failed_in_event = True
            raise
        finally:
            self.running = False

    @contextmanager
    def communicates(self, method: str) -> Iterator[None]:
        """Context manager around torch's own collectives, such as an all-reduce of norms, called by ``method``.
        Registers ``method`` as an event, like `runs`, so that other ranks know of it.
        """
        with self.runs(method):
            try:
                yield
            except RuntimeError as error:  # in `runs` still: a rank that raised closes its connections, and tells later
                raise self._lost_between(error) from error

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Context manager around torch's own collectives between two events; it registers none. If the ranks' events
        are found to differ meanwhile, the collectives are interrupted and raise.
        """
        # `_between_events`: an error of another rank behind its last event interrupts these collectives, too.
        self.running = self._between_events = True
        try:
            self._check(self.number + 1)
            yield
        except RuntimeError as error:
            raise self._lost_between(error) from error
        finally:
            self.running = self._between_events = False

    @contextmanager
    def compiles(self) -> Iterator[None]:
        """Context manager around capture, planning and lowering; raises early if another rank has failed. The listener
        thread then raises `Stopped` in this thread.
        """
        thread = get_ident()
        try:
            try:
                self._compiling_thread = thread
                yield
            finally:
                with self._lock:  # a pending `Stopped` arrives when the lock is released, at the latest
                    self._compiling_thread = None
        except Stopped:
            raise self._raised() from None

    @contextmanager
    def shares_errors(self) -> Iterator[None]:
        """Context manager that sends an error raised inside it to the other ranks, which raise it too."""
        epoch = self.epoch
        try:
            yield
        except BaseException as error:
            self.report_error(error, epoch)
            raise

    @property
    def epoch(self) -> int:
        """Number of times that this rank has restarted its numbering of events, which it does after an error."""
        return self.number // _EVENTS_PER_EPOCH

    def report_error(self, error: BaseException, epoch: int) -> None:
        """Sends an error of this rank to the others, which raise it too; all then number their events anew, in a new
        epoch. Does nothing if the others know of the error, or need not raise.

        Args:
            epoch: epoch at the start of the failing block. If it has changed since, the others have raised already.
        """
        if self.alone or epoch != self.epoch or self._broken:  # broken: by an error that ranks know already
            return
        # A failed collective fails on the others, too. An error of `meet` concerns only ranks that called it.
        if isinstance(error, CollectiveError) or self._meeting_error() is error:
            return
        with self._lock:
            # Ranks raise behind the event that the message names: this rank's last one or, if it failed within that,
            # the one before, so that ranks in the same event raise too.
            number = self.number - (self._failed_in_event or self._waits_at is not None)
            self._begin_anew()
        with suppress(RuntimeError):  # the store is gone
            self._log(self._connected(), [self.rank, number, *raised(self.place(self.rank), error)])

    def cause_of_failure(self) -> MeshError | None:
        """Returns the MeshError that is the real reason of a failed collective: ranks run different things, or
        another rank raised.

        Waits for it up to a second; None if there is none.
        """
        return self._raised() if not self.alone and self._error_arrived.wait(_HEARD / 2) else None

    def advice_on_lost(self, ranks: Sequence[int]) -> str:
        """Returns the advice (``fix``) for an error about a failed wait for ``ranks``: which ranks to look at first
        (see `LostRanks`).

        Raises:
            MeshError: the wait failed because ranks differ, or because another rank raised.
        """

        def call_roll(store: dist.Store) -> None:
            self._log(store, ["roll"])

        # Publishes for whom this rank waited. The first rank to do so calls the roll, which live ranks answer.
        with suppress(RuntimeError):  # the store is gone
            self._lost.give_up(self._connected(), ranks, call_roll)
        if (different := self.cause_of_failure()) is not None:
            raise different
        # Needs the store, which may have been on a lost rank: then it is the first to look at.
        try:
            return look_at(list(map(self.place, self._lost.to_look_at(self._connected(), ranks))))
        except RuntimeError:
            return f"{look_at_store(self.place(0))}. If it is well, {look_at(list(map(self.place, ranks)))}"

    def _lost_between(self, error: RuntimeError) -> MeshError | RuntimeError:
        """Returns the error to raise if a torch collective failed with ``error``. It says which ranks to look at, or
        how ranks differ; if neither is known, it is ``error``.
        """
        if not is_lost(error):  # an error of the op itself, unless ranks differ
            return self.cause_of_failure() or error
        fix = self.advice_on_lost([rank for rank in self.ranks if rank != self.rank])
        return lost(error, self.place(self.rank), self.ranks, fix)

    def _raised(self) -> MeshError:
        """Returns the error that explains how ranks differ, for this rank to raise. First waits until other ranks have
        read it, then restarts the numbering of events, unless collectives were aborted.
        """
        error, all_heard_key, self._all_heard_key = self._pending_error, self._all_heard_key, None
        assert error is not None
        if all_heard_key is not None:  # else the store may end with this rank, before others have read it
            with suppress(RuntimeError):
                self._connected().wait([all_heard_key], timedelta(seconds=_HEARD))
                self._broken |= self._connected().check([f"{self._prefix}broken"])  # another rank aborted collectives
        if not self._broken:  # else the groups are of no use, and no event can follow
            with self._lock:
                self._begin_anew()
        return MeshError(error.what, source=error.source, fix=error.fix)

    def _begin_anew(self) -> None:
        """Restarts the numbering of events, in a new epoch, after an error that all ranks raised. Forgets past events
        and errors.
        """
        self.number, self.modules, self._failed_in_event = (self.epoch + 1) * _EVENTS_PER_EPOCH, 0, False
        self._past.clear()
        self._error_arrived.clear()
        self._pending_error = self._failure = self._waits_at = None

    def _check(self, upcoming: int) -> None:
        """Raises MeshError if ranks were found to differ, or if another rank failed before event ``upcoming``."""
        if (failure := self._failure) is not None:
            last_event, error = failure  # the last event of the failed rank before its error
            if upcoming > last_event:  # that rank does not take part in this one
                self._pending_error = error
        if self._pending_error is not None:
            raise self._raised()

    # --- comparing

    def _compare(self, event: Event) -> None:
        """Compares ``event`` with the other ranks: publishes it, compares it with that of the first rank that came,
        waits until all have come, and raises MeshError if ranks differ, here or before, or another rank has failed.
        """
        store, number, comparisons = self._connected(), self.number, self._comparisons
        comparisons.publish(store, event)  # the whole text, which errors show; the rest exchanges its hash
        self._waits_at = number  # the listener thread then ends the wait if another rank fails or differs
        if self._failure is not None:
            # That rank will not arrive: raise its error now, whichever event it failed after.
            self._check(self._failure[0] + 1)
        with self._lock:
            # The listener thread may have answered for this rank just now.
            answered = number in comparisons.answered
            differing = None if answered else comparisons.arrive(store, number, event.key, self._log)
        if differing is None and self._pending_error is None:  # equal to the first rank's: others may still differ
            verdict = comparisons.wait(store, number)
            if verdict == BEFORE:
                # The listener thread has, or is about to get, the error that says how ranks differed before.
                self._error_arrived.wait(_HEARD)
            differing = None if isinstance(verdict, str) else verdict
        with self._lock:  # the thread that listens hears of the difference too
            self._waits_at = None
            if differing is not None and self._pending_error is None:
                self._set_error_of_difference(store, number, differing)
        if self._pending_error is not None:
            raise self._raised()

    def _set_error_of_difference(self, store: dist.Store, number: int, other: tuple[int, str]) -> None:
        """Sets the error that this rank will raise, because event ``number`` of another rank differs from its own.
        ``other`` is (that rank, hash of its event).
        """
        # The last of `_past` is event `self.number`.
        this_entry = self.rank, self._past[number - self.number - 1]
        # In order of rank, so that both raise the same text.
        pair = sorted((this_entry, other))
        (rank_a, lines_a), (rank_b, lines_b) = ((rank, self._comparisons.lines(store, key)) for rank, key in pair)
        self._pending_error = difference(rank_a, lines_a, rank_b, lines_b)
        self._all_heard_key = self._comparisons.count_reader(store, number)

    # --- answering for a rank whose event was predicted

    def _log(self, store: dist.Store, entry: Message) -> None:
        """Appends the message ``entry`` to the log that the listener threads of all ranks read."""
        store.set(f"{self._prefix}log/{store.add(f'{self._prefix}log', 1)}", json.dumps(entry))

    def on_message(self, store: dist.Store, entry: str) -> None:
        """Handles a message from the log that all ranks share, on the listener thread. ``entry`` is `NOTHING` if no
        message came for a while, and `END` when the thread ends.

        Args:
            entry: JSON of a `Message`: an event to compare, a difference, a method to join, a wait, a roll call or an
                error.
        """
        if entry == NOTHING:
            self._meeting.refuse_if_stuck(store)
            self._on_idle(store)
        elif entry == END:
            self._meeting.publish_end(store)
        elif isinstance(message := json.loads(entry), int):
            self._comparisons.asked.add(message)  # first: `_answer_if_asked` reads it after it has set `number`
            if message <= self.number:
                self._answer(store, message)
        elif message[0] == "meet":
            self._meeting.on_attempt(store, message[1], message[2], lambda: self.number)
        elif message[0] == "differs":
            self._on_difference(store, *message[1:])
        elif message[0] == "waits":
            self._on_wait(store, *message[1:])
        elif message[0] == "roll":
            self._lost.answer(store)
        else:
            self._on_failure(store, *message)

    def _answer_if_asked(self) -> None:
        """Takes part in comparisons of past events that other ranks have begun, by publishing this rank's hash of
        each. Raises MeshError if a hash differs.
        """
        for number in sorted(self._comparisons.asked):
            if number <= self.number:
                self._answer(self._connected(), number)
        if self._pending_error is not None:
            raise self._raised()

    def _answer(self, store: dist.Store, number: int) -> None:
        """Publishes this rank's hash of the past event ``number``, which another rank compares. If the hashes differ,
        interrupts the compiled graph that this rank runs, if any.

        This rank then raises out of the graph that it runs, or at its next event.
        """
        with self._lock:
            behind = self.number - number
            # It was answered already, or is too long ago: its hash is forgotten.
            if number in self._comparisons.answered or behind >= len(self._past):
                self._comparisons.asked.discard(number)
                return
            other = self._comparisons.arrive(store, number, self._past[-1 - behind], self._log)
            if other is None:
                return
            self._hear_difference(store, number, other)
        self._interrupt_if_running(store)

    def _on_difference(self, store: dist.Store, number: int, rank: int, key: str) -> None:
        """Handles the message that event ``number`` of ``rank`` has the hash ``key``. If this rank has passed that
        event with another hash, this rank raises.
        """
        with self._lock:
            # A rank that waits at this event learns of the difference by the verdict.
            passed = number <= self.number and self.number - number < len(self._past) and self._waits_at != number
            if rank == self.rank or not passed or self._pending_error is not None:
                return
            # The last of `_past` is event `self.number`. If equal, only the first to come differs.
            if self._past[number - self.number - 1] == key:
                return
            self._hear_difference(store, number, (rank, key))
        self._interrupt_if_running(store)

    def _hear_difference(self, store: dist.Store, number: int, other: tuple[int, str]) -> None:
        """Makes this rank raise because event ``number`` differs from that of another rank: in its next event, in the
        event in which it waits, or out of a running graph. ``other`` is (that rank, hash of its event).
        """
        # Before others read the difference: aborting closes their connections to this rank, too.
        self._break_if_running(store)
        self._set_error_of_difference(store, number, other)
        self._error_arrived.set()
        if self._waits_at not in (None, number):
            # This rank waits at a later event: the verdict ends that wait, on all ranks there.
            store.set(f"{self._comparisons.key_prefix(self._waits_at)}verdict", BEFORE)

    def _interrupt_if_running(self, store: dist.Store) -> None:
        """Aborts the collective in which this rank waits, if a compiled graph is running. The wait then raises."""
        self._break_if_running(store)  # it may have begun just now, before it could see the error
        self._end_waits_if_broken()

    def _on_failure(
        self, store: dist.Store, rank: int, number: int, text: str, source: str | None, fix: str | None
    ) -> None:
        """Handles the message that ``rank`` raised an error after event ``number``. This rank raises too: in the event
        in which it waits, out of a compilation or a later event's graph, or else at its next event.

        Args:
            text, source, fix: of the error to raise.
        """
        with self._lock:
            epoch = self.epoch
            # Its own message comes back to a rank. Errors of an earlier epoch are over; of several, the first counts.
            if rank == self.rank or number // _EVENTS_PER_EPOCH != epoch or self._failure is not None:
                return
            self._failure = number, MeshError(text, source=source, fix=fix)
        # The failed rank will not come to the event in which this rank waits: end the comparison.
        if (waits := self._waits_at) is not None and self._comparisons.refuse(store, waits):
            self._pending_error = self._failure[1]
            self._error_arrived.set()
            return
        until = time.monotonic() + _GRACE  # it may raise the same error by itself
        while time.monotonic() < until and self.epoch == epoch and (self.running or self._compiling_thread):
            time.sleep(0.02)
        with self._lock:
            if self.epoch != epoch or self._pending_error is not None:
                return
            # A compile is interrupted: the next event, where this rank would raise, may be minutes away.
            if self._compiling_thread is not None and self.number >= number:
                self._pending_error = self._failure[1]
                raise_in(self._compiling_thread, Stopped)
                return
            # A collective between two events counts as part of the later one.
            if self.running and self.number + self._between_events > number:
                self._pending_error = self._failure[1]
                self._error_arrived.set()
                self._break_if_running(store)
        self._end_waits_if_broken()

    # --- waiting for each other at different places

    def _on_idle(self, store: dist.Store) -> None:
        """Run often by the listener thread: reports if this rank waits long in a torch collective while others
        compare an event; and takes part in the comparison of an event whose graph runs long.
        """
        # Events that others compare and this rank has not reached.
        pending = sorted(number for number in self._comparisons.asked if number > self.number)
        if pending and not self.running:
            # The rank that came first to that event and waits there, and its hash of the event.
            first, key = store.get(f"{self._comparisons.key_prefix(pending[0])}first").decode().split()
            if (where := self._samples.stuck(int(first), _STUCK)) is not None:
                error = different_waits(self.rank, where, int(first), self._comparisons.lines(store, key))
                with self._lock:
                    # This rank raises it, too, as soon as it leaves the collective.
                    self._failure = self._failure or (self.number, error)
                self._comparisons.asked.difference_update(pending)
                self._log(store, ["waits", self.rank, pending[0], error.what, error.fix])
        # It may wait in a collective for a rank that runs another event: the comparison finds that out.
        if self._samples.runs_long(self.number, self.running):
            self._answer(store, self.number)

    def _on_wait(self, store: dist.Store, rank: int, number: int, text: str, fix: str) -> None:
        """Handles the message that ``rank`` waits in a torch collective while other ranks wait for it at event
        ``number``. This rank raises if it waits at that event, or runs a graph at or behind it.

        Args:
            text, fix: of the error to raise.
        """
        with self._lock:
            # Whether this rank has begun that event, in this epoch.
            came = number <= self.number and number // _EVENTS_PER_EPOCH == self.epoch
            if rank == self.rank or not came:  # a rank gets its own message, too
                return
            if self._pending_error is not None or self._waits_at != number and not self.running:
                return
            self._pending_error = MeshError(text, fix=fix)
            self._error_arrived.set()
            if self._waits_at == number:
                self._comparisons.refuse(store, number)
            self._break_if_running(store)
        self._end_waits_if_broken()

    def _end_waits_if_broken(self) -> None:
        """Aborts the collective in which this rank waits, if the mesh's groups are broken. The wait then raises."""
        if self._broken and (interrupt := self._interrupt_ref()) is not None:  # the mesh may be gone
            interrupt()

    def _break_if_running(self, store: dist.Store) -> None:
        """Marks the mesh's groups as broken, here and in the store, if a graph is running: its collectives are aborted
        next (`_end_waits_if_broken`), and the groups cannot be used afterwards.
        """
        if self.running and not self._broken:
            self._broken = True
            store.set(f"{self._prefix}broken", "")

    def _connected(self) -> BoundedStore:
        """Returns this rank's connection to the store. The first call opens it, and starts the listener thread."""
        if self._store is None:
            store: Any = c10d._get_default_store()
            # A connection that nobody else uses, as `BoundedStore` needs.
            self._store = BoundedStore(store.clone(), store.timeout)
            Listener(self._store, f"{self._prefix}log", self.on_message).start()
        return self._store
