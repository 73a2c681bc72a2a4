"""Pipeline schedules as data: for each pipeline rank, the list of what it computes, sends and receives in a step.

A model is cut into stages 0 to n-1, and each rank has one stage or more. `schedule` builds the lists from the orders of
``torch.distributed.pipelining``, `play` proves before anything runs that they fit together, and `clock` gives the times
of a step.

The lists are for these channels: one for each ordered pair of ranks, so two between neighbours, whose messages arrive
in the order of the sends. A send waits for nothing. A receive waits for its message. Its place in the list is where the
rank must have it; it may be posted earlier, in the order of the list.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from shardc._compat import pipeline_order
from shardc.errors import PlanError
from shardc.ir.actions import COMPUTATIONS as COMPUTATIONS
from shardc.ir.actions import RECEIVES as RECEIVES
from shardc.ir.actions import SENDS as SENDS
from shardc.ir.actions import Action as Action
from shardc.ir.actions import Kind as Kind
from shardc.ir.actions import Schedule as Schedule
from shardc.ir.actions import advance, reads
from shardc.ir.play import in_flight as in_flight
from shardc.ir.play import play as play
from shardc.validate import Range, near, typed


@dataclass(frozen=True)
class _Order:
    """A kind of schedule: its order of computations, and which numbers of stages and microbatches it allows.

    Args:
        torch: name of the schedule in torch, such as "ZBVZeroBubble"; None: `_one_forward_one_backward`.
        stages_per_rank: the number that it needs; None: any number, 2 by default.
        rounds: whether microbatches run in rounds of equal length, one microbatch or more per rank in each.
        fills: whether there must be at least as many microbatches as stages.
    """

    torch: str | None
    stages_per_rank: int | None
    rounds: bool = False
    fills: bool = False


ORDERS = {
    "gpipe": _Order("GPipe", 1),
    "1f1b": _Order(None, 1),
    "interleaved": _Order("Interleaved1F1B", None, rounds=True),
    "zb": _Order("InterleavedZeroBubble", None, rounds=True),
    "zbv": _Order("ZBVZeroBubble", 2),
    "dualpipev": _Order("DualPipeV", 2, fills=True),
}


@typed(PlanError)
def schedule(
    name: str,
    ranks: Annotated[int, Range(1)],
    microbatches: Annotated[int, Range(1)],
    stages_per_rank: Annotated[int, Range(1)] | None = None,
    trains: bool = True,
) -> Schedule:
    """Return the schedule with this ``name``: the action list of each pipeline rank. No process group is needed.

    Args:
        name: "gpipe", "1f1b", "interleaved" (1F1B with several stages per rank), "zb" (interleaved zero bubble),
            "zbv" or "dualpipev".
        ranks: number of pipeline ranks, 1 or more.
        microbatches: number of microbatches of a step.
        stages_per_rank: None for the schedule's: 1 for gpipe and 1f1b, else 2. Only interleaved and zb take others.
        trains: False for a schedule of forwards alone; it has any number of microbatches.

    Raises:
        PlanError: an unknown name, or numbers that the schedule does not have.

    >>> print(schedule("1f1b", 2, 2))
    rank 0: F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 RB0.1 B0.1
    rank 1: RF1.0 F1.0 B1.0 SB1.0 RF1.1 F1.1 B1.1 SB1.1
    """
    if name not in ORDERS:
        raise PlanError(f"no pipeline schedule is called {name!r}", fix=near(name, ORDERS))
    order = ORDERS[name]
    per_rank = stages_per_rank or order.stages_per_rank or 2
    if order.stages_per_rank not in (None, per_rank):
        raise PlanError(
            f"schedule {name!r} has {_count(order.stages_per_rank, 'stage')} per rank, not {per_rank}",
            fix="leave out stages_per_rank, or use schedule='interleaved' or 'zb'",
        )
    stages = ranks * per_rank
    if trains:
        _check_microbatches(name, ranks, stages, microbatches)
    # Forwards are in the order of a training step, of one that has at least so many microbatches.
    enough = microbatches if trains else max(-(-microbatches // ranks) * ranks, stages)
    if order.torch is None:
        computed = [_one_forward_one_backward(ranks, enough, rank) for rank in range(ranks)]
    else:
        computed = [
            [Action(Kind(kind), stage, microbatch) for kind, stage, microbatch in actions]
            for actions in pipeline_order(order.torch, ranks, enough, per_rank)
        ]
    if not trains:
        computed = [[x for x in row if x.kind == Kind.FORWARD and x.microbatch < microbatches] for row in computed]
    places = {action.stage: rank for rank, actions in enumerate(computed) for action in actions}
    rank_of = tuple(places[stage] for stage in range(stages))
    return Schedule(name, ranks, stages, microbatches, rank_of, _with_transfers(computed, rank_of), trains)


def _check_microbatches(name: str, ranks: int, stages: int, microbatches: int) -> None:
    """Raise `PlanError` if the schedule ``name`` on ``ranks`` ranks cannot train on ``microbatches`` microbatches."""
    if ORDERS[name].fills and microbatches < stages:
        raise PlanError(
            f"schedule {name!r} on {_count(ranks, 'rank')} needs at least {stages} microbatches, one for each stage, "
            f"not {microbatches}",
            fix=f"use {stages} microbatches or more, or schedule='zbv'",
        )
    rounds = max(1, microbatches // ranks)
    if ORDERS[name].rounds and microbatches % rounds:
        fewer = rounds * ranks
        raise PlanError(
            f"schedule {name!r} on {_count(ranks, 'rank')} runs {microbatches} microbatches in {rounds} rounds, "
            "which must be of equal length",
            fix=f"use {fewer} or {fewer + ranks} microbatches (any multiple of {ranks} will do)",
        )


def _count(number: int | None, noun: str) -> str:
    """Return a number with its noun as text, such as "1 stage" or "2 stages"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _one_forward_one_backward(ranks: int, microbatches: int, rank: int) -> list[Action]:
    """Return the computations of one rank in a 1F1B schedule. First come as many forwards as there are ranks behind
    this rank (at most one per microbatch), then forwards and backwards in turn, and last the remaining backwards.

    It is the order that torch's ``Schedule1F1B`` runs. The order that torch 2.13 says it runs has other microbatches on
    the last rank, and interleaved 1F1B with one stage per rank keeps nearly twice as many microbatches.
    """
    ahead = min(ranks - 1 - rank, microbatches)
    actions = [Action(Kind.FORWARD, rank, at) for at in range(ahead)]
    for at in range(microbatches):
        if at + ahead < microbatches:
            actions.append(Action(Kind.FORWARD, rank, at + ahead))
        actions.append(Action(Kind.BACKWARD, rank, at))
    return actions


