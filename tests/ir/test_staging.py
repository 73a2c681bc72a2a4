"""Blocks of staging memory: never two at one place, and used again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardc.ir.arena import ALIGNMENT
from shardc.ir.staging import Block, Staging

SIZES = st.integers(0, 300_000)


@given(st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=40))
def test_blocks_do_not_meet_and_are_used_again(steps: list[tuple[int, int]]) -> None:
    staging, taken = Staging(), list[Block]()
    for size, kept in steps:
        block = staging.take(size)
        assert block.size >= size and block.offset % ALIGNMENT == 0
        assert block.offset + block.size <= staging.segments[block.segment]
        for other in taken:
            apart = block.offset + block.size <= other.offset or other.offset + other.size <= block.offset
            assert other.segment != block.segment or apart
        taken.append(block)
        while len(taken) > kept:
            staging.give(taken.pop(0))
    for block in taken:
        staging.give(block)
    if steps:
        whole = max(staging.segments)
        assert staging.take(whole).size == whole, "what is free has become one again"
        assert sum(staging.segments) == staging.size


def test_the_same_steps_take_the_same_places() -> None:
    staging = Staging()

    def step() -> list[Block]:
        taken = [staging.take(size) for size in (70_000, 5_000, 200_000)]
        for block in taken:
            staging.give(block)
        return taken

    step()
    size = staging.size
    assert step() == step() and staging.size == size
