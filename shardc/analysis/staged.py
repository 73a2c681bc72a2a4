"""Bytes that a rank's messages take until its peers have read them, where they go through memory that ranks share.

The same as `shardc.runtime.shared` does: a message lies there until a peer tells, with a message of its own that this
rank has heard, that it was read.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.analysis.sequence import START, WAIT, Sequence
from shardc.ir import tally
from shardc.ir.comm import ALL_REDUCE, IN_MESSAGES, REDUCE_SCATTER
from shardc.ir.mesh import Mesh
from shardc.ir.packing import rows_of
from shardc.ir.staging import Block, Part, Staging


def parts_of(node: fx.Node, mesh: Mesh) -> tuple[Part, ...] | None:
    """What a collective stages, or None where it does not go through shared memory."""
    if node.target not in IN_MESSAGES:
        return None
    ranks = 1
    for axis in tally.group_axes(tally.arguments_of(node)["group_name"], mesh) or ():
        ranks *= mesh.size(axis)
    if ranks == 1 or (node.target is ALL_REDUCE and ranks > 2):
        return None
    part = Part.of(rows_of(node, ranks))
    return (part,) * (ranks - 1 if node.target is REDUCE_SCATTER else 1)


def staged(step: Sequence, mesh: Mesh) -> int:
    """The most bytes that are in use at once, over steps that follow one another."""
    rooms: dict[Any, _Room] = {}
    owner: dict[int, tuple[_Room, int]] = {}
    for _ in range(3):  # what is still unread at the end of a step is so at the start of the next
        for at, op in enumerate(step.ops):
            if op.kind == START and (parts := parts_of(op.node, mesh)) is not None:
                room = rooms.setdefault(tally.arguments_of(op.node)["group_name"], _Room())
                owner[at] = room, room.start(sum(part.size for part in parts))
            elif (source := owner.get(op.reads[0]) if op.reads else None) is not None:
                owner[at] = source
                if op.kind == WAIT:
                    source[0].wait(source[1])
    return sum(room.staging.peak for room in rooms.values())


class _Room:
    """The staging memory of one group."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._blocks: list[Block] = []
        self._told: list[tuple[int, ...]] = []  # by exchange: those that were read since the one before
        self._read: list[int] = []
        self._heard = 0
        self._waited: set[int] = set()

    def start(self, size: int) -> int:
        self._blocks.append(self.staging.take(size))
        self._told.append(tuple(self._read))
        self._read = []
        return len(self._blocks) - 1

    def wait(self, exchange: int) -> None:
        if exchange in self._waited:
            return
        self._waited.add(exchange)
        while self._heard <= exchange:
            for read in self._told[self._heard]:
                self.staging.give(self._blocks[read])
            self._heard += 1
        self._read.append(exchange)
