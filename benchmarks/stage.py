"""Rows that take turns: on each host one worker process per row, of which only one at a time has work to do."""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from benchmarks.peers.row import Row
from benchmarks.report import Result
from benchmarks.work import Work
from benchmarks.worker import Failed, Place, Stepped, run

# On a CPU, Inductor's compile workers would be a pool of processes for every row.
WORKER_ENVIRONMENT = {
    "cpu": {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    "cuda": {"OMP_NUM_THREADS": "1"},
}

_SHARE = 0.85  # of the memory that is there, for the workers of all rows that take turns


def room(available: int, taken: int, ranks: int) -> int:
    """How many rows may take turns: ``ranks`` workers each, of ``taken`` bytes, in ``available`` bytes."""
    return int(_SHARE * available / (taken * ranks))


def together(mine: Any) -> list[Any]:
    """What each host brings, by rank; no host goes on before all have come."""
    all_of_them: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    return all_of_them


class Actor:
    """A row's worker process on this host, and what its ranks have reported so far."""

    def __init__(self, row: Row, work: Work, world: str, trace: bool, device: str) -> None:
        self.row = row
        self.error = ""
        self.steps: list[list[Stepped]] = []
        self.peaks: list[int] = []
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        place = Place(dist.get_rank(), dist.get_world_size(), address, port, f"{world}/{row.name}", trace, device)
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(row, work, place, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def step(self, number: int) -> None:
        """One training step on every rank."""
        answers = self._ask("step", number)
        if not self.error:
            self.steps.append(answers)

    def restart_peak(self) -> None:
        self._ask("restart peak")

    def end(self) -> None:
        """Reports peak memory and ends the workers; until every rank has reported, each keeps its connections."""
        self.peaks = self._ask("peak")
        if not self.error:
            self._orders.send(("end", 0))
            self._process.join()

    def stop(self) -> None:
        """Ends this host's worker, whatever it is doing."""
        self._orders.close()
        self._process.terminate()
        self._process.join()

    def result(self, size: str, family: str, warmup: int) -> Result:
        """The report's row, from the steps after the first ``warmup``."""
        row, timed = self.row, self.steps[warmup:]
        if self.error:
            return Result(size, family, row.kind, row.name, error=self.error)
        return Result(
            size,
            family,
            row.kind,
            row.name,
            seconds=tuple(max(rank.seconds for rank in step) for step in timed),
            issued=tuple(max(rank.issued for rank in step) for step in timed),
            first_seconds=max(rank.seconds for rank in self.steps[0]),
            peak_bytes=max(self.peaks),
            sent_bytes=int(statistics.median(max(rank.sent for rank in step) for step in timed)),
            collectives=int(statistics.median(max(rank.collectives for rank in step) for step in timed)),
            loss=statistics.mean(rank.loss for rank in self.steps[-1]),
        )

    def _ask(self, order: str, number: int = 0) -> list[Any]:
        """Every rank's answer, or none and `error` set: of several failures the first is the cause of the others."""
        if self.error:
            return []
        try:
            self._orders.send((order, number))
            mine = self._orders.recv()
        except (EOFError, OSError):
            mine = Failed("the worker process died", float("inf"))
        answers = together(mine)
        failures = [answer for answer in answers if isinstance(answer, Failed)]
        if failures:
            self.error = min(failures, key=lambda failed: failed.at).text
            self.stop()
            return []
        return answers


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Processes started inside have these environment variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def perform(
    size: str,
    work: Work,
    family: str,
    rows: Sequence[Row],
    *,
    steps: int,
    warmup: int,
    trace: bool,
    cache: str,
    device: str,
    progress: Callable[[str], object],
) -> list[Result]:
    """Trains every row for ``warmup + steps`` steps, in turn step by step, and reports the last ``steps``.

    ``cache`` is where all ranks and rows keep what they compile. ``progress`` is called with the name of the row that
    is about to step.
    """
    actors: list[Actor] = []
    try:
        for row in rows:
            with _environment(TORCHINDUCTOR_CACHE_DIR=cache, **WORKER_ENVIRONMENT[device]):
                actors.append(Actor(row, work, f"{size}/{family}", trace, device))
        for number in range(warmup + steps):
            if number == warmup:
                for actor in actors:
                    actor.restart_peak()
            for actor in actors:
                progress(actor.row.name)
                actor.step(number)
        for actor in actors:
            actor.end()
    finally:
        for actor in actors:
            actor.stop()
    return [actor.result(size, family, warmup) for actor in actors]
