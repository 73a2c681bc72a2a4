"""Memory for results of collectives, in arenas that every step reuses; the scheduling class of gloo's threads.

The pass `PlanMemory` assigns each result an offset (slot), and `shardc.runtime.gloo.direct` requests it here.
Memory in use is never given away: if a slot is occupied (a second forward before the first's backward, a result still
referenced), the result gets its own memory, counted in `Buffers.strays`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shardc.ir.arena import INSIDE, KEPT, OUTSIDE, MemoryPlan, Slot

_NAME = "gloo_tcp_loop"


def let_compute_first() -> None:
    """Sets gloo's event loop threads to SCHED_BATCH (sched(7)), so that they do not preempt compute threads.

    A loop spins on a connection's lock while another thread holds it (gloo/transport/tcp/pair.cc, Pair::handleEvents).
    If it has preempted that thread, both stall for a time slice of 2 to 3 ms; this happens with as many threads as
    cores. Under SCHED_BATCH a loop keeps its share of a core and uses idle ones at once.

    Affects existing loops in the default class only; no effect outside Linux, or if not permitted.
    """
    tasks = Path("/proc/self/task")
    if not hasattr(os, "SCHED_BATCH") or not tasks.is_dir():
        return
    for task in tasks.iterdir():
        # The thread may have ended.
        with suppress(OSError):
            thread = int(task.name)
            if (task / "comm").read_text().strip() == _NAME and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Arena:
    """A block of host memory for results of collectives, with a record of the byte ranges that tensors use now.

    Attributes:
        size: bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        self._memory: mmap.mmap | None = None
        self._used: list[tuple[int, int]] = []  # (from, to), sorted; other threads remove ranges

    def reserve(self, size: int) -> None:
        """Grows the arena to at least ``size`` bytes. Tensors in the old memory stay valid."""
        if size > self.size:
            self._memory, self.size = mmap.mmap(-1, size, flags=_FLAGS), size
            self._used = []  # tensors in the old memory keep that and the old list

    def take(self, slot: Slot, dtype: torch.dtype, shape: Sequence[int], on_free: Callable[[], None]) -> Tensor | None:
        """Returns a tensor of ``shape`` in the memory of ``slot``; None if that is in use or too small. ``on_free`` is
        called when the tensor's storage is freed.
        """
        first, last = span = slot.offset, slot.offset + slot.size
        # The list of this memory: `reserve` may replace memory and list before the tensor is freed. `_is_free` gets a
        # copy of it, as finalizers of other threads remove ranges meanwhile.
        used = self._used
        if last > self.size or prod(shape) * dtype.itemsize > slot.size or not _is_free(span, used.copy()):
            return None
        insort(used, span)

        def gone(_: object) -> None:
            used.remove(span)
            on_free()

        assert self._memory is not None
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=first).view(list(shape))
        _on_free(tensor, gone)
        return tensor


