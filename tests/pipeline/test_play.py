"""Playing the lists of a pipeline's ranks: what is refused does not run, what is accepted runs to the right results."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import cos, isclose, sin

import pytest

from shardc.errors import VerifyError
from shardc.ir.schedules import ORDERS, SENDS, Action, Kind, Schedule, clock, play, schedule
from tests.pipeline.test_schedules import TRANSFERS, instant, lists_of, sizes, unit


def run(lists: Schedule) -> tuple[list[float], list[float]]:
    """(loss of each microbatch, gradient of each stage) of a step; an error where a rank lacks a value or waits.

    It is a tiny runtime: numbers for tensors, queues for links. A value is gone when it has been used.
    """
    stages, last = lists.stages, lists.stages - 1
    weights = [1.5 + 0.25 * stage for stage in range(stages)]
    wires: dict[tuple[int, int], deque[float]] = {}
    losses, grads = [0.0] * lists.microbatches, [0.0] * stages
    inputs: list[dict[tuple[str, int, int], float]] = [{} for _ in range(lists.ranks)]
    outputs: list[dict[tuple[str, int, int], float]] = [{} for _ in range(lists.ranks)]
    saved: list[dict[tuple[str, int, int], float]] = [{} for _ in range(lists.ranks)]
    inputs[lists.rank_of[0]] |= {("x", 0, m): 1.0 + m for m in range(lists.microbatches)}

    def give(rank: int, what: str, source: int, stage: int, m: int, value: float) -> None:
        """Put a result where its consumer takes it: another stage of the rank, or the rank's send."""
        (inputs if lists.rank_of[stage] == rank else outputs)[rank][
            (what, stage if lists.rank_of[stage] == rank else source, m)
        ] = value

    def step(rank: int, action: Action) -> bool:
        kind, s, m = action.kind, action.stage, action.microbatch
        if kind in TRANSFERS:
            peer = lists.rank_of[action.other_end.stage]
            what = "x" if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD) else "t"
            if kind in SENDS:
                wires.setdefault((rank, peer), deque()).append(outputs[rank].pop((what, s, m)))
                return True
            if not wires.get((peer, rank)):
                return False
            inputs[rank][what, s, m] = wires[peer, rank].popleft()
        elif lists.rank_of[s] != rank:
            raise KeyError(action)
        elif kind == Kind.FORWARD:
            x = inputs[rank].pop(("x", s, m))
            saved[rank]["x", s, m] = x
            y = x * weights[s] + sin(x)
            if s < last:
                give(rank, "x", s, s + 1, m, y)
            else:
                losses[m] += y
        elif kind == Kind.BACKWARD_WEIGHT:
            grads[s] += saved[rank].pop(("w", s, m))
        else:
            x, t = saved[rank].pop(("x", s, m)), inputs[rank].pop(("t", s, m)) if s < last else 1.0
            if s:
                give(rank, "t", s, s - 1, m, t * (weights[s] + cos(x)))
            if kind == Kind.BACKWARD:
                grads[s] += t * x
            else:
                saved[rank]["w", s, m] = t * x
        return True

    at = [0] * lists.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists.lists):
            while at[rank] < len(actions) and step(rank, actions[at[rank]]):
                at[rank] += 1
                moved = True
    waiting = [(rank, str(actions[at[rank]])) for rank, actions in enumerate(lists.lists) if at[rank] < len(actions)]
    if waiting or any(wires.values()):
        raise RuntimeError(f"waiting: {waiting}, not received: {wires}")
    return losses, grads


def one_device(stages: int, microbatches: int) -> tuple[list[float], list[float]]:
    """What `run` must give."""
    weights = [1.5 + 0.25 * stage for stage in range(stages)]
    losses, grads = [], [0.0] * stages
    for m in range(microbatches):
        xs = [1.0 + m]
        for weight in weights:
            xs.append(xs[-1] * weight + sin(xs[-1]))
        losses.append(xs.pop())
        tangent = 1.0
        for s in reversed(range(stages)):
            grads[s] += tangent * xs[s]
            tangent *= weights[s] + cos(xs[s])
    return losses, grads


def runs(lists: Schedule) -> bool:
    """Whether the lists run to the results of a device."""
    try:
        losses, grads = run(lists)
    except (KeyError, RuntimeError):
        return False
    expected_losses, expected_grads = one_device(lists.stages, lists.microbatches)
    expected = [*expected_losses, *(grad * lists.trains for grad in expected_grads)]
    return all(map(partial(isclose, rel_tol=1e-9), [*losses, *grads], expected))


