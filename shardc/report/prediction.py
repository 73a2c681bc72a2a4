"""The predicted numbers of a step: the times of collectives and kernels, and totals.

`simulate` predicts the times, with one stream of kernels in order and, per mesh axis, one stream of collectives in
order:

    graph       a collective starts where the graph starts it, and stalls the rank where the graph waits for it
    earliest    it starts as soon as its inputs are ready and its axis is free, and stalls the rank only at the first
                kernel that reads it: a bound on what scheduling could reach, ignoring memory

The collectives of one axis keep their graph order in both. Contention on links that two axes share is not modelled. If
the ranks' own cores do the sending (`shardc.cost.hardware.Hardware.share`), a collective also slows the rank down: it
is busy at the start, and concurrent kernels lose that share of the transfer time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

import torch

from shardc.cost.causes import Cause
from shardc.cost.compute import Kernel
from shardc.cost.hardware import Hardware, Price
from shardc.cost.step_sequence import INPUT, START, WAIT, Sequence
from shardc.ir import graph as ir
from shardc.ir.mesh import Mesh, split_part
from shardc.report.predicted_memory import Memory

if TYPE_CHECKING:
    from shardc.report.formulas import Costs


ORDERS = ("graph", "earliest")


@dataclass
class Span:
    """The time of a kernel or collective: its start and end in seconds since the start of the step, and the seconds
    that the rank waits for it.
    """

    start: float
    end: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The simulated times of a step: of each kernel and collective, and of the whole.

    Args:
        kernels: position of a kernel's last op -> its time.
        collectives: position of a collective -> its time.
        clock: seconds at which each op is reached.
        seconds: duration of the step.
    """

    kernels: dict[int, Span]
    collectives: dict[int, Span]
    clock: tuple[float, ...]
    seconds: float


HOST = "host"  # stands for the mesh axes in copies between host and device


@dataclass(frozen=True)
class Transfer:
    """A collective or a copy between host and device, before its times are known.

    Args:
        kind, ranks, dtype, bytes, wire: as in `Collective`.
        axes: the mesh axes of its group, or parts of them; ("host",) for a copy.
        price: its duration, with the algorithm and the link that this assumes.
        busy: seconds that the rank is busy starting it, which count as exposed.
    """

    kind: str
    axes: tuple[str, ...]
    ranks: int
    dtype: str
    bytes: int
    wire: int
    price: Price
    busy: float

    @property
    def streams(self) -> tuple[str, ...]:
        """Return the resources that the transfer occupies: mesh axes, or for a host copy one direction between host and
        device.
        """
        return (self.kind,) if self.axes == (HOST,) else tuple(dict.fromkeys(split_part(axis)[0] for axis in self.axes))


def simulate(
    step: Sequence,
    kernels: Mapping[int, Kernel],
    transfers: Mapping[int, Transfer],
    hardware: Hardware,
    order: str,
    begins: Mapping[int, float],
) -> Timeline:
    """Return the times of a step, simulated op by op: when each kernel and collective starts and ends, and how long the
    rank waits.

    Args:
        step: the ops of the step.
        kernels: position of the last op -> kernel.
        transfers: position of a collective or host copy -> what it moves, and its price.
        hardware: the target of the prediction.
        order: "graph" or "earliest".
        begins: position of an op -> seconds before which it does not run.
    """
    eager = order == "earliest"
    rank = _Rank(len(step.ops))
    clocks: list[float] = []
    began: dict[str, float] = {}  # phase -> seconds at which its first op is reached
    member = {at for kernel in kernels.values() for at in kernel.ops}
    for at, op in enumerate(step.ops):
        rank.clock = max(rank.clock, begins.get(at, 0.0))
        began.setdefault(op.phase, rank.clock)
        clocks.append(rank.clock)
        latest = max(op.reads, key=lambda read: rank.ready[read], default=None)
        if op.kind == START:
            inputs_ready = 0.0 if latest is None else rank.ready[latest]
            rank.start(at, transfers[at], max(inputs_ready, began[op.phase]) if eager else rank.clock)
        elif at in member:
            for read in op.reads:
                rank.wait(read)
            if (kernel := kernels.get(at)) is not None:  # its last op
                alone = hardware.compute_seconds(kernel.flops, kernel.bytes, kernel.dtype, kernel.attention)
                rank.run(at, kernel, alone, hardware.share)
        elif op.kind != INPUT and latest is not None:  # a view, or a wait
            rank.ready[at], rank.owed[at] = rank.ready[latest], rank.owed[latest]
            if op.kind == WAIT and not eager:
                rank.wait(latest)
    for _, at in step.outputs:
        rank.wait(at)
    return Timeline(rank.kernels, rank.collectives, tuple(clocks), rank.clock)