def _with_transfers(computed: Sequence[Sequence[Action]], rank_of: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
    """Insert the sends and receives into ``computed``, the computations of each rank in order; return the complete
    lists. ``rank_of`` has the rank of each stage.

    A send stands right behind what computes the message. A receive stands right before the first computation that needs
    its message or a later one of the same peer, so it waits only where that computation would.
    """
    send_of = {action: send for actions in computed for action in actions if (send := _send(action, rank_of))}
    messages: dict[tuple[int, int], deque[Action]] = defaultdict(deque)  # (source, destination) -> the sends, in order
    for action, send in send_of.items():
        messages[rank_of[action.stage], rank_of[send.other_end.stage]].append(send)
    lists = []
    for rank, actions in enumerate(computed):
        row: dict[Action, None] = {}
        for action in actions:
            for needed in (needed for needed in reads(action, rank_of) if needed.kind in RECEIVES):
                channel = messages[rank_of[needed.other_end.stage], rank]
                while needed not in row and channel:
                    row[channel.popleft().other_end] = None
            row[action] = None
            if action in send_of:
                row[send_of[action]] = None
        lists.append(tuple(row))
    return tuple(lists)


def _send(action: Action, rank_of: Sequence[int]) -> Action | None:
    """Return the send of a computation's result to the rank that needs it for a neighbouring stage. None if that stage
    is on the same rank, or if no stage needs the result.
    """
    forward = action.kind == Kind.FORWARD
    stage = action.stage + 1 if forward else action.stage - 1
    if action.kind == Kind.BACKWARD_WEIGHT or not 0 <= stage < len(rank_of) or rank_of[stage] == rank_of[action.stage]:
        return None
    return Action(Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, action.stage, action.microbatch)


@dataclass(frozen=True)
class Timeline:
    """When each rank of a pipeline runs each action of a step, in seconds from the step's start.

    Args:
        schedule: the one that is timed.
        spans: for each rank, (action, start, end) of each entry of its list. A computation is from start to end; a send
            starts with its message and ends when that has arrived, while the rank goes on; a receive starts when the
            rank gets to it and ends when the message is there.
        seconds: duration of the step.
        once: for each rank, (start, end) of what runs once, in front of its list and behind it.
    """

    schedule: Schedule
    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    seconds: float
    once: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the seconds in which it computes, the graphs that run once per step included."""
        return tuple(
            sum(end - start for action, start, end in row if action.kind in COMPUTATIONS)
            + sum(end - start for start, end in rest)
            for row, rest in zip(self.spans, self.once, strict=True)
        )

    @property
    def bubble(self) -> float:
        """Share of the ranks' total time in which they do not compute, from 0 to 1."""
        return 1 - sum(self.busy) / (self.seconds * self.schedule.ranks) if self.seconds else 0.0

    @property
    def waits(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank, (start, end) of each span of time in which it waits for a message that is already on its
        way.
        """
        sent = {action.other_end: start for row in self.spans for action, start, _ in row if action.kind in SENDS}
        return tuple(
            tuple(
                (max(start, sent[action]), end)
                for action, start, end in row
                if action.kind in RECEIVES and max(start, sent[action]) < end
            )
            for row in self.spans
        )

    @property
    def exposed(self) -> tuple[float, ...]:
        """For each rank, the seconds in which it waits for a message that is already on its way (the sum of
        `waits`).
        """
        return tuple(sum(end - start for start, end in row) for row in self.waits)


def clock(
    schedule: Schedule,
    seconds: Callable[[Kind, int], float],
    transfer: Callable[[int, int], float],
    begins: Sequence[float] = (),
    others: Mapping[Action, float] = MappingProxyType({}),
) -> Timeline:
    """Simulate the times of one step, given the seconds of each computation and message; return the `Timeline`.
    ``schedule`` must be one that `play` accepts.

    A rank computes one thing at a time, and waits in receives alone. Messages from one rank to another take turns on
    their link.

    Args:
        seconds: returns the seconds of a computation, given its (kind, stage).
        transfer: returns the seconds of a message, given (stage that sends it, stage that receives it).
        begins: seconds at which each rank begins its list; by default 0.
        others: action -> seconds, for computations to which ``seconds`` does not apply.

    Raises:
        VerifyError: as `play`, for lists that do not come to their ends.

    >>> durations = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
    >>> step = clock(schedule("gpipe", 2, 3), lambda kind, stage: durations[kind], lambda *stages: 0.0)
    >>> step.seconds, step.bubble
    (12.0, 0.25)
    """
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in range(schedule.ranks)]
    now = [*begins] or [0.0] * schedule.ranks
    arrivals: dict[Action, float] = {}  # by receive
    free: dict[tuple[int, int], float] = {}  # (source, destination) -> when their link is free

    def runs(rank: int, at: int, action: Action) -> bool:
        """Record the times of ``action`` on ``rank`` and return True. Return False for a receive whose message is not
        sent yet.
        """
        start = end = now[rank]
        if action.kind in SENDS:
            receive = action.other_end
            link = rank, schedule.rank_of[receive.stage]
            start = max(start, free.get(link, 0.0))
            end = free[link] = start + transfer(action.stage, receive.stage)
            arrivals[receive] = end
        elif action.kind in RECEIVES:
            if action not in arrivals:
                return False
            end = now[rank] = max(start, arrivals[action])
        else:
            elapsed = others[action] if action in others else seconds(action.kind, action.stage)
            end = now[rank] = start + elapsed
        spans[rank].append((action, start, end))
        return True

    if not advance(schedule, runs):
        play(schedule)
    return Timeline(schedule, tuple(map(tuple, spans)), max(now), ((),) * schedule.ranks)