@pytest.mark.parametrize("name", ORDERS)
def test_plays_and_runs(name: str) -> None:
    for ranks, microbatches, per_rank in sizes(name):
        lists = lists_of(name, ranks, microbatches, per_rank)
        assert (lists.stages, len(lists.rank_of)) == (ranks * per_rank, ranks * per_rank)
        most = play(lists)
        assert [set(counts) for counts in most] == [
            {stage for stage in range(lists.stages) if lists.rank_of[stage] == rank} for rank in range(ranks)
        ]
        assert all(1 <= count <= microbatches for counts in most for count in counts.values())
        assert runs(lists), (name, ranks, microbatches, per_rank)
    assert runs(schedule(name, 2, 3, trains=False))


def swapped(lists: Schedule, rank: int, first: Action, second: Action) -> Schedule:
    exchange = {first: second, second: first}
    return edited(lists, rank, lambda row: [exchange.get(x, x) for x in row])


def edited(lists: Schedule, rank: int, edit: Callable[[list[Action]], list[Action]]) -> Schedule:
    """``lists``, with the list of a rank changed by ``edit``."""
    rows = [tuple(edit(list(row))) if n == rank else row for n, row in enumerate(lists.lists)]
    return replace(lists, lists=tuple(rows))


def moved(lists: Schedule, rank: int, action: Action, ahead_of: Action) -> Schedule:
    def edit(row: list[Action]) -> list[Action]:
        row.remove(action)
        row.insert(row.index(ahead_of), action)
        return row

    return edited(lists, rank, edit)


def without(lists: Schedule, rank: int, action: Action) -> Schedule:
    return edited(lists, rank, lambda row: [x for x in row if x != action])


def message(lists: Schedule) -> str:
    """What `play` says of lists that do not run, without the lists themselves."""
    assert not runs(lists)
    with pytest.raises(VerifyError) as raised:
        play(lists)
    assert raised.value.fix == "the lists are wrong, not the plan: use another schedule, and report this"
    return raised.value.what.removeprefix(f"schedule {lists.name!r}: ")


F, B, SF, RF, SB, RB = (
    Kind.FORWARD, Kind.BACKWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD
)  # fmt: skip
STEP = schedule("1f1b", 3, 4)


def test_swapped_receive() -> None:
    wrong = STEP
    for kind in (RF, F, SF):
        wrong = swapped(wrong, 1, Action(kind, 1, 1), Action(kind, 1, 2))
    with pytest.raises(VerifyError) as raised:
        play(wrong)
    assert str(raised.value) == (
        "schedule '1f1b': rank 1 receives RF1.2 at position 3, but the next message from rank 0 is SF0.1, at "
        "position 3 there\n"
        "  | rank 1: RF1.0 F1.0 SF1.0 [RF1.2] F1.2 SF1.2 RB1.0 B1.0 ...\n"
        "  | rank 0: F0.0 SF0.0 F0.1 [SF0.1] F0.2 SF0.2 RB0.0 B0.0 ...\n"
        "  fix: the lists are wrong, not the plan: use another schedule, and report this"
    )
    assert not runs(wrong)


def test_deadlock() -> None:
    assert message(moved(STEP, 1, Action(RB, 1, 0), ahead_of=Action(SF, 1, 0))) == (
        "deadlock: rank 1 waits in RB1.0 at position 2 for SB2.0 of rank 2, at position 3 there; "
        "rank 2 waits in RF2.0 at position 0 for SF1.0 of rank 1, at position 3 there"
    )


def test_lost_ends() -> None:
    lost = {
        (1, Action(SB, 1, 2)): "rank 0 has RB0.2 at position 12, but rank 1 never sends SB1.2",
        (0, Action(RB, 0, 2)): "rank 1 has SB1.2 at position 20, but rank 0 never receives RB0.2",
    }
    assert {end: message(without(STEP, *end)) for end in lost} == lost


def test_computed_without_operand() -> None:
    received = message(moved(STEP, 1, Action(F, 1, 1), ahead_of=Action(RF, 1, 1)))
    assert received == "rank 1 has F1.1 at position 3, before RF1.1 at position 4 (rank 0 has SF0.1 at position 3)"
    neither = without(without(STEP, 0, Action(SF, 0, 3)), 1, Action(RF, 1, 3))
    assert message(neither) == "rank 1 has F1.3 at position 15, without RF1.3 (rank 0 has no SF0.3)"
    computed = message(moved(STEP, 2, Action(B, 2, 0), ahead_of=Action(F, 2, 0)))
    assert computed == "rank 2 has B2.0 at position 1, before F2.0 at position 2"
    sent = message(moved(STEP, 2, Action(SB, 2, 0), ahead_of=Action(B, 2, 0)))
    assert sent == "rank 2 has SB2.0 at position 2, before B2.0 at position 3"


