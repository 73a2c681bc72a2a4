"""Which rank the others name when a wait has failed; a store that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread

import pytest
import torch.distributed as dist

from shardc.runtime.lost_ranks import BoundedStore, LostRanks

RANKS = [4, 5, 6, 7]  # of a mesh that begins at rank 4


class Answers:
    """A store whose process answers one request after the other, and is stopped as long as ``runs`` is not set."""

    def __init__(self) -> None:
        self._store, self.runs = dist.HashStore(), Event()
        self.runs.set()

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.runs.wait()
        method: Callable[..., object] = getattr(self._store, name)
        return method


def named(waits: dict[int, list[int]], silent: tuple[int, ...] = ()) -> dict[int, list[int]]:
    """What each rank of ``waits`` names, if it gave up to wait for those. The threads of ``silent`` do not answer."""
    store = dist.HashStore()
    ranks = {rank: LostRanks("", rank, RANKS) for rank in RANKS}

    def call(store: dist.Store) -> None:
        for rank in RANKS:
            if rank not in silent:
                ranks[rank].answer(store)

    bounded = BoundedStore(store, timedelta(seconds=20))
    for rank, of in waits.items():
        ranks[rank].give_up(bounded, of, call)
    return {rank: ranks[rank].to_look_at(bounded, of) for rank, of in waits.items()}


@pytest.mark.parametrize(
    "waits, busy",
    [
        ({5: [4], 6: [4, 5], 7: [6]}, 4),  # a message, a collective of three, a message of one that waits
        ({4: [5], 5: [6], 6: [7]}, 7),
        ({7: [6], 6: [5]}, 5),  # rank 4 waits for nobody, and nobody for it
    ],
)
def test_the_rank_that_does_not_wait_is_named(waits: dict[int, list[int]], busy: int) -> None:
    assert named(waits) == dict.fromkeys(waits, [busy])


def test_ranks_that_wait_in_a_circle_name_those_that_they_wait_for() -> None:
    assert named({4: [5], 5: [4]}) == {4: [5], 5: [4]}


def test_ranks_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a rank that waits for one that has not given up yet."""
    monkeypatch.setattr("shardc.runtime.lost_ranks._ROLL", 0.1)
    assert named({7: [6]}, silent=(4,)) == {7: [4]}
    assert named({7: [6], 6: [5]}, silent=(4, 5)) == {7: [4, 5], 6: [4, 5]}


def test_requests_to_a_stopped_store_end() -> None:
    answers = Answers()
    store = BoundedStore(answers, timedelta(seconds=60))
    store.set("key", "value")
    assert store.get("key") == b"value"
    answers.runs.clear()
    store.limit, start = 0.05, time.monotonic()
    for _ in range(20):  # the first one waits
        with pytest.raises(RuntimeError, match="has not answered for 0.05 seconds"):
            store.check(["key"])
    assert time.monotonic() - start < 0.5
    answers.runs.set()
    store.limit = 60.0
    time.sleep(0.01)
    assert store.check(["key"]) and not store.check(["other"])


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    store = BoundedStore(dist.HashStore(), timedelta(seconds=60))
    assert store.add("key", 1) == 1
    (thread,) = set(threading.enumerate()) - before
    assert isinstance(thread, Thread) and thread.daemon
    del store
    thread.join(5)
    assert not thread.is_alive()
