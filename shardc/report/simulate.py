"""Two streams in step: a rank's kernels in order, and on each mesh axis its collectives in order.

    graph       a collective starts where the graph starts it and stalls the rank where the graph waits for it
    earliest    it starts as soon as what it reads is there and its axis is free, and stalls the rank only at the
                first kernel that reads it: what scheduling alone could reach, memory aside

The order of the collectives of one axis is that of the graph either way. Links that two axes share are not contended.

Where the ranks' cores do the sending (`shardc.cost.hardware.Hardware.share`), a collective also takes time from the
rank: at its start, and from the kernels beside it, which lose that share of the time that it is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardc.cost.kernels import Kernel
from shardc.cost.sequence import INPUT, START, WAIT, Sequence

ORDERS = ("graph", "earliest")


@dataclass
class Span:
    """When something ran, and for how long the rank stood still for it (seconds)."""

    start: float
    end: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """Spans by position in the sequence: of kernels (at their last op) and of collectives; the clock before each op."""

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
    """Runs a step.

    Args:
        streams: for each collective the mesh axes that it occupies.
        wire_seconds: for each collective how long it takes.
        order: "graph" or "earliest".
        start_seconds: for each collective the rank's own time that its start takes, which counts as exposed.
        share: of the time that collectives are on their way, what kernels lose of it; below 1.
    """
    eager = order == "earliest"
    clock = 0.0
    clocks: list[float] = []
    free: dict[str, float] = {}
    ready = [0.0] * len(step.ops)
    owed: list[int | None] = [None] * len(step.ops)  # the collective that each value comes from, until it is awaited
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
            known = ready[latest] if latest is not None else 0.0
            start = max(known, began[op.phase]) if eager else clock
            own = start_seconds[at] if start_seconds is not None else 0.0
            clock += own
            start = max([start + own, *(free.get(axis, 0.0) for axis in streams[at])])
            spans[at] = Span(start, start + wire_seconds[at], own)
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
    """How long a kernel of ``seconds`` takes that starts while for ``sending`` seconds yet something is on its way.

    >>> beside(1.0, 0.5, 0.4), beside(0.3, 1.0, 0.4)
    (1.2, 0.5)
    """
    if seconds < (1 - share) * sending:  # it ends first
        return seconds / (1 - share)
    return seconds + share * sending
