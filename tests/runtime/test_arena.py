"""The arena gives no byte to two at once, and all that is free."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from shardc.ir.arena import INSIDE, Slot
from shardc.runtime.gloo.buffers import Arena

BYTES = 64


@pytest.mark.parametrize("seed", range(8))
def test_what_is_given_is_what_is_free(seed: int) -> None:
    draw, arena = random.Random(seed), Arena()
    arena.reserve(BYTES)
    held: list[tuple[set[int], Tensor]] = []
    given = refused = 0
    for _ in range(400):
        if held and draw.random() < 0.4:
            held.pop(draw.randrange(len(held)))
            continue
        first = draw.randrange(BYTES)
        slot = Slot("x", draw.randint(1, BYTES - first), 0, 0, INSIDE, first)
        wanted = set(range(first, first + slot.size))
        made = arena.take(slot, torch.uint8, (slot.size,), lambda: None)
        assert (made is not None) == all(wanted.isdisjoint(used) for used, _ in held)
        if made is None:
            refused += 1
        else:
            given += 1
            held.append((wanted, made))
        del made  # or it would hold the last one
    assert given > 50 and refused > 50
