"""Pipeline schedules: in torch's order, with what they need of memory and time."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from functools import cache

import pytest

from shardc._compat import pipeline_order
from shardc.errors import PlanError
from shardc.ir.schedules import COMPUTATIONS, ORDERS, RECEIVES, SENDS, Action, Kind, Schedule, clock, play, schedule

lists_of = cache(schedule)
TRANSFERS = (*SENDS, *RECEIVES)
TORCH = {
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def sizes(name: str) -> list[tuple[int, int, int]]:
    """(ranks, microbatches, stages per rank) of the steps that are tried."""
    per_rank = {"gpipe": [1], "1f1b": [1], "interleaved": [1, 2, 3], "zb": [1, 2, 3]}.get(name, [2])
    return [
        (ranks, microbatches, stages)
        for ranks in (1, 2, 4, 8)
        for microbatches in (1, 3, ranks, 2 * ranks + 2, 3 * ranks)
        for stages in per_rank
        if stages * ranks <= 16
        if not (name == "dualpipev" and microbatches < 2 * ranks)
        and not (name in ("interleaved", "zb") and microbatches % max(1, microbatches // ranks))
    ]


def computed(lists: Schedule) -> list[list[tuple[str, int, int]]]:
    """The computations of each rank, as `pipeline_order` has them."""
    return [[(x.kind.value, x.stage, x.microbatch) for x in row if x.kind in COMPUTATIONS] for row in lists.lists]


def unit(kind: Kind, stage: int) -> float:
    return 2.0 if kind == Kind.BACKWARD else 1.0


def instant(source: int, destination: int) -> float:
    return 0.0


@pytest.mark.parametrize("name", TORCH)
def test_computes_in_the_order_of_torch(name: str) -> None:
    for ranks, microbatches, per_rank in sizes(name):
        expected = pipeline_order(TORCH[name], ranks, microbatches, per_rank)
        assert computed(schedule(name, ranks, microbatches, per_rank)) == expected


def test_1f1b_is_in_the_order_of_torch() -> None:
    """Torch's list of it is wrong on the last rank: its forwards are of microbatches 1 to n, not 0 to n - 1."""
    for ranks, microbatches in ((2, 2), (2, 5), (4, 4), (4, 9), (8, 16)):
        expected = pipeline_order("1F1B", ranks, microbatches, 1)
        lists = computed(schedule("1f1b", ranks, microbatches))
        assert lists[:-1] == expected[:-1]
        assert lists[-1] == [(kind, ranks - 1, m) for m in range(microbatches) for kind in "FB"]


@pytest.mark.parametrize("name", ORDERS)
def test_transfers_are_between_ranks_alone(name: str) -> None:
    for ranks, microbatches, per_rank in sizes(name):
        lists = lists_of(name, ranks, microbatches, per_rank)
        crossings = sum(a != b for a, b in zip(lists.rank_of, lists.rank_of[1:], strict=False))
        for kind in TRANSFERS:
            assert sum(x.kind == kind for row in lists.lists for x in row) == crossings * microbatches
    v = schedule("zbv", 4, 8)
    assert v.rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
    assert not any(x.kind in TRANSFERS and {x.stage, x.other_end.stage} == {3, 4} for row in v.lists for x in row)


@pytest.mark.parametrize("name", ORDERS)
def test_forwards_alone(name: str) -> None:
    """For any number of microbatches; ranks wait only at the start and at the end."""
    for ranks in (1, 2, 4, 8):
        for microbatches in (1, 3, ranks, 2 * ranks + 1, 4 * ranks):
            lists = schedule(name, ranks, microbatches, trains=False)
            assert {count for counts in play(lists) for count in counts.values()} == {0}
            forwards = [x for row in lists.lists for x in row if x.kind in COMPUTATIONS]
            assert {x.kind for x in forwards} == {Kind.FORWARD}
            assert len(forwards) == lists.stages * microbatches
            if microbatches % ranks == 0:
                work = microbatches * lists.stages // ranks
                assert clock(lists, unit, instant).seconds <= work + 2 * (ranks - 1)


def test_microbatches_in_flight() -> None:
    for ranks in (2, 4, 8):
        for microbatches in (1, 3, ranks, 4 * ranks):
            assert play(schedule("gpipe", ranks, microbatches)) == tuple({s: microbatches} for s in range(ranks))
            ahead = tuple({s: min(ranks - s, microbatches)} for s in range(ranks))
            assert play(schedule("1f1b", ranks, microbatches)) == ahead


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_equal_stages(name: str) -> None:
    for ranks in (1, 2, 4, 8):
        for microbatches in (ranks, 2 * ranks + 1, 4 * ranks):
            step = clock(schedule(name, ranks, microbatches), unit, instant)
            assert step.seconds == 3 * (microbatches + ranks - 1)
            assert step.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
            assert step.exposed == (0.0,) * ranks


def test_bubbles_of_other_schedules() -> None:
    """Equal stages: interleaving divides the bubble by the stages per rank; the V keeps almost none."""
    whole = clock(schedule("interleaved", 4, 8, 2), lambda kind, stage: unit(kind, stage) / 2, instant)
    assert whole.seconds == pytest.approx(3 * 8 + 3 * 3 / 2)
    v = clock(schedule("zbv", 4, 16), unit, instant)
    assert v.seconds - max(v.busy) == pytest.approx(3.0)
    assert v.bubble < whole.bubble < clock(schedule("1f1b", 4, 8), unit, instant).bubble