def test_doubled_and_missing() -> None:
    doubled = message(edited(STEP, 1, lambda row: [*row, Action(B, 1, 2)]))
    assert doubled == "rank 1 has B1.2 at position 24, which is at position 19 already"
    doubled = message(edited(STEP, 1, lambda row: [*row, Action(RF, 1, 2)]))
    place = "rank 0 has SF0.2 at position 5"
    assert doubled == f"rank 1 has RF1.2 at position 24, which is at position 9 already ({place})"
    missing = message(without(STEP, 0, Action(B, 0, 3)))
    assert missing == "rank 0 has F of microbatch 3 in stage 0, not F B or F I W"
    missing = message(without(schedule("zb", 2, 2, 1), 0, Action(Kind.BACKWARD_WEIGHT, 0, 1)))
    assert missing == "rank 0 has F I of microbatch 1 in stage 0, not F B or F I W"
    extra = message(edited(schedule("gpipe", 2, 2, trains=False), 1, lambda row: [*row, Action(B, 1, 1)]))
    assert extra == "rank 1 has F B of microbatch 1 in stage 1, not F"


def test_wrong_place() -> None:
    stray = {
        Action(B, 1, 2): "stage 1 is on rank 1",
        Action(F, 0, 4): "the step has 3 stages and 4 microbatches",
        Action(SB, 0, 0): "there is no stage -1",
    }
    for action, text in stray.items():
        wrong = edited(STEP, 0, lambda row, action=action: [*row, action])  # type: ignore[misc]
        assert message(wrong) == f"rank 0 has {action} at position 16, but {text}"
    wrong = edited(schedule("zbv", 2, 2), 1, lambda row: [*row, Action(SF, 1, 0)])
    assert message(wrong) == "rank 1 has SF1.0 at position 20, but stage 2 is on the same rank"


def mutated(lists: Schedule, chance: random.Random) -> Schedule:
    """``lists`` with one to three random changes."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        rank = chance.randrange(lists.ranks)
        row = list(lists.lists[rank])
        first, second = chance.randrange(len(row)), chance.randrange(len(row))
        near = min(first + 1, len(row) - 1)
        change = chance.choice((*["neighbours"] * 5, "swap", "move", "drop", "double", "rename", "stray"))
        if change == "neighbours":
            row[first], row[near] = row[near], row[first]
        elif change == "swap":
            row[first], row[second] = row[second], row[first]
        elif change == "move":
            row.insert(second, row.pop(first))
        elif change == "drop":
            row.pop(first)
        elif change == "double":
            row.insert(second, row[first])
        elif change == "rename":
            row[first] = replace(row[first], microbatch=chance.randrange(lists.microbatches))
        else:
            row.insert(first, chance.choice(lists.lists[chance.randrange(lists.ranks)]))
        lists = edited(lists, rank, lambda _, row=row: row)  # type: ignore[misc]
    return lists


def test_what_is_accepted_runs_and_what_is_refused_does_not() -> None:
    chance = random.Random(0)
    accepted = refused = 0
    for name, ranks, microbatches, per_rank in (
        ("gpipe", 3, 4, 1), ("1f1b", 3, 4, 1), ("1f1b", 4, 6, 1), ("interleaved", 2, 4, 2), ("zb", 2, 4, 2),
        ("zb", 4, 4, 1), ("zbv", 2, 4, 2), ("dualpipev", 2, 5, 2),
    ):  # fmt: skip
        lists = lists_of(name, ranks, microbatches, per_rank)
        for _ in range(100):
            changed = mutated(lists, chance)
            try:
                play(changed)
            except VerifyError as error:
                refused += 1
                assert not runs(changed), f"{changed}\n{error}"
            else:
                accepted += 1
                assert runs(changed), str(changed)
    assert accepted > 100 and refused > 500, (accepted, refused)


def test_a_clock_of_lists_that_do_not_fit() -> None:
    wrong = moved(STEP, 0, Action(RB, 0, 0), ahead_of=Action(SF, 0, 0))
    with pytest.raises(VerifyError, match="deadlock"):
        clock(wrong, unit, instant)