class _Rank:
    """The rank that runs a simulated step.

    Attributes:
        clock: seconds that have passed for it.
        ready: for each op of the step, the seconds at which its value is there.
        owed: for each op of the step, the collective that its value comes from; None if it comes from none.
        free: mesh axis or direction of host copies -> seconds at which its last transfer ends.
        kernels, collectives: as in `Timeline`.
    """

    def __init__(self, ops: int) -> None:
        self.clock = 0.0
        self.ready = [0.0] * ops
        self.owed: list[int | None] = [None] * ops
        self.free: dict[str, float] = {}
        self.kernels: dict[int, Span] = {}
        self.collectives: dict[int, Span] = {}

    def wait(self, read: int) -> None:
        """Wait until the value of the op at ``read`` is there. That exposes the collective that it comes from."""
        if self.ready[read] > self.clock:
            if (source := self.owed[read]) is not None:
                self.collectives[source].exposed += self.ready[read] - self.clock
            self.clock = self.ready[read]

    def start(self, at: int, transfer: Transfer, earliest: float) -> None:
        """Start the collective at ``at``. It runs as soon as its streams are free, not before ``earliest``."""
        self.clock += transfer.busy
        start = max([earliest + transfer.busy, *(self.free.get(stream, 0.0) for stream in transfer.streams)])
        span = self.collectives[at] = Span(start, start + transfer.price.seconds, transfer.busy)
        self.free.update(dict.fromkeys(transfer.streams, span.end))
        self.ready[at], self.owed[at] = span.end, at

    def run(self, at: int, kernel: Kernel, alone: float, share: float) -> None:
        """Run the kernel whose last op is at ``at``. It takes ``alone`` seconds if nothing is sent meanwhile, and loses
        the ``share`` of the time in which something is.
        """
        sending = max([0.0, *(end - self.clock for end in self.free.values())])
        span = self.kernels[at] = Span(self.clock, self.clock + beside(alone, sending, share))
        self.clock = span.end
        for inner in kernel.ops:
            self.ready[inner] = span.end


def beside(seconds: float, sending: float, share: float) -> float:
    """Return the duration of a kernel beside current transfers, which end ``sending`` seconds after its start. Alone it
    takes ``seconds``; it loses the ``share`` of the time that it runs beside them.

    Args:
        share: share of the transfer time that the kernel loses; below 1.

    >>> beside(1.0, 0.5, 0.4), beside(0.3, 1.0, 0.4)
    (1.2, 0.5)
    """
    if seconds < (1 - share) * sending:  # it ends before the transfers do
        return seconds / (1 - share)
    return seconds + share * sending


T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True)
class Collective:
    """A collective of a step, as every rank runs it, or a copy between host and device.

    Args:
        name: name of the node.
        kind: the kind, as in `shardc.ir.ops`; "to_device" or "to_host" for a copy.
        axis: the mesh axes of its group, joined by commas; "host" for a copy.
        ranks: size of the group; 1 for a copy.
        dtype: dtype of the tensors.
        bytes: input bytes per rank.
        wire: bytes that each rank sends, as `shardc.ir.comm_volume` counts them; all bytes of a copy.
        phase: "forward" or "backward".
        start, end: predicted seconds since the start of the step.
        exposed: seconds that the rank waits for it, or is busy starting it.
        hidden_by: the module whose kernels overlap it most; "" if none does.
        cause: its origin.
        algorithm, link: the algorithm and the link that the prediction assumes.
    """

    name: str
    kind: str
    axis: str
    ranks: int
    dtype: str
    bytes: int
    wire: int
    phase: str
    start: float
    end: float
    exposed: float
    hidden_by: str
    cause: Cause
    algorithm: str
    link: str

    @property
    def seconds(self) -> float:
        """Return the seconds from the start to the end of the collective."""
        return self.end - self.start