def _is_free(span: tuple[int, int], used: Sequence[tuple[int, int]]) -> bool:
    """Returns whether ``span``, (from, to), overlaps none of the ranges ``used``, which are sorted and disjoint."""
    at = bisect(used, span)
    # Only the range before and the range behind can overlap.
    return all(span[1] <= a or b <= span[0] for a, b in used[max(at - 1, 0) : at + 1])


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of collective results on one rank: gathered parameters, message buffers and reduced values.

    Counts results of planned collectives (on CPU ranks: all-gathers, reduce-scatters, all-reduces) and their receive
    buffers, from the start of the collective until the storage is freed or returned to the caller. Does not count
    parameters, activations and optimizer state.

    Args:
        planned: by graph that has run ("forward", "backward", "inference"), the planned peak.
        observed: peak over all steps so far, from the lifetimes of storages.
        arena: bytes allocated for results, once for all steps.
        strays: number of results that got their own memory because their slot was occupied.
    """

    planned: dict[str, int]
    observed: int
    arena: int
    strays: int

    @property
    def planned_peak(self) -> int:
        """Returns the largest planned peak of a graph, in bytes."""
        return max(self.planned.values(), default=0)


@dataclass
class Buffers:
    """The memory arenas for results of one module's collectives, with counters.

    Attributes:
        in_use, peak: bytes of collective results in use now, and their maximum so far.
        strays: number of results whose slot was occupied.
        arenas: region -> its arena: `INSIDE` for results of one graph, `KEPT` for those from forward to backward.
        _inside, _outside: bytes of each result in use, by its turn: of those in an arena's region, and of those that
            leave the graph.
        _turn: number of the last result.
    """

    in_use: int = 0
    peak: int = 0
    strays: int = 0
    arenas: dict[str, Arena] = field(default_factory=lambda: {INSIDE: Arena(), KEPT: Arena()})
    _inside: dict[int, int] = field(default_factory=dict)
    _outside: dict[int, int] = field(default_factory=dict)
    _turn: int = 0

    @property
    def allocated(self) -> int:
        """Returns the bytes of the arenas."""
        return sum(arena.size for arena in self.arenas.values())

    def use(self, planned: dict[str, int]) -> MemoryUse:
        """Returns the counters of memory as a `MemoryUse`. ``planned`` is the planned peak in bytes of each graph."""
        return MemoryUse(planned, self.peak, self.allocated, self.strays)

    @contextmanager
    def planned(self, plan: MemoryPlan) -> Iterator[Window]:
        """Context manager in which results of collectives get the arena slots that ``plan`` assigns; yields the
        `Window` of these slots.
        """
        for region, arena in self.arenas.items():
            arena.reserve(plan.size(region))
        _running.windows.append(window := Window(self, plan))
        try:
            yield window
        finally:
            _running.windows.pop()
            # Results that a graph returned to its caller are no longer counted.
            self.in_use -= sum(self._outside.values())
            self._outside.clear()

    def take(self, slot: Slot, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns a tensor for a collective's result. It lies in the arena memory of ``slot``, or in new memory if the
        slot has none or is in use.

        Args:
            like: a tensor of the result's dtype and device.
        """
        self._turn += 1
        # Results that leave the graph count until it ends, as their caller may keep them for long.
        turn, counted = self._turn, self._outside if slot.region == OUTSIDE else self._inside
        size = counted[turn] = prod(shape) * like.element_size()
        self.in_use += size
        self.peak = max(self.peak, self.in_use)

        def on_free() -> None:
            self.in_use -= counted.pop(turn, 0)  # 0 if the graph has ended, which took it off the count

        if slot.region != OUTSIDE and slot.size:
            tensor = self.arenas[slot.region].take(slot, like.dtype, shape, on_free)
            if tensor is not None:
                return tensor
            self.strays += 1  # the slot is in use
        tensor = like.new_empty(shape)
        _on_free(tensor, lambda _: on_free())
        return tensor


@dataclass
class Window:
    """The arena slots for the collectives of the segment (part of a graph that is compiled by itself) that runs: those
    in ``plan`` from index ``first`` on. Collectives number the slots of their segment from 0.
    """

    buffers: Buffers
    plan: MemoryPlan
    first: int = 0


class _Running(threading.local):
    """The `Window` of each graph that runs on this thread, innermost last."""

    def __init__(self) -> None:
        self.windows: list[Window] = []


_running = _Running()


def empty(slots: Sequence[int], at: int, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns an uninitialised tensor of ``shape``, with the dtype of ``like``, for a collective's result. It lies in
    the arena if the running graph has a memory plan and the slot is free, else in new memory.

    Args:
        slots: slot indices of the collective, in the plan of the running graph; empty without a plan, which allocates.
        at: position of the result's slot in ``slots``.
    """
    if not slots or not _running.windows:
        return like.new_empty(shape)
    window = _running.windows[-1]
    return window.buffers.take(window.plan.slots[window.first + slots[at]], like, shape)


def lend(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Lends the memory of the contiguous ``tensor`` to threads, such as gloo's, that keep a tensor for a while after
    they are done. Returns (alias of ``tensor``, function after whose call the alias no longer keeps the memory alive).
    """
    if not tensor.nbytes:
        return tensor, lambda: None
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.lender = tensor  # type: ignore[attr-defined]  # kept alive by the buffer, which the alias keeps alive
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape), lambda: delattr(memory, "lender")


def _on_free(tensor: Tensor, gone: Callable[[object], None]) -> None:
    """Registers ``gone``, a function of one unused argument, to be called when the storage of ``tensor`` is freed."""
    weakref.finalize(tensor.untyped_storage(), gone, None).atexit = False
