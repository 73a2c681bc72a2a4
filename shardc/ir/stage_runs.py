"""`StageRuns`: what crosses between the stages of a pipeline in a step, as messages between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardc.ir.graph import DTYPE_NAMES
from shardc.ir.schedules import Kind, Schedule

# A value that runs and messages share: its kind ("transfer", "sum", "param", "output", ...), name or index, microbatch.
Key = tuple[str, Any, int]


@dataclass(frozen=True)
class Message:
    """Values that one rank sends to another, in one message.

    Args:
        keys: what they are.
        examples: fake tensors like them.
        source, target: coordinates along the axis of the stages.
    """

    keys: tuple[Key, ...]
    examples: tuple[Any, ...]
    source: int
    target: int


@dataclass(frozen=True)
class Boundary:
    """Values of each microbatch that cross between a stage and the next, by name with a fake tensor like each."""

    up: Mapping[str, Any]
    down: Mapping[str, Any]


@dataclass(frozen=True)
class StageRuns:
    """Values that cross between the stages of a step, or of a call without gradients, and the order of the ranks' runs.

    Args:
        schedule: the order.
        boundaries: behind each stage but the last.
        copies: parameter -> (its stage, other stages that read it, a fake tensor like its shard). Sent once a step.
        terms: term of a sum -> (its stage, stages that take the sum, a fake tensor like it).
        results: (kind, name or index) -> (the stage that gives it, its number: 1, or that of the microbatches, a fake
            tensor like each). All ranks get them.
        grads: parameter with dims -> (coordinate of the ranks that get its gradient, a fake tensor like that).
        openings: the same of each loop before the forward whose layers are cut into stages; None for other loops.
    """

    schedule: Schedule
    boundaries: tuple[Boundary, ...]
    copies: Mapping[str, tuple[int, frozenset[int], Any]]
    terms: Mapping[str, tuple[int, frozenset[int], Any]]
    results: Mapping[tuple[str, Any], tuple[int, int, Any]]
    grads: Mapping[str, tuple[int, Any]]
    openings: tuple[StageRuns | None, ...] = ()

    def lines(self) -> list[str]:
        """Return the messages and the order as text: what crosses each boundary, then the actions of each rank."""
        out = []
        for number, loop in enumerate(self.openings):
            out += [f"opening {number + 1}, {line}" for line in ([] if loop is None else loop.lines())]
        for at, boundary in enumerate(self.boundaries):
            for arrow, values in ((f"stage {at} -> {at + 1}", boundary.up), (f"stage {at + 1} -> {at}", boundary.down)):
                names = [f"%{name} {DTYPE_NAMES.get(x.dtype, x.dtype)}{list(x.shape)}" for name, x in values.items()]
                out.append(f"{arrow}: {', '.join(names) or 'nothing'}")
        out += [f"once, parameter {name} to stages {sorted(to)}" for name, (_, to, _) in self.copies.items()]
        out += [f"once, sum %{name} to stages {sorted(to)}" for name, (at, to, _) in self.terms.items() if to - {at}]
        return [*out, *str(self.schedule).splitlines()]

    def rank(self, stage: int) -> int:
        """Return the coordinate of ``stage`` along the axis."""
        return self.schedule.rank_of[stage]

    def stages(self, rank: int) -> list[int]:
        """Return the stages of a rank."""
        return [stage for stage, at in enumerate(self.schedule.rank_of) if at == rank]

    def scheduled(self, rank: int) -> Iterator[tuple[Kind, int, int] | Message]:
        """Yield what a rank does for microbatches, in order: (kind, stage, microbatch) of a computation, or a message.

        Boundaries that nothing crosses have no messages.
        """
        for action in self.schedule.lists[rank]:
            kind, stage, at = action.kind, action.stage, action.microbatch
            if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD):
                source = stage if kind == Kind.SEND_FORWARD else stage - 1
                yield from self._message("transfer", self.boundaries[source].up, at, source, source + 1)
            elif kind in (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD):
                target = stage if kind == Kind.RECV_BACKWARD else stage - 1
                yield from self._message("transfer", self.boundaries[target].down, at, target + 1, target)
            else:
                yield kind, stage, at

    def before(self, rank: int) -> Iterator[Message]:
        """Yield the messages of ``rank`` in front of a step: parameters that several stages read."""
        return self._several(rank, "param", self.copies)

    def behind(self, rank: int) -> Iterator[Message]:
        """Yield the messages of ``rank`` behind the last microbatch: sums that other stages take."""
        return self._several(rank, "sum", self.terms)

    def last(self, rank: int) -> Iterator[Message]:
        """Yield the messages of ``rank`` at the end of a step, which bring its results to all ranks."""
        for (kind, name), (stage, count, example) in self.results.items():
            values = [(kind, name, at) for at in range(count)]
            for target in range(self.schedule.ranks):
                if target != self.rank(stage) and rank in (target, self.rank(stage)):
                    yield Message(tuple(values), (example,) * count, self.rank(stage), target)

    def _several(
        self, rank: int, kind: str, values: Mapping[str, tuple[int, frozenset[int], Any]]
    ) -> Iterator[Message]:
        """Yield the messages of ``rank`` that bring each of ``values`` to the ranks of the stages that take it."""
        for name, (stage, takers, example) in values.items():
            source = self.rank(stage)
            for target in sorted({self.rank(taker) for taker in takers} - {source}):
                if rank in (source, target):
                    yield Message(((kind, name, 0),), (example,), source, target)

    def _message(self, kind: str, values: Mapping[str, Any], at: int, source: int, target: int) -> Iterator[Message]:
        """Yield the message with ``values`` of microbatch ``at`` from stage ``source`` to stage ``target``."""
        if values:
            keys = tuple((kind, name, at) for name in values)
            yield Message(keys, tuple(values.values()), self.rank(source), self.rank(target))