@dataclass(frozen=True)
class Run:
    """A kernel of a step, with its start and end in seconds since the start of the step."""

    kernel: Kernel
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return the seconds from the start to the end of the kernel."""
        return self.end - self.start


@dataclass(frozen=True)
class Total:
    """Sums over a group of collectives: their number, bytes and seconds.

    Args:
        count: number of collectives.
        wire: bytes that each rank sends.
        seconds: seconds on the wire.
        exposed: seconds not hidden by compute.
    """

    count: int
    wire: int
    seconds: float
    exposed: float

    @staticmethod
    def of(transfers: Seq[Collective]) -> Total:
        """Return the sums over ``transfers``."""
        sums = (sum(c.wire for c in transfers), sum(c.seconds for c in transfers), sum(c.exposed for c in transfers))
        return Total(len(transfers), *sums)


@dataclass(frozen=True)
class Prediction:
    """The numbers of `shardc.report.predicted_schedule.Schedule`, without its methods of display.

    Args:
        mesh, hardware: the target of the prediction.
        order: "graph" or "earliest" (`shardc.report.prediction`).
        transfers, runs: collectives (and host copies) and kernels, in graph order.
        memory: bytes of a rank over the step.
        clock: seconds at which each op of the step is reached.
        seconds: duration of the step.
        useful_flops: operations of the model's dense ops divided by the number of ranks, without replicated work.
        dtype: dtype of most dense operations.
        step: the ops of the step.
        tokens: tokens of the global batch; 0 if the inputs have none.
        notes: remarks for people, such as approximations.
        symbols: returns the cost formulas of the program.
        model, plan: model and plan as text, for titles.
    """

    mesh: Mesh
    hardware: Hardware
    order: str
    transfers: tuple[Collective, ...]
    runs: tuple[Run, ...]
    memory: Memory
    clock: tuple[float, ...]
    seconds: float
    useful_flops: float
    dtype: torch.dtype
    step: Sequence = field(repr=False, compare=False)
    tokens: int
    notes: tuple[str, ...]
    symbols: Callable[[], Costs] = field(repr=False, compare=False)
    model: str
    plan: str

    @property
    def title(self) -> str:
        """Return the title: model and plan if they are known, then mesh, hardware and the order of collectives ("graph"
        or "earliest").
        """
        where = f"{self.mesh} on {self.hardware.name}, {self.order} order"
        return ", ".join(filter(None, (self.model, self.plan, where)))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Return the transfers between ranks, without the copies between host and device."""
        return tuple(transfer for transfer in self.transfers if transfer.axis != HOST)

    @property
    def moves(self) -> tuple[Collective, ...]:
        """Return the transfers between host and device."""
        return tuple(transfer for transfer in self.transfers if transfer.axis == HOST)

    @cached_property
    def by_node(self) -> dict[str, list[Collective]]:
        """Return node name in the global graph -> its collectives; a parameter gathered again for backward has two."""
        return grouped(self.collectives, lambda c: c.name.rpartition(".")[0])

    @property
    def wire(self) -> int:
        """Return the bytes that each rank sends to other ranks in a step."""
        return sum(c.wire for c in self.collectives)

    @property
    def compute_seconds(self) -> float:
        """Return the seconds of all kernels."""
        return sum(run.seconds for run in self.runs)

    @property
    def peak(self) -> int:
        """Return the bytes of memory at the peak, on the rank that needs the most."""
        return self.memory.peak.total

    @property
    def exposed(self) -> float:
        """Return the seconds that a rank waits for collectives and host copies."""
        return sum(transfer.exposed for transfer in self.transfers)

    @property
    def flops(self) -> int:
        """Return the operations of a rank's dense ops, replicated work included."""
        return sum(run.kernel.flops for run in self.runs)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all ranks together; 0 if the inputs have no tokens."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def optimizer_seconds(self) -> float:
        """Return the seconds of the optimizer, which are no part of ``seconds``.

        One kernel reads parameters, gradients and state, and writes parameters and state (a fused AdamW).
        """
        on_device = self.hardware.update_seconds(_updated(self.memory.by_owner()), host=False)
        return on_device + self.host_update_seconds

    @property
    def host_update_seconds(self) -> float:
        """Return the part of ``optimizer_seconds`` that the update of parameters on the host takes."""
        return self.hardware.update_seconds(_updated(dict(self.memory.host)), host=True)

    def reached(self, at: int) -> float:
        """Return the seconds at which the op at position ``at`` is reached; the end of the step behind its last op."""
        return self.clock[at] if at < len(self.clock) else self.seconds

    def stage_of(self, transfer: Collective) -> int | None:
        """Return the pipeline stage of a collective, if the rank has several; else None."""
        return None

    def phase_of(self, run: Run) -> str:
        """Return "forward", "backward", or "recompute" for a kernel of backward that repeats ops of forward."""
        nodes = (self.step.ops[at].node for at in run.kernel.ops)
        repeats = run.kernel.phase == "backward" and all(ir.info(node).origin.phase == "forward" for node in nodes)
        return "recompute" if repeats else run.kernel.phase

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: useful operations over the peak operations of the step."""
        return self.useful_flops / (self.seconds * self.hardware.peak(self.dtype)) if self.seconds else 0.0

    def totals(self, by: str) -> dict[str, Total]:
        """Return the sums over collectives as value of ``by`` -> `Total`, largest exposed time first. ``by`` is "axis",
        "kind", "module", "tensor", "phase" or "entry".
        """
        groups = grouped(self.transfers, attrgetter(f"cause.{by}" if by in ("module", "tensor", "entry") else by))
        totals = {key: Total.of(transfers) for key, transfers in groups.items()}
        return dict(sorted(totals.items(), key=lambda item: (-item[1].exposed, -item[1].wire, item[0])))

    def fits(self, gigabytes: float | None = None) -> bool:
        """Return whether the peak fits in ``gigabytes`` (of 10^9 bytes; by default the memory of the hardware)."""
        return self.peak <= (self.hardware.memory if gigabytes is None else gigabytes * 1e9)


def _updated(owners: Mapping[str, int]) -> int:
    """Return the bytes that an optimizer's update reads and writes. ``owners`` has the bytes of "parameters" and
    "optimizer" state.
    """
    return 3 * owners.get("parameters", 0) + 2 * owners.get("optimizer", 0)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the ``items`` grouped by ``key``: key -> its items, in the order in which the keys first occur."""
    out: dict[K, list[T]] = {}
    for item in items:
        out.setdefault(key(item), []).append(item)
    return out
