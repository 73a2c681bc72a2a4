"""Plays the action lists of a pipeline's ranks against each other (`play`), to prove that all messages match and no
rank waits forever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NoReturn

from shardc.errors import VerifyError
from shardc.ir.actions import COMPUTATIONS, OTHER_END, RECEIVES, SENDS, Action, Kind, Schedule, advance, reads


def play(schedule: Schedule) -> tuple[dict[int, int], ...]:
    """Run the action lists of all ranks against each other, to check that they fit together. Return the most
    microbatches that each stage has in flight.

    Returns:
        For each rank, each of its stages -> the most microbatches in flight at a time (`in_flight`).

    Raises:
        VerifyError: an action that is not this rank's, is there twice or is missing; a computation or send of what the
            rank has neither computed nor received; a send without receive, or a receive without send; messages between
            two ranks that are received in another order than they are sent; ranks that wait for each other. It names
            both ends.
    """
    _Player(schedule).play()
    counts: list[dict[int, int]] = [{} for _ in range(schedule.ranks)]
    for stage, rank in enumerate(schedule.rank_of):
        counts[rank][stage] = 0
    for most, actions in zip(counts, schedule.lists, strict=True):
        for flight in in_flight(actions) if schedule.trains else ():
            for stage, count in flight.items():
                most[stage] = max(most[stage], count)
    return tuple(counts)


def in_flight(actions: Iterable[Action]) -> Iterator[dict[int, int]]:
    """Yield, after each action of a rank, stage -> the number of microbatches that the stage has in flight.

    A microbatch is in flight if its forward has run, and its backward, that of the weights included, has not.

    >>> list(in_flight([Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 0)]))
    [{0: 1}, {0: 2}, {0: 1}]
    """
    flight: dict[int, int] = {}
    for action in actions:
        change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0)
        if change:
            flight[action.stage] = flight.get(action.stage, 0) + change
        yield dict(flight)


class _Player:
    """The checks of `play`: whether the action lists of a pipeline's ranks fit together. ``places`` maps each action to
    its (rank, position in the rank's list).
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.places: dict[Action, tuple[int, int]] = {}

    def play(self) -> None:
        """Run all checks, in order. Each check assumes what the checks before it have proved."""
        self._each_action_once()
        self._each_microbatch_whole()
        self._each_message_two_ends()
        self._reads_are_there()
        self._messages_in_order()
        self._no_deadlock()

    def _each_action_once(self) -> None:
        """Check that each action is in the list of its own rank and nowhere else; fill in ``places``."""
        schedule = self.schedule
        for rank, actions in enumerate(schedule.lists):
            for at, action in enumerate(actions):
                place = (rank, at)
                text = f"rank {rank} has {action} at position {at}"
                if not (0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches):
                    sizes = f"{schedule.stages} stages and {schedule.microbatches} microbatches"
                    self._fail(f"{text}, but the step has {sizes}", place)
                if schedule.rank_of[action.stage] != rank:
                    self._fail(f"{text}, but stage {action.stage} is on rank {schedule.rank_of[action.stage]}", place)
                if action.kind in OTHER_END:
                    other = action.other_end.stage
                    if not 0 <= other < schedule.stages:
                        self._fail(f"{text}, but there is no stage {other}", place)
                    if schedule.rank_of[other] == rank:
                        self._fail(f"{text}, but stage {other} is on the same rank", place)
                if action in self.places:
                    first = self.places[action]
                    self._fail(f"{text}, which is at position {first[1]} already{self._peer(action)}", first, place)
                self.places[action] = place

    def _each_microbatch_whole(self) -> None:
        """Check that each stage has the forward and, in training, the complete backward of each microbatch."""
        schedule = self.schedule
        wholes = ("F B", "F I W") if schedule.trains else ("F",)
        for stage, rank in enumerate(schedule.rank_of):
            for microbatch in range(schedule.microbatches):
                kinds = (kind for kind in COMPUTATIONS if Action(kind, stage, microbatch) in self.places)
                whole = " ".join(kind.value for kind in kinds)
                if whole not in wholes:
                    self._fail(
                        f"rank {rank} has {whole or 'no computation'} of microbatch {microbatch} in stage {stage}, "
                        f"not {' or '.join(wholes)}"
                    )

    def _each_message_two_ends(self) -> None:
        """Check that each send has a receive, and each receive a send."""
        for action, (rank, at) in self.places.items():
            if action.kind in OTHER_END and action.other_end not in self.places:
                peer = self.schedule.rank_of[action.other_end.stage]
                does = "receives" if action.kind in SENDS else "sends"
                text = f"rank {rank} has {action} at position {at}, but rank {peer} never {does} {action.other_end}"
                self._fail(text, (rank, at))

    def _reads_are_there(self) -> None:
        """Check that what a computation or send reads was computed or received before, on the same rank."""
        for action, (rank, at) in self.places.items():
            for needed in reads(action, self.schedule.rank_of):
                if needed not in self.places and needed.kind == Kind.BACKWARD:
                    needed = Action(Kind.BACKWARD_INPUT, needed.stage, needed.microbatch)
                place = self.places.get(needed)
                text = f"rank {rank} has {action} at position {at}"
                if place is None:
                    self._fail(f"{text}, without {needed}{self._peer(needed)}", (rank, at))
                if place[1] > at:
                    self._fail(f"{text}, before {needed} at position {place[1]}{self._peer(needed)}", (rank, at), place)

    def _messages_in_order(self) -> None:
        """Check that messages from one rank to another are received in the order in which they are sent."""
        sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # by (source, destination)
        received: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for action, (rank, _) in self.places.items():  # in the order of each rank's list
            if action.kind in SENDS:
                sent[rank, self.schedule.rank_of[action.other_end.stage]].append(action)
            elif action.kind in RECEIVES:
                received[self.schedule.rank_of[action.other_end.stage], rank].append(action)
        for (source, rank), receives in received.items():
            for receive, send in zip(receives, sent[source, rank], strict=True):
                if receive != send.other_end:
                    received_at, sent_at = self.places[receive], self.places[send]
                    text = f"rank {rank} receives {receive} at position {received_at[1]}, but the next message"
                    text = f"{text} from rank {source} is {send}, at position {sent_at[1]} there"
                    self._fail(text, received_at, sent_at)

    def _no_deadlock(self) -> None:
        """Check that no ranks wait for each other in a cycle."""
        reached = [0] * self.schedule.ranks

        def runs(rank: int, at: int, action: Action) -> bool:
            """Return whether ``rank`` can now run ``action``, number ``at`` of its list; if so, note in ``reached``
            that it has run. False for a receive whose message is not sent yet.
            """
            if action.kind in RECEIVES:
                peer, position = self.places[action.other_end]
                if reached[peer] <= position:
                    return False
            reached[rank] = at + 1
            return True

        advance(self.schedule, runs)
        waits = {}
        for rank, actions in enumerate(self.schedule.lists):
            if reached[rank] < len(actions):
                waits[rank] = self.places[actions[reached[rank]].other_end]
        if not waits:
            return
        chain = [min(waits)]
        while waits[chain[-1]][0] not in chain:
            chain.append(waits[chain[-1]][0])
        circle = chain[chain.index(waits[chain[-1]][0]) :]
        texts = []
        for rank in circle:
            receive, (peer, position) = self.schedule.lists[rank][reached[rank]], waits[rank]
            texts.append(
                f"rank {rank} waits in {receive} at position {reached[rank]} for {receive.other_end} of rank {peer}, "
                f"at position {position} there"
            )
        self._fail(f"deadlock: {'; '.join(texts)}", *((rank, reached[rank]) for rank in circle))

    def _peer(self, action: Action) -> str:
        """Return a text that names the other end of a transfer; "" for a computation."""
        if action.kind not in OTHER_END:
            return ""
        rank, other = self.schedule.rank_of[action.other_end.stage], action.other_end
        place = self.places.get(other)
        return f" (rank {rank} has {f'{other} at position {place[1]}' if place else f'no {other}'})"

    def _fail(self, text: str, *places: tuple[int, int]) -> NoReturn:
        """Raise a VerifyError with this ``text``. It shows the ranks' lists around each of ``places``, pairs of (rank,
        position).
        """
        lines = []
        for rank in dict.fromkeys(rank for rank, _ in places):
            actions, marked = self.schedule.lists[rank], [at for owner, at in places if owner == rank]
            shown, last = [f"rank {rank}:"], -1
            for at, action in enumerate(actions):
                if any(abs(at - place) <= 4 for place in marked):
                    shown += ["..."] * (at > last + 1) + [f"[{action}]" if at in marked else str(action)]
                    last = at
            lines.append(" ".join(shown + ["..."] * (last + 1 < len(actions))))
        raise VerifyError(
            f"schedule {self.schedule.name!r}: {text}",
            program="\n".join(lines),
            fix="the lists are wrong, not the plan: use another schedule, and report this",
        )
