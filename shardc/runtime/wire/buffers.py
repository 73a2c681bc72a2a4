"""The memory that collectives' results lie in: arenas, allocated once and used again by every step.

`shardc.passes.plan_memory` says where each result of a half lies, `shardc.runtime.wire.direct` asks for it here. The
same result has the same address in every step. Nothing that is still in use is ever given away: where a range is not
free at its time (a second forward before the first's backward, a result that somebody kept) the result gets memory of
its own for this once, which `Buffers.strays` counts.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from bisect import bisect, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardc.ir.arena import INSIDE, KEPT, OUTSIDE, MemoryPlan, Slot

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Arena:
    """Bytes of the host, and which of them are in use."""

    def __init__(self) -> None:
        self.size = 0
        self._memory: mmap.mmap | None = None
        self._used: list[tuple[int, int]] = []  # (from, to), in order; other threads take some out

    def reserve(self, size: int) -> None:
        """Makes room for ``size`` bytes; what lies in the arena stays where it is and leaves with its last user."""
        if size > self.size:
            self._memory, self.size = mmap.mmap(-1, size, flags=_FLAGS), size
            self._used = []

    def take(self, slot: Slot, dtype: torch.dtype, shape: Sequence[int], left: Callable[[], None]) -> Tensor | None:
        """A tensor at the slot's place, or None where not all of it is free; ``left`` is called when it is given up."""
        first, last = span = slot.offset, slot.offset + slot.size
        used = self._used
        if last > self.size or prod(shape) * dtype.itemsize > slot.size or not _is_free(span, used.copy()):
            return None
        insort(used, span)

        def gone(_: Any) -> None:
            used.remove(span)
            left()

        assert self._memory is not None
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=first).view(list(shape))
        _watch(tensor, gone)
        return tensor


def _is_free(span: tuple[int, int], used: Sequence[tuple[int, int]]) -> bool:
    """Whether ``span`` meets none of ``used``, which are in order and apart from one another."""
    at = bisect(used, span)
    return all(span[1] <= a or b <= span[0] for a, b in used[max(at - 1, 0) : at + 1])


@dataclass(frozen=True)
class MemoryUse:
    """The memory of what collectives make on one rank: gathered parameters, wire buffers, reduced values; in bytes.

    Counted are the results of collectives that are planned (on CPU ranks: gathers, reduce-scatters, all-reduces),
    and what comes from peers to be reduced into them; each from its collective's start until nobody holds its memory,
    or until the half that made it hands it to its caller. Not counted: parameters, activations, optimizer state.
    Observed is the lifetime of each such storage, taken when it is made and when the last tensor on it goes away.

    Args:
        planned: by graph that has run ("forward", "backward", "inference"), the most in use at once by its plan.
        observed: the most that was in use at once, of all steps so far.
        arena: what is allocated for results, once for all steps.
        strays: results that got memory of their own since their place in the arena was in use.
    """

    planned: dict[str, int]
    observed: int
    arena: int
    strays: int

    @property
    def planned_peak(self) -> int:
        """The largest of ``planned``."""
        return max(self.planned.values(), default=0)


@dataclass
class Buffers:
    """The arenas of one module on this rank.

    Attributes:
        in_use, peak: bytes of collectives' results in use now, and the most that ever were; what a half hands to its
            caller counts until it does.
        strays: how many results found their range in use.
    """

    in_use: int = 0
    peak: int = 0
    strays: int = 0
    arenas: dict[str, Arena] = field(default_factory=lambda: {INSIDE: Arena(), KEPT: Arena()})
    _inside: dict[int, int] = field(default_factory=dict)  # bytes in use, by turn
    _outside: dict[int, int] = field(default_factory=dict)
    _turn: int = 0

    @property
    def allocated(self) -> int:
        """Bytes of the arenas."""
        return sum(arena.size for arena in self.arenas.values())

    def use(self, planned: dict[str, int]) -> MemoryUse:
        return MemoryUse(planned, self.peak, self.allocated, self.strays)

    @contextmanager
    def planned(self, plan: MemoryPlan) -> Iterator[Window]:
        """A block in which the slots of collectives are those of ``plan``, from the window's first on."""
        for region, arena in self.arenas.items():
            arena.reserve(plan.size(region))
        stack = _stack()
        stack.append(window := Window(self, plan))
        try:
            yield window
        finally:
            stack.pop()
            self._handed_out()

    def _handed_out(self) -> None:
        """The results of a half belong to its caller from here on, and are counted no more."""
        self.in_use -= sum(self._outside.values())
        self._outside.clear()

    def take(self, slot: Slot, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Memory for a result that has the slot."""
        self._turn += 1
        turn, counted = self._turn, self._outside if slot.region == OUTSIDE else self._inside
        size = counted[turn] = prod(shape) * like.element_size()
        self.in_use += size
        self.peak = max(self.peak, self.in_use)

        def left() -> None:
            self.in_use -= counted.pop(turn, 0)

        if slot.region != OUTSIDE and slot.size:
            tensor = self.arenas[slot.region].take(slot, like.dtype, shape, left)
            if tensor is not None:
                return tensor
            self.strays += 1
        tensor = like.new_empty(shape)
        _watch(tensor, lambda _: left())
        return tensor


@dataclass
class Window:
    """The slots of what runs: those of ``plan``, counted from ``first``."""

    buffers: Buffers
    plan: MemoryPlan
    first: int = 0


def empty(slots: Sequence[int], at: int, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Uninitialised memory of ``like``'s dtype for the ``at``-th of a collective's ``slots``."""
    stack = _stack()
    if not slots or not stack:
        return like.new_empty(shape)
    window = stack[-1]
    return window.buffers.take(window.plan.slots[window.first + slots[at]], like, shape)


def lend(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """A tensor on the memory of a contiguous ``tensor``, and what is to be called once nothing uses that memory.

    From then on it does not keep the memory of ``tensor``, however long it lives itself. It is for threads that hold
    what they were handed for a while after they have said that they are done with it, as those of gloo's collectives.
    """
    if not tensor.nbytes:
        return tensor, lambda: None
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.lender = tensor  # type: ignore[attr-defined]  # kept by the buffer, which the tensor made of it keeps
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape), lambda: delattr(memory, "lender")


def _watch(tensor: Tensor, gone: Callable[[Any], None]) -> None:
    """Calls ``gone`` when nobody holds the storage of ``tensor`` any more."""
    weakref.finalize(tensor.untyped_storage(), gone, None).atexit = False


_local = threading.local()


def _stack() -> list[Window]:
    """The slots of the halves that run in this thread, the innermost last."""
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack
