"""`Schedule`: for each rank of a pipeline, the list of what it computes, sends and receives in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """The kind of an action of a pipeline rank: a computation, a send or a receive. Its value is its short name in the
    text of a schedule.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"  # the gradient of the stage's input
    BACKWARD_WEIGHT = "W"  # the gradients of its parameters
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"


COMPUTATIONS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)
# Kind of a transfer -> the kind at its other end, and the step to the stage there.
OTHER_END = {
    Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1),
    Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1),
    Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1),
}


@dataclass(frozen=True)
class Action:
    """One action in the list of a pipeline rank. ``kind`` says what it computes, sends or receives, for which stage and
    which microbatch.

    The stage of a send is the one whose result is sent; the stage of a receive is the one that needs it.

    >>> str(Action(Kind.SEND_BACKWARD, 2, 5)), str(Action(Kind.SEND_BACKWARD, 2, 5).other_end)
    ('SB2.5', 'RB1.5')
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"

    @property
    def other_end(self) -> Action:
        """The receive that belongs to a send, or the send that belongs to a receive."""
        kind, step = OTHER_END[self.kind]
        return Action(kind, self.stage + step, self.microbatch)


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: for each pipeline rank, the list of its actions (computations, sends, receives) in a step.

    Args:
        name: the schedule's, as a plan writes it.
        ranks: number of pipeline ranks.
        stages: number of stages of the model.
        microbatches: number of microbatches of a step.
        rank_of: rank of each stage.
        lists: actions of each rank, in order.
        trains: whether each microbatch has a backward.

    Its text has a line for each rank: ``rank 1: RF1.0 F1.0 B1.0 SB1.0``.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    rank_of: tuple[int, ...]
    lists: tuple[tuple[Action, ...], ...]
    trains: bool = True

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.lists))


def reads(action: Action, rank_of: Sequence[int]) -> list[Action]:
    """Return the actions on the same rank whose results ``action`` reads. They come before it in the rank's list.
    ``rank_of`` has the rank of each stage.

    In the result, BACKWARD also stands for BACKWARD_INPUT.
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind in RECEIVES:
        return []
    if kind == Kind.BACKWARD_WEIGHT:
        return [Action(Kind.BACKWARD_INPUT, stage, microbatch)]
    if kind in SENDS:
        return [Action(Kind.FORWARD if kind == Kind.SEND_FORWARD else Kind.BACKWARD, stage, microbatch)]
    forward = kind == Kind.FORWARD
    out = [] if forward else [Action(Kind.FORWARD, stage, microbatch)]
    source = stage - 1 if forward else stage + 1
    if 0 <= source < len(rank_of):
        if rank_of[source] == rank_of[stage]:
            out.append(Action(Kind.FORWARD if forward else Kind.BACKWARD, source, microbatch))
        else:
            out.append(Action(Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD, stage, microbatch))
    return out


def advance(schedule: Schedule, runs: Callable[[int, int, Action], bool]) -> bool:
    """Run the action lists of all ranks. A rank runs until its next action must wait for another rank; this repeats
    until no rank can go on. Return whether all lists reached their ends.

    Args:
        runs: function of (rank, position, next action of the rank): runs the action and returns True, or returns False
            if the action must wait for another rank.
    """
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.lists):
            while at[rank] < len(actions) and runs(rank, at[rank], actions[at[rank]]):
                at[rank] += 1
                moved = True
    return all(at[rank] == len(actions) for rank, actions in enumerate(schedule.lists))
