"""Memory of collectives: places in an arena for their results (`MemoryPlan`), and small tensors packed into one message
(`Packing`).

A *slot* is the memory of one result, or of a received term that is reduced into one. Its region depends on its last
reader. *inside*: an op of the same forward or backward graph; such slots share the bytes of one arena over time.
*kept*: the backward, for a result of the forward; kept slots have an arena of their own. *outside*: the caller (of a
gradient or an output); the memory is then freshly allocated.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import fx

from shardc.ir import comm_volume
from shardc.ir import graph as ir

# Most bytes of a tensor that shares a message. A message over gloo takes a core 0.1 to 0.2 ms besides the time for its
# bytes. On two cores, by the wall clock, 20 tensors of 16 KiB took 3.8 ms in separate messages and 1.3 ms in one, of
# 128 KiB 4.8 and 2.8 ms, of 256 KiB 6.5 and 6.6 ms, of 1 MiB 14 and 20 ms.
LARGEST = 128 << 10


def rows_of(node: fx.Node, ranks: int) -> list[tuple[torch.dtype, int]]:
    """Return, for each operand of a collective over ``ranks`` ranks, (dtype, bytes) of what a rank sends of it to one
    peer.
    """
    parts = ranks if comm_volume.collective_kind(node) == "reduce_scatter" else 1
    return [(v.dtype, prod(v.shape) * v.itemsize // parts) for v in map(ir.value, comm_volume.sent_tensors(node))]


class Packing(NamedTuple):
    """Byte offsets of small tensors that go to one peer in one message, and the size of that message.

    Args:
        offsets: index of a tensor in the list -> its offset in the message in bytes, a multiple of its element size.
        size: size of the message in bytes.
    """

    offsets: dict[int, int]
    size: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[torch.dtype, int]]) -> Packing:
        """Return the `Packing` of the small tensors (at most `LARGEST` bytes) for one peer; empty for fewer than two.

        Args:
            tensors: (dtype, bytes) of each tensor for the peer.

        >>> Packing.of([(torch.bfloat16, 6), (torch.float32, 8), (torch.float32, 1 << 20)])
        Packing(offsets={1: 0, 0: 8}, size=14)
        >>> Packing.of([(torch.float32, 8)])
        Packing(offsets={}, size=0)
        """
        small = [at for at, (_, size) in enumerate(tensors) if 0 < size <= LARGEST]
        if len(small) < 2:
            return cls({}, 0)
        offsets, end = {}, 0
        # The largest elements first, so that nothing lies between two tensors.
        for at in sorted(small, key=lambda at: -tensors[at][0].itemsize):
            offsets[at] = end
            end += tensors[at][1]
        return cls(offsets, end)

    @property
    def room(self) -> int:
        """Return the bytes that this message takes in a buffer of several messages: ``size``, rounded up to a multiple
        of `ALIGNMENT`.
        """
        return aligned(self.size)

    def messages(self, tensors: int) -> int:
        """Return the number of messages in which a rank sends ``tensors`` tensors to a peer: one for each tensor that
        is not packed, and one for all packed tensors.
        """
        return tensors - len(self.offsets) + bool(self.offsets)


INSIDE, KEPT, OUTSIDE = "inside", "kept", "outside"
ALIGNMENT = 64  # bytes; a cache line, and what torch's own allocator aligns to
PLAN = "shardc_memory"  # on a half's output node: its MemoryPlan


@dataclass(frozen=True)
class Slot:
    """Memory of one result of a collective (or of a term that is received and then reduced into it), and the time in
    which it is in use.

    Args:
        name: name of the result in the graph's text; with ``.wire`` for a received term.
        size: size in bytes.
        start, end: position, among the ops of its graph, of the first and of the last op that uses it.
        region: INSIDE, KEPT or OUTSIDE.
        offset: offset in its region's arena in bytes; 0 outside.
        saved: names of the backward's placeholders that read it, for a kept slot.
    """

    name: str
    size: int
    start: int
    end: int
    region: str = INSIDE
    offset: int = 0
    saved: tuple[str, ...] = ()

    def overlaps(self, other: Slot) -> bool:
        """Return whether both slots are in use at some op: the intervals from ``start`` to ``end`` overlap."""
        return self.start <= other.end and other.start <= self.end


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plan of a forward or backward graph: a `Slot` for each result of its collectives, in order of slot
    numbers.

    Args:
        slots: the slots; collectives refer to them by their index.
        last_reads: (name, position of the last op that reads it) of each placeholder, in order.
    """

    slots: tuple[Slot, ...] = ()
    last_reads: tuple[tuple[str, int], ...] = ()

    def size(self, region: str = INSIDE) -> int:
        """Return the size of the arena of ``region`` in bytes: where its last slot ends."""
        return max((s.offset + s.size for s in self.slots if s.region == region), default=0)

    @property
    def peak(self) -> int:
        """Return the most bytes in use at once, over all regions."""
        return max((self.bytes_at(slot.start) for slot in self.slots), default=0)

    def bytes_at(self, at: int) -> int:
        """Return the bytes in use at op (or, when lowered, code line) number ``at``."""
        return sum(slot.size for slot in self.slots if slot.start <= at <= slot.end)

    def peak_after(self, forward: MemoryPlan) -> int:
        """Return the most bytes in use at once during a backward, the results that ``forward`` kept for it included. A
        kept result counts until its last read.
        """
        ends = dict(self.last_reads)
        saved = [
            (slot.size, max(ends.get(name, 0) for name in slot.saved)) for slot in forward.slots if slot.region == KEPT
        ]
        places = {0, *(slot.start for slot in self.slots)}
        return max(self.bytes_at(at) + sum(size for size, end in saved if at <= end) for at in places)

    def moved(
        self, lifetimes: Mapping[int, tuple[int, int]], leaving: Container[int], argument_ends: Sequence[int]
    ) -> MemoryPlan:
        """Return the memory plan of the graph's compiled code. ``lifetimes`` of slots, and ``argument_ends`` of
        placeholders, are counted in its lines; ``leaving`` are the slots that it returns. Regions and offsets follow
        from these.

        Args:
            lifetimes: slot number -> (first line, last line); a missing slot is never written.
            leaving: numbers of the slots that the compiled graph returns.
            argument_ends: last line at which the memory of each placeholder is in use.
        """
        slots = []
        for number, slot in enumerate(self.slots):
            if number not in lifetimes:
                slots.append(replace(slot, size=0, region=OUTSIDE))
                continue
            start, end = lifetimes[number]
            # Of a kept result that does not leave, the code returns a copy.
            moves = {INSIDE: OUTSIDE} if number in leaving else {KEPT: INSIDE}
            slots.append(replace(slot, start=start, end=end, region=moves.get(slot.region, slot.region)))
        names = (name for name, _ in self.last_reads)
        return MemoryPlan(place(slots), tuple(zip(names, argument_ends, strict=True)))

    def renamed(self, arguments: Mapping[str, str], saved: Mapping[str, str]) -> MemoryPlan:
        """Return a copy with other placeholder names. ``arguments`` maps the names of this graph's placeholders,
        ``saved`` those of the backward's placeholders that read kept slots.

        Raises:
            KeyError: a name is missing from the mapping.
        """
        slots = (replace(slot, saved=tuple(saved[name] for name in slot.saved)) for slot in self.slots)
        return MemoryPlan(tuple(slots), tuple((arguments[name], at) for name, at in self.last_reads))

    def text(self) -> str:
        """Return the plan as a table with one line per slot, and the totals below it."""
        rows = [("slot", "bytes", "from", "to", "offset", "result")]
        for number, slot in enumerate(self.slots):
            where = str(slot.offset) if slot.region == INSIDE else slot.region
            where = f"{slot.region} {slot.offset}" if slot.region == KEPT else where
            rows.append((str(number), str(slot.size), str(slot.start), str(slot.end), where, slot.name))
        widths = [max(len(row[k]) for row in rows) for k in range(5)]
        lines = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(row[:5], widths, strict=True)), row[5]])
            for row in rows
        ]
        total = sum(slot.size for slot in self.slots)
        lines.append(f"arena {self.size()} B, kept {self.size(KEPT)} B; peak {self.peak} B of {total} B made")
        return "\n".join(lines) + "\n"


def place(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return ``slots`` with an offset for each. Slots of one region whose lifetimes overlap get separate bytes.

    The largest slot is placed first, each at the lowest offset that is free during its lifetime ("greedy by size" of
    Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020). Kept slots are placed side by
    side: all of them are in use between forward and backward.
    """
    out = list(slots)
    kept_bytes = 0
    for number, slot in enumerate(out):
        if slot.region == KEPT:
            out[number] = replace(slot, offset=kept_bytes)
            kept_bytes += aligned(slot.size)
    inside = [number for number, slot in enumerate(out) if slot.region == INSIDE and slot.size]
    placed: list[Slot] = []
    for number in sorted(inside, key=lambda number: (-out[number].size, out[number].start)):
        slot, offset = out[number], 0
        for other in sorted((other for other in placed if other.overlaps(slot)), key=lambda other: other.offset):
            if offset + aligned(slot.size) <= other.offset:
                break
            offset = max(offset, other.offset + aligned(other.size))
        out[number] = replace(slot, offset=offset)
        placed.append(out[number])
    return tuple(out)


def aligned(size: int) -> int:
    """Return ``size`` in bytes, rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