def test_times() -> None:
    """By hand: stage 1 is slower; messages take 0.5 s forward and 0.25 s backward."""
    lists = schedule("1f1b", 2, 2)
    seconds = {"F0": 1.0, "B0": 2.0, "F1": 2.0, "B1": 3.0}
    step = clock(lists, lambda kind, stage: seconds[f"{kind.value}{stage}"], lambda a, b: 0.5 if a < b else 0.25)
    shown = [[f"{action} {start:g}-{end:g}" for action, start, end in row] for row in step.spans]
    assert shown == [
        ["F0.0 0-1", "SF0.0 1-1.5", "F0.1 1-2", "SF0.1 2-2.5"]
        + ["RB0.0 2-6.75", "B0.0 6.75-8.75", "RB0.1 8.75-11.75", "B0.1 11.75-13.75"],
        ["RF1.0 0-1.5", "F1.0 1.5-3.5", "B1.0 3.5-6.5", "SB1.0 6.5-6.75"]
        + ["RF1.1 6.5-6.5", "F1.1 6.5-8.5", "B1.1 8.5-11.5", "SB1.1 11.5-11.75"],
    ]
    assert (step.seconds, step.busy, step.exposed) == (13.75, (6.0, 10.0), (0.5, 0.5))
    assert step.bubble == pytest.approx(1 - 16 / 27.5)


@pytest.mark.parametrize("name", ORDERS)
def test_ranks_wait_for_what_they_compute_with_alone(name: str) -> None:
    """With computations of any length a step is as long as their order alone makes it: no receive stands too early."""
    chance = random.Random(1)
    for ranks, microbatches, per_rank in sizes(name):
        lists = lists_of(name, ranks, microbatches, per_rank)
        durations = {(kind, s): chance.uniform(1, 4) for kind in COMPUTATIONS for s in range(lists.stages)}
        ends: dict[Action, float] = {}
        rows = [deque(x for x in row if x.kind in COMPUTATIONS) for row in lists.lists]
        now = [0.0] * ranks

        def operands(x: Action, last: int = lists.stages - 1) -> list[set[Action]]:
            """Sets of which a member each must be there; of the tangents from a stage, its input's gradient."""
            if x.kind == Kind.FORWARD:
                return [{replace(x, stage=x.stage - 1)}] if x.stage else []
            tangents = {Action(kind, x.stage + 1, x.microbatch) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
            return [tangents] if x.kind != Kind.BACKWARD_WEIGHT and x.stage < last else []

        while any(rows):
            for rank, row in enumerate(rows):
                while row and all(needed & ends.keys() for needed in operands(row[0])):
                    ready = [ends[x] for needed in operands(row[0]) for x in needed & ends.keys()]
                    now[rank] = ends[row[0]] = max([now[rank], *ready]) + durations[row[0].kind, row[0].stage]
                    row.popleft()
        step = clock(lists, lambda kind, stage: durations[kind, stage], instant)  # noqa: B023
        assert step.seconds == pytest.approx(max(now))


def test_messages_share_a_link() -> None:
    """GPipe's forwards are quick: the second message starts when the first has arrived."""
    step = clock(schedule("gpipe", 2, 3), lambda kind, stage: 1.0, lambda a, b: 4.0 if a < b else 0.0)
    sends = [(start, end) for action, start, end in step.spans[0] if action.kind == Kind.SEND_FORWARD]
    assert sends == [(1.0, 5.0), (5.0, 9.0), (9.0, 13.0)]


NAMES = "'gpipe', '1f1b', 'interleaved', 'zb', 'zbv', 'dualpipev'"


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("1f1", 2, 2), "no pipeline schedule is called '1f1'", "did you mean '1f1b'?"),
        (("loops", 2, 2), "no pipeline schedule is called 'loops'", f"use one of {NAMES}"),
        (
            ("zbv", 4, 8, 3),
            "schedule 'zbv' has 2 stages per rank, not 3",
            "leave out stages_per_rank, or use schedule='interleaved' or 'zb'",
        ),
        (
            ("gpipe", 4, 8, 2),
            "schedule 'gpipe' has 1 stage per rank, not 2",
            "leave out stages_per_rank, or use schedule='interleaved' or 'zb'",
        ),
        (
            ("dualpipev", 4, 7),
            "schedule 'dualpipev' on 4 ranks needs at least 8 microbatches, one for each stage, not 7",
            "use 8 microbatches or more, or schedule='zbv'",
        ),
        (
            ("interleaved", 4, 9),
            "schedule 'interleaved' on 4 ranks runs 9 microbatches in 2 rounds, which must be of equal length",
            "use 8 or 12 microbatches (any multiple of 4 will do)",
        ),
        (
            ("zb", 2, 7),
            "schedule 'zb' on 2 ranks runs 7 microbatches in 3 rounds, which must be of equal length",
            "use 6 or 8 microbatches (any multiple of 2 will do)",
        ),
        (("gpipe", 0, 8), "ranks is 0, not an integer of 1 or more", None),
        (("gpipe", 2, 0), "microbatches is 0, not an integer of 1 or more", None),
        (("gpipe", 2, 2, 0), "stages_per_rank is 0, not an integer of 1 or more or None", None),
        (("gpipe", 2, 2.0), "microbatches is 2.0, not an integer", None),
        ((None, 2, 2), "name is None, not a string", None),
    ],
)
def test_bad_input(arguments: tuple[object, ...], what: str, fix: str | None) -> None:
    with pytest.raises(PlanError) as raised:
        schedule(*arguments)  # type: ignore[arg-type]
    assert (raised.value.what, raised.value.fix) == (what, fix)
