"""Ranks agree on what they run: every call of a module, every backward and every program that they compile.

Each of them is an *act* with a number. An act that comes as the ones before it lead one to expect is not announced:
all ranks expect the same of the same past, so a rank that does something else at this number is not as expected. It
announces what it does through the store, never through a collective, and waits until all ranks have said the same of
this number. Ranks that were not asked do not come to compare; a thread of theirs (`shardc.runtime.wire.listen`) answers
for them, and where they differ makes them raise too.

A rank that raises in what all ranks do tells the others (`Agreement.fails`), which raise its error where they get
further: in front of their next act, out of a collective, or out of what they compile. Ranks that raised count anew.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Event, Lock, get_ident
from typing import Any
from weakref import WeakMethod, ref

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardc.errors import CollectiveError, MeshError
from shardc.runtime.comparing import BEFORE, Comparisons
from shardc.runtime.events import Act, Told, difference, lost, raised, waits_elsewhere
from shardc.runtime.meeting import Looks, Meeting
from shardc.runtime.wire.listen import END, NOTHING, Listener, Stopped, raise_in

_PAST = 4096  # acts that are remembered
_AGAIN = 1 << 40  # numbers after the ranks differed start at the next multiple
_HEARD = 2.0  # seconds that a rank gives the others to hear that they differ, before it raises
_GRACE = 0.4  # seconds in which a rank may raise by itself what another one has raised
_STUCK = 25  # looks at which a rank is in the same collective of torch's, before those that compare hear of it


class Agreement:
    """Checks that all ranks of a mesh go through the same events.

    Args:
        prefix: of the keys in the store, another one for each mesh of the process.
        rank, ranks: this rank's global number, and those of the mesh.
        interrupt: a method that makes whatever this rank waits for in a collective on this mesh raise.

    Attributes:
        number: of this rank's last act.
        running: whether it is in a compiled graph.
        modules: how many modules ran on the mesh in this epoch.
        alone: whether there are no other ranks to agree with.
        call: what the last call of a module was.
    """

    def __init__(self, prefix: str, rank: int, ranks: Sequence[int], interrupt: Callable[[], None]) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self.number, self.running, self.modules = 0, False, 0
        self.call: Act | None = None
        # Two meshes of the same ranks each count their own acts.
        self._prefix = f"{prefix}{','.join(map(str, ranks))}/"
        self._meeting = Meeting(self._prefix, rank, self.ranks)
        self._comparisons = Comparisons(self._prefix, rank, self.ranks)
        self._looks = Looks()
        self._interrupt = WeakMethod(interrupt)
        self._past: deque[str] = deque(maxlen=_PAST)
        self._period = 1
        self._runs: dict[str, Act] = {}
        self._lock = Lock()
        self._waits: int | None = None
        self._different: MeshError | None = None
        self._failure: tuple[int, MeshError] | None = None  # of another rank, and the last act that this has done
        self._inside = False  # whether this rank failed within its last act
        self._met: Callable[[], BaseException | None] = lambda: None  # that a method was called by this rank alone
        self._between = False  # whether what it runs is behind its last act
        self._compiles: int | None = None  # the thread that does
        self._found = Event()
        self._heard: str | None = None
        self._broken = False
        self._store: dist.Store | None = None
        # In torch's stand-in for a world nobody else is there.
        self.alone = len(self.ranks) == 1 or dist.get_backend() == "fake"

    def act(self, act: Act, ask: bool = False) -> None:
        """This rank is about to do ``act``: all ranks do.

        Args:
            ask: announce it even where it is expected.

        Raises:
            MeshError: on every rank, where some rank does something else; or where ranks did not come to compare
                within the store's timeout: which.
        """
        if self.alone:
            return
        self._check(self.number + 1)
        if self._meeting.invited is not None:
            self._meeting.goes_on(self._connected(), self.number + 1, act.lines[0][1])
        past, key = self._past, act.key
        expected = past[-self._period] if self._period <= len(past) else None
        if key != expected:
            since = next((at for at, done in enumerate(reversed(past), 1) if done == key), None)
            self._period = since or self._period
        with self._lock:
            past.append(key)
            self.number += 1
        if ask or key != expected:
            self._compare(act)
        elif self._comparisons.asked:
            self._answer_if_asked()

    def meet(self, method: str) -> None:
        """All ranks call ``method``; a rank that does so alone raises at once. See `shardc.runtime.meeting`."""
        if self.alone:
            return
        try:
            check = partial(self._check, self.number + 1)
            self._meeting.meet(self._connected(), self.number, method, self._log, check)
        except MeshError as error:
            self._met = ref(error)
            raise

    def exchange(self, act: Act, text: str, ranks: Iterable[int]) -> dict[int, str]:
        """Publishes ``text`` at an event and returns the texts of ``ranks`` at the same one; errors as `act`."""
        store = self._connected()
        self._comparisons.say(store, self.number + 1, text)
        self.act(act, ask=True)
        return self._comparisons.entries_at(store, self.number, ranks)

    @contextmanager
    def runs(self, what: str) -> Iterator[None]:
        """A block in which this rank runs collectives, as ``what`` says, which are interrupted where the ranks differ.

        It is an act of its own: a rank that does something else at this place asks what the others do.
        """
        self.act(self._runs.setdefault(what, Act((("act", what),))))
        self.running = True
        try:
            self._check(self.number)
            yield
        except BaseException:
            self._inside = True
            raise
        finally:
            self.running = False

    @contextmanager
    def reduces(self, method: str) -> Iterator[None]:
        """As `runs`, for ``method``, whose collectives are no part of a graph."""
        try:
            with self.runs(method):
                yield
        except RuntimeError as error:
            raise self.behind() or lost(error, self.rank, self.ranks) from error

    @contextmanager
    def waits(self) -> Iterator[None]:
        """A block in which this rank is in a collective that is no part of a graph, and can be interrupted."""
        self.running = self._between = True
        try:
            self._check(self.number + 1)
            yield
        except RuntimeError as error:
            raise self.behind() or lost(error, self.rank, self.ranks) from error
        finally:
            self.running = self._between = False

    @contextmanager
    def compiles(self) -> Iterator[None]:
        """A block in which this rank captures, plans or lowers, which ends early where another rank has failed."""
        thread = get_ident()
        try:
            try:
                self._compiles = thread
                yield
            finally:
                with self._lock:  # what was raised before this arrives as the lock is let go, at the latest
                    self._compiles = None
        except Stopped:
            raise self._raised() from None

    def tells(self) -> Told:
        """A block of what all ranks do: what is raised in it on this rank is raised on the others too."""
        return Told(self.fails, self.epoch)

    @property
    def epoch(self) -> int:
        """How often this rank began to count anew."""
        return self.number // _AGAIN

    def fails(self, error: BaseException, epoch: int) -> None:
        """Tells the other ranks that this one raises ``error`` in what all of them do.

        Args:
            epoch: when that began; in a later one they know already.
        """
        goes_on = isinstance(error, CollectiveError) or self._met() is error  # of these, others hear otherwise or not
        if self.alone or epoch != self.epoch or self._broken or goes_on:
            return
        with self._lock:
            number = self.number - (self._inside or self._waits is not None)
            self._begin_anew()
        with suppress(RuntimeError):  # the store is gone
            self._log(self._connected(), [self.rank, number, *raised(self.rank, error)])

    def behind(self) -> MeshError | None:
        """Returns the error if a collective failed on this rank because ranks differ; else None."""
        return self._raised() if not self.alone and self._found.wait(_HEARD / 2) else None

    def _raised(self) -> MeshError:
        """The error of this rank; acts are numbered anew after it."""
        error, heard, self._heard = self._different, self._heard, None
        assert error is not None
        if heard is not None:  # else the store may be gone with this rank, before others have read there
            with suppress(RuntimeError):
                self._connected().wait([heard], timedelta(seconds=_HEARD))
                self._broken |= self._connected().check([f"{self._prefix}broken"])
        if not self._broken:
            with self._lock:
                self._begin_anew()
        return MeshError(error.what, source=error.source, fix=error.fix)

    def _begin_anew(self) -> None:
        self.number, self.modules, self._inside = (self.epoch + 1) * _AGAIN, 0, False
        self._past.clear()
        self._found.clear()
        self._different = self._failure = self._waits = None

    def _check(self, upcoming: int) -> None:
        """Raises what another rank has raised, where this one gets further than that one did, or that they differ."""
        if (failure := self._failure) is not None and upcoming > failure[0]:
            self._different = failure[1]
        if self._different is not None:
            raise self._raised()

    # --- comparing

    def _compare(self, act: Act) -> None:
        store, number, comparisons = self._connected(), self.number, self._comparisons
        comparisons.tell(store, act)
        self._waits = number
        if self._failure is not None:  # that rank will not come
            self._check(self._failure[0] + 1)
        with self._lock:
            # The thread that listens may have answered for this rank just now.
            answered = number in comparisons.answered
            other = None if answered else comparisons.arrive(store, number, act.key, self._log)
        if other is None and self._different is None:
            verdict = comparisons.wait(store, number)
            if verdict == BEFORE:
                self._found.wait(_HEARD)
            other = None if isinstance(verdict, str) else verdict
        self._waits = None
        if other is not None and self._different is None:
            self._differ(store, number, other)
        if self._different is not None:
            raise self._raised()

    def _differ(self, store: dist.Store, number: int, other: tuple[int, str]) -> None:
        """Takes down that ``other``, a rank and its act's key, does something else at ``number``."""
        mine = self.rank, self._past[number - self.number - 1]
        pair = sorted((mine, other))
        (rank_a, lines_a), (rank_b, lines_b) = ((rank, self._comparisons.lines(store, key)) for rank, key in pair)
        self._different = difference(rank_a, lines_a, rank_b, lines_b)
        self._heard = self._comparisons.hear_all(store, number)

    # --- answering, where this rank does as expected and another one asks

    def _log(self, store: dist.Store, entry: Any) -> None:
        """Lets the threads that listen hear of ``entry``."""
        store.set(f"{self._prefix}log/{store.add(f'{self._prefix}log', 1)}", json.dumps(entry))

    def heard(self, store: dist.Store, entry: str) -> None:
        """Another rank announced what it does, or that it failed; by the thread that listens, with its ``store``."""
        if entry == NOTHING:
            self._meeting.look(store)
            self._look(store)
        elif entry == END:
            self._meeting.end(store)
        elif isinstance(message := json.loads(entry), int):
            self._comparisons.asked.add(message)  # before the look at where this rank is, which looks here after that
            if message <= self.number:
                self._answer(store, message)
        elif message[0] == "meet":
            self._meeting.hears(store, message[1], message[2], lambda: self.number)
        elif message[0] == "waits":
            self._waits_there(store, *message[1:])
        else:
            self._fails_there(store, *message)

    def _answer_if_asked(self) -> None:
        for number in sorted(self._comparisons.asked):
            if number <= self.number:
                self._answer(self._connected(), number)
        if self._different is not None:
            raise self._raised()

    def _answer(self, store: dist.Store, number: int) -> None:
        with self._lock:
            behind = self.number - number
            if number in self._comparisons.answered or behind >= len(self._past):
                self._comparisons.asked.discard(number)
                return
            other = self._comparisons.arrive(store, number, self._past[-1 - behind], self._log)
            if other is None:
                return
            self._break_if_running(store)  # before the others are told, whose connections to this rank close too
            self._differ(store, number, other)
            self._found.set()
            if self._waits not in (None, number):
                store.set(f"{self._comparisons.at(self._waits)}verdict", BEFORE)
        self._break_if_running(store)  # it may have begun just now, before it could see that the ranks differ
        if self._broken:
            self._end_waits()

    def _fails_there(self, store: dist.Store, rank: int, number: int, text: str, source: Any, fix: Any) -> None:
        """Rank ``rank`` failed behind its act ``number``; this one raises too where it gets further."""
        with self._lock:
            epoch = self.epoch
            if rank == self.rank or number // _AGAIN != epoch or self._failure is not None:
                return
            self._failure = number, MeshError(text, source=source, fix=fix)
        if (waits := self._waits) is not None and self._comparisons.refuse(store, waits):
            self._different = self._failure[1]
            self._found.set()
            return
        until = time.monotonic() + _GRACE  # it may raise the same by itself
        while time.monotonic() < until and self.epoch == epoch and (self.running or self._compiles):
            time.sleep(0.02)
        with self._lock:
            if self.epoch != epoch or self._different is not None:
                return
            if self._compiles is not None and self.number >= number:
                self._different = self._failure[1]
                raise_in(self._compiles, Stopped)
                return
            if self.running and self.number + self._between > number:
                self._different = self._failure[1]
                self._found.set()
                self._break_if_running(store)
        if self._broken:
            self._end_waits()

    # --- waiting for each other at different places

    def _look(self, store: dist.Store) -> None:
        """Tells those that compare where this rank waits for them; asks the others, where a graph runs for long."""
        pending = sorted(number for number in self._comparisons.asked if number > self.number)
        if pending and not self.running:
            asks, key = store.get(f"{self._comparisons.at(pending[0])}first").decode().split()
            if (where := self._looks.stuck(int(asks), _STUCK)) is not None:
                error = waits_elsewhere(self.rank, where, int(asks), self._comparisons.lines(store, key))
                with self._lock:
                    self._failure = self._failure or (self.number, error)
                self._comparisons.asked.difference_update(pending)
                self._log(store, ["waits", self.rank, pending[0], error.what, error.fix])
        if self._looks.long(self.number, self.running):
            self._answer(store, self.number)

    def _waits_there(self, store: dist.Store, rank: int, number: int, text: str, fix: str) -> None:
        """Rank ``rank`` waits in a collective of torch's, and so does not come to act ``number``."""
        with self._lock:
            came = number <= self.number and number // _AGAIN == self.epoch and rank != self.rank
            if not came or self._different is not None or self._waits != number and not self.running:
                return
            self._different = MeshError(text, fix=fix)
            self._found.set()
            if self._waits == number:
                self._comparisons.refuse(store, number)
            self._break_if_running(store)
        if self._broken:
            self._end_waits()

    def _end_waits(self) -> None:
        if (interrupt := self._interrupt()) is not None:  # what runs on a mesh keeps it
            interrupt()

    def _break_if_running(self, store: dist.Store) -> None:
        if self.running and not self._broken:
            self._broken = True
            store.set(f"{self._prefix}broken", "")

    def _connected(self) -> dist.Store:
        """This rank's own connection to the store; from the first on another one is listened at."""
        if self._store is None:
            store: Any = c10d._get_default_store()
            self._store = store.clone()
            self._store.set_timeout(store.timeout)
            Listener(store.clone(), f"{self._prefix}log", self.heard).start()
        return self._store
