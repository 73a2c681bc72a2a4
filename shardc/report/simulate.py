"""Simulates a rank's step: one stream of kernels in order, and per mesh axis one stream of collectives in order.

    graph       a collective starts where the graph starts it, and stalls the rank where the graph waits for it
    earliest    it starts as soon as its inputs are ready and its axis is free, and stalls the rank only at the first
                kernel that reads it: a bound on what scheduling could reach, ignoring memory

The collectives of one axis keep their graph order in both. Contention on links that two axes share is not modelled.

If the ranks' own cores do the sending (`shardc.cost.hardware.Hardware.share`), a collective also slows the rank down:
it is busy at the start, and concurrent kernels lose that share of the transfer time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardc.cost.fused_kernels import Kernel
from shardc.cost.step_sequence import INPUT, START, WAIT, Sequence

ORDERS = ("graph", "earliest")


@dataclass
class Span:
    """The time of one kernel or collective, and how long the rank waited for it (seconds)."""

    start: float
    end: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """Spans by position in the step, of kernels (at their last op) and of collectives; and the clock before each op."""

    kernels: dict[int, Span]
    collectives: dict[int, Span]
    clock: tuple[float, ...]
    seconds: float


def simulate(
    step: Sequence,
    kernels: Mapping[int, Kernel],
    kernel_seconds: Callable[[Kernel], float],
    streams: Mapping[int, tuple[str, ...]],
    wire_seconds: Mapping[int, float],
    order: str,
    start_seconds: Mapping[int, float] | None = None,
    share: float = 0.0,
) -> Timeline:
    """Simulate a step.

    Args:
        streams: collective -> the mesh axes that it occupies.
        wire_seconds: collective -> its duration.
        order: "graph" or "earliest".
        start_seconds: collective -> seconds that the rank is busy starting it, which count as exposed.
        share: share of the transfer time that concurrent kernels lose; below 1.
    """
    eager = order == "earliest"
    clock = 0.0
    clocks: list[float] = []
    free: dict[str, float] = {}
    ready = [0.0] * len(step.ops)
    owed: list[int | None] = [None] * len(step.ops)  # the pending collective that each value comes from
    spans: dict[int, Span] = {}
    runs: dict[int, Span] = {}
    began: dict[str, float] = {}

    def stall(read: int) -> None:
        nonlocal clock
        source = owed[read]
        if ready[read] > clock:
            if source is not None:
                spans[source].exposed += ready[read] - clock
            clock = ready[read]

    member = {at: last for last, kernel in kernels.items() for at in kernel.ops}
    for at, op in enumerate(step.ops):
        began.setdefault(op.phase, clock)
        clocks.append(clock)
        latest = max(op.reads, key=lambda read: ready[read], default=None)
        if op.kind == INPUT:
            continue
        if op.kind == START:
            inputs_ready = ready[latest] if latest is not None else 0.0
            start = max(inputs_ready, began[op.phase]) if eager else clock
            busy = start_seconds[at] if start_seconds is not None else 0.0
            clock += busy
            start = max([start + busy, *(free.get(axis, 0.0) for axis in streams[at])])
            spans[at] = Span(start, start + wire_seconds[at], busy)
            free.update(dict.fromkeys(streams[at], spans[at].end))
            ready[at], owed[at] = spans[at].end, at
            continue
        if at in member:
            for read in op.reads:
                stall(read)
            if at in kernels:
                begin = clock
                sending = max([0.0, *(end - clock for end in free.values())])
                clock += beside(kernel_seconds(kernels[at]), sending, share)
                runs[at] = Span(begin, clock)
                for inner in kernels[at].ops:
                    ready[inner] = clock
            continue
        if latest is not None:
            ready[at], owed[at] = ready[latest], owed[latest]
            if op.kind == WAIT and not eager:
                stall(latest)
    for _, at in step.outputs:
        stall(at)
    return Timeline(runs, spans, tuple(clocks), clock)


def beside(seconds: float, sending: float, share: float) -> float:
    """Return the duration of a kernel of ``seconds`` that starts ``sending`` seconds before the current transfers end.

    >>> beside(1.0, 0.5, 0.4), beside(0.3, 1.0, 0.4)
    (1.2, 0.5)
    """
    if seconds < (1 - share) * sending:  # it ends before the transfers do
        return seconds / (1 - share)
    return seconds + share * sending
