"""`StageRuns`: which values cross between the stages of a pipeline in a step, and the messages that bring them from
rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from shardc.ir import graph as ir
from shardc.ir.graph import Value
from shardc.ir.schedules import COMPUTATIONS, SENDS, Kind, Schedule

# A value that runs and messages share: its kind ("transfer", "sum", "param", "output", ...), name or index, microbatch.
Key = tuple[str, Any, int]


@dataclass(frozen=True)
class Message:
    """Values that one rank sends to another, in one message.

    Args:
        keys: (kind, name or index, number of the microbatch or 0) of each value.
        examples: type of each value.
        source, target: coordinates, along the axis of the stages, of the rank that sends and of the one that receives.
    """

    keys: tuple[Key, ...]
    examples: tuple[Value, ...]
    source: int
    target: int


@dataclass(frozen=True)
class Boundary:
    """Values of each microbatch that cross between a stage and the next one: ``up`` with the forward, ``down`` with the
    backward. Both map a name to a type.
    """

    up: Mapping[str, Value]
    down: Mapping[str, Value]


@dataclass(frozen=True)
class StageRuns:
    """The values that cross between the stages of a pipeline, and the order in which the ranks run and send. It is for
    a training step or for a call without gradients.

    Args:
        schedule: the order.
        boundaries: the values that cross behind each stage but the last.
        copies: parameter -> (its stage, other stages that read it, type of its shard). They are sent once a step.
        terms: term of a sum -> (its stage, stages that take the sum, type of the sum).
        results: (kind, name or index) -> (stage that computes it, number of values, type of each): one value, or one
            for each microbatch. They are sent to all ranks.
        grads: parameter with dims -> (coordinate of the ranks that get its gradient, type of the gradient).
        openings: the same of each loop before the forward whose layers are cut into stages; None for other loops.
    """

    schedule: Schedule
    boundaries: tuple[Boundary, ...]
    copies: Mapping[str, tuple[int, frozenset[int], Value]]
    terms: Mapping[str, tuple[int, frozenset[int], Value]]
    results: Mapping[tuple[str, Any], tuple[int, int, Value]]
    grads: Mapping[str, tuple[int, Value]]
    openings: tuple[StageRuns | None, ...] = ()

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        stage_of: Mapping[str, int],
        graphs: Iterable[tuple[int, bool, fx.Graph]],
        openings: Sequence[StageRuns | None] = (),
    ) -> StageRuns:
        """Return the `StageRuns` of a schedule. The values that cross between stages are found from the inputs and
        outputs of the stages' graphs.

        Args:
            schedule: the order.
            stage_of: parameter -> its stage.
            graphs: (stage, whether it runs for each microbatch, graph); of each stage, those that run for each
                microbatch come first.
            openings: the loops before the forward; parameters that they send are sent with the others.
        """
        takers: dict[tuple[str, str], tuple[set[int], Value]] = {}  # (kind, name) of an input -> stages that take it
        terms: dict[str, int] = {}
        sent: dict[str, tuple[int, Value]] = {}  # value that crosses between stages -> (its stage, type)
        results: dict[tuple[str, Any], tuple[int, int, Value]] = {}
        grads: dict[str, tuple[int, Value]] = {}
        for stage, repeats, graph in graphs:
            for node in ir.placeholders(graph):
                role = ir.role(node)
                if role.kind in ("param", "sum", "transfer"):
                    takers.setdefault((role.kind, role.name), (set(), ir.value(node)))[0].add(stage)
            for role, x in ir.outputs(graph):
                if not isinstance(x, fx.Node) or role.kind == "saved":
                    continue
                value = ir.value(x)
                if role.kind == "term":
                    terms[role.name] = stage
                elif role.kind == "transfer":
                    sent[role.name] = stage, value
                # A parameter without dims is on all ranks: its gradient is a result for all.
                elif role.kind == "grad" and role.name in stage_of and value.shape:
                    grads[role.name] = schedule.rank_of[stage_of[role.name]], value
                elif role.kind in ("output", "buffer", "grad"):
                    key = role.kind, role.index if role.kind == "output" else role.name
                    results.setdefault(key, (stage, schedule.microbatches if repeats else 1, value))
        # A dict for each boundary. A value crosses all boundaries from its stage to the farthest one that reads it.
        up: list[dict[str, Value]] = [{} for _ in schedule.rank_of[1:]]
        down: list[dict[str, Value]] = [{} for _ in schedule.rank_of[1:]]
        for name, (stage, value) in sent.items():
            readers, _ = takers.get(("transfer", name), ({stage}, value))
            for boundary in (*up[stage : max(readers)], *down[min(readers) : stage]):
                boundary[name] = value
        copies = {
            name: (stage_of[name], others, value)
            for (kind, name), (stages, value) in takers.items()
            if kind == "param" and value.shape and (others := frozenset(stages - {stage_of[name]}))
        }
        # What loops before the forward need of other stages is sent with the rest, so they send no copies themselves.
        for loop in openings:
            for name, (stage, others, value) in () if loop is None else loop.copies.items():
                copies[name] = stage, others | copies.get(name, (stage, frozenset[int](), value))[1], value
        loops = tuple(None if loop is None else replace(loop, copies={}) for loop in openings)
        sums = {
            name: (terms[name], frozenset(stages), value)
            for (kind, name), (stages, value) in takers.items() if kind == "sum"
        }  # fmt: skip
        return cls(schedule, tuple(map(Boundary, up, down)), copies, sums, results, grads, loops)

    def lines(self) -> list[str]:
        """Return the messages and the order as text: what crosses each boundary, then the actions of each rank."""
        out = []
        for number, loop in enumerate(self.openings):
            out += [f"opening {number + 1}, {line}" for line in ([] if loop is None else loop.lines())]
        for at, boundary in enumerate(self.boundaries):
            for arrow, values in ((f"stage {at} -> {at + 1}", boundary.up), (f"stage {at + 1} -> {at}", boundary.down)):
                names = [f"%{name} {x}" for name, x in values.items()]
                out.append(f"{arrow}: {', '.join(names) or 'nothing'}")
        out += [f"once, parameter {name} to stages {sorted(to)}" for name, (_, to, _) in self.copies.items()]
        out += [f"once, sum %{name} to stages {sorted(to)}" for name, (at, to, _) in self.terms.items() if to - {at}]
        return [*out, *str(self.schedule).splitlines()]

    def rank(self, stage: int) -> int:
        """Return the rank of ``stage``: its coordinate along the axis of the stages."""
        return self.schedule.rank_of[stage]

    def stages(self, rank: int) -> list[int]:
        """Return the stages that lie on ``rank``, a coordinate along the axis of the stages."""
        return [stage for stage, at in enumerate(self.schedule.rank_of) if at == rank]

    def scheduled(self, rank: int) -> Iterator[tuple[Kind, int, int] | Message]:
        """Yield what a rank does for the microbatches, in order: its computations as (kind, stage, microbatch), and its
        messages.

        Boundaries that nothing crosses have no messages.
        """
        for action in self.schedule.lists[rank]:
            if action.kind in COMPUTATIONS:
                yield action.kind, action.stage, action.microbatch
                continue
            send = action if action.kind in SENDS else action.other_end
            source, target = send.stage, send.other_end.stage
            boundary = self.boundaries[min(source, target)]
            if values := boundary.up if source < target else boundary.down:
                keys = tuple(("transfer", name, action.microbatch) for name in values)
                yield Message(keys, tuple(values.values()), self.rank(source), self.rank(target))

    def before(self, rank: int) -> Iterator[Message]:
        """Yield the messages that ``rank`` sends or receives before the step: the parameters that several stages
        read.
        """
        return self._several(rank, "param", self.copies)

    def behind(self, rank: int) -> Iterator[Message]:
        """Yield the messages that ``rank`` sends or receives after the last microbatch: the sums that other stages
        need.
        """
        return self._several(rank, "sum", self.terms)

    def last(self, rank: int) -> Iterator[Message]:
        """Yield the messages that ``rank`` sends or receives at the end of the step, which bring the step's results to
        all ranks.
        """
        for (kind, name), (stage, count, example) in self.results.items():
            values = [(kind, name, at) for at in range(count)]
            for target in range(self.schedule.ranks):
                if target != self.rank(stage) and rank in (target, self.rank(stage)):
                    yield Message(tuple(values), (example,) * count, self.rank(stage), target)

    def _several(
        self, rank: int, kind: str, values: Mapping[str, tuple[int, frozenset[int], Value]]
    ) -> Iterator[Message]:
        """Yield the messages with ``values`` that ``rank`` sends or receives. They go from the rank whose stage has a
        value to the ranks whose stages take it.

        Args:
            kind: kind of the values in `Message.keys`.
            values: name -> (stage that has it, stages that take it, type).
        """
        for name, (stage, takers, example) in values.items():
            source = self.rank(stage)
            for target in sorted({self.rank(taker) for taker in takers} - {source}):
                if rank in (source, target):
                    yield Message(((kind, name, 0),), (example,), source, target)


def received(lists: Sequence[Sequence[object]], rank: int) -> list[int]:
    """Return one number for each action of ``rank``. For the receipt of a message, it is the number of this rank's own
    messages that the other rank had received before it sent that message: this rank can free those. Otherwise 0.

    Args:
        lists: the actions of each rank, messages among them.
    """

    def of(source: int) -> Iterator[int]:
        """Yield, for each message that ``source`` sends to ``rank``, how many messages from ``rank`` it has received
        before it sends this one.
        """
        count = 0
        for x in lists[source]:
            if isinstance(x, Message) and (x.source, x.target) == (source, rank):
                yield count
            count += isinstance(x, Message) and (x.source, x.target) == (rank, source)

    counts = {source: of(source) for source in range(len(lists))}
    return [next(counts[x.source]) if isinstance(x, Message) and x.target == rank else 0 for x in lists[rank]]
