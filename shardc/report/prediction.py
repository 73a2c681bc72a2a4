"""The predicted numbers of a step: the times of collectives and kernels, memory, and totals.

`simulate` predicts the times, with one stream of kernels in order and, per mesh axis, one stream of collectives in
order:

    graph       a collective starts where the graph starts it, and stalls the rank where the graph waits for it
    earliest    it starts as soon as its inputs are ready and its axis is free, and stalls the rank only at the first
                kernel that reads it: a bound on what scheduling could reach, ignoring memory

The collectives of one axis keep their graph order in both. Contention on links that two axes share is not modelled. If
the ranks' own cores do the sending (`shardc.cost.hardware.Hardware.share`), a collective also slows the rank down: it
is busy at the start, and concurrent kernels lose that share of the transfer time.

`memory_of` predicts the memory of one rank: bytes by owner at every op, and the peak. A kernel's results are allocated
before it runs and its inputs are freed after it, so both are counted while it runs. If results of collectives are in an
arena (CPU ranks), the arena is counted for the whole step, as communication. Not counted: rounding and fragmentation of
the caching allocator, library workspaces, temporaries of the optimizer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from operator import attrgetter, getitem
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx

from shardc.cost.causes import Cause
from shardc.cost.compute import Buffer, Kernel, is_inner
from shardc.cost.hardware import Hardware
from shardc.cost.step_sequence import INPUT, START, WAIT, Sequence
from shardc.ir import graph as ir
from shardc.ir.comm import is_loaded, is_stored
from shardc.ir.executable import TERM, TRANSFER
from shardc.ir.mesh import Mesh

if TYPE_CHECKING:
    from shardc.report.formulas import Costs


OWNERS = ("parameters", "optimizer", "inputs", "gradients", "activations", "gathered", "communication", "temporaries")


@dataclass(frozen=True)
class Sample:
    """The memory allocated while one op runs.

    Args:
        at: position of the op in the step's sequence.
        sizes: bytes by owner, in the order of ``OWNERS``.
    """

    at: int
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Return the bytes of all owners together."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Held:
    """Memory that is held at the peak.

    Args:
        owner: one of ``OWNERS``.
        bytes: its size.
        name: name of the value in the graph's text; of the parameter for the optimizer's state.
        module, source: module and source line of the op that allocates it, or of its first use; "" if unknown.
    """

    owner: str
    bytes: int
    name: str
    module: str
    source: str


@dataclass(frozen=True)
class Memory:
    """The memory of one rank over a step, in bytes.

    Args:
        samples: one for every op that allocates or frees, in order.
        peak: the largest sample.
        peak_op: name of the op at the peak.
        host: (owner, bytes) kept in host memory instead, at the most.
        held: the tensors at the peak, in the order in which they are allocated.
    """

    samples: tuple[Sample, ...]
    peak: Sample
    peak_op: str
    host: tuple[tuple[str, int], ...] = ()
    held: tuple[Held, ...] = ()

    def by_owner(self) -> dict[str, int]:
        """Return owner -> bytes at the peak."""
        return dict(zip(OWNERS, self.peak.sizes, strict=True))


def memory_of(
    step: Sequence,
    outputs: list[tuple[Buffer | None, ...]],
    kernels: Mapping[int, Kernel],
    optimizer_copies: float,
) -> Memory:
    """Return the predicted memory of a step.

    Args:
        step: the ops of the step.
        outputs: for each op, the buffers of its results.
        kernels: position of the last op -> kernel.
        optimizer_copies: size of the optimizer's state as a multiple of the parameters (AdamW: 2).
    """
    phases = [op.phase for op in step.ops]
    step_outputs = {id(b) for _, at in step.outputs for b in outputs[at] if b is not None}
    lasting = {id(b) for role, at in step.outputs if role.kind != TRANSFER for b in outputs[at] if b is not None}
    summed = [(role, at) for role, at in step.given if role.kind == TERM and phases[at] == "backward"]
    # A graph returns its terms at its end, and the first is the sum.
    until = {id(b): run_end(step, at) for role, at in step.given if role.kind == TERM for b in outputs[at] if b}
    leaving = [(role, at) for role, at in step.outputs if role.kind == "grad"]
    grads = {id(b) for _, at in (*leaving, *summed) for b in outputs[at] if b is not None}
    kernel_of = {at: kernel.ops for kernel in kernels.values() for at in kernel.ops}
    changes: dict[int, dict[str, int]] = {}
    holds: list[tuple[str, int, int, int, int, int]] = []

    def hold(owner: str, size: int, start: int, end: int, by: int, number: int = 0) -> None:
        """Count ``size`` bytes for ``owner`` from op ``start`` to op ``end``: result ``number`` of op ``by``."""
        holds.append((owner, size, start, end, by, number))
        for at, change in ((start, size), (end + 1, -size)):
            change_by_owner = changes.setdefault(at, {})
            change_by_owner[owner] = change_by_owner.get(owner, 0) + change

    whole_step = len(step.ops)
    on_host: dict[str, list[tuple[int, int]]] = {}  # owner -> (op, change of bytes)
    if step.arena:
        hold("communication", step.arena, 0, whole_step, -1)
    for at, op in enumerate(step.ops):
        placed = step.placed.get(at, ())
        for number, buffer in enumerate(outputs[at]):
            if buffer is None or buffer.allocated != at or not buffer.size or number in placed:
                continue
            value = ir.info(op.node).value
            if isinstance(value, ir.Value) and value.host:
                if is_stored(op.node):
                    on_host.setdefault("activations", []).extend([(at, buffer.size), (buffer.last + 1, -buffer.size)])
                else:
                    on_host.setdefault("parameters" if op.kind == INPUT else "gradients", []).append((at, buffer.size))
                if op.kind == INPUT:
                    on_host.setdefault("optimizer", []).append((at, int(buffer.size * optimizer_copies)))
                continue
            if op.kind == INPUT:
                role = ir.info(op.node).role
                if role is not None and role.kind == TRANSFER:
                    end = kernel_of.get(buffer.last, (buffer.last,))[-1]
                    hold(_owner(False, False, True, buffer, phases), buffer.size, at, end, at)
                elif role is not None and role.kind == "param":
                    hold("parameters", buffer.size, 0, whole_step, at)
                    hold("optimizer", int(buffer.size * optimizer_copies), 0, whole_step, at)
                else:
                    hold("inputs", buffer.size, 0, whole_step, at)
                continue
            mine = kernel_of.get(at, (at,))
            if at in kernel_of and id(buffer) not in until and is_inner(buffer, set(mine), step_outputs):
                continue
            end = whole_step if id(buffer) in lasting else kernel_of.get(buffer.last, (buffer.last,))[-1]
            end = max(end, until.get(id(buffer), 0))
            hold(
                "activations" if is_loaded(op.node) else _owner(op.gathered, id(buffer) in grads, op.kind == START, buffer, phases),
                buffer.size,
                mine[0],
                end,
                at,
                number,
            )
    samples = _samples(changes, whole_step)
    peak = max(samples, key=lambda sample: (sample.total, -sample.at))
    held = tuple(
        _held(step, owner, size, by, number) for owner, size, start, end, by, number in holds if start <= peak.at <= end
    )
    peak_op = ir.info(step.ops[min(peak.at, whole_step - 1)].node).name
    host = tuple((owner, max(accumulate(change for _, change in sorted(on_host[owner])))) for owner in sorted(on_host))
    return Memory(samples, peak, peak_op, host, held)


def run_end(step: Sequence, at: int) -> int:
    """Return the position of the last op of the graph that op ``at`` is of."""
    after = bisect_right(step.begins, at)
    return (step.begins[after] if after < len(step.begins) else len(step.ops)) - 1


def _held(step: Sequence, owner: str, size: int, at: int, number: int) -> Held:
    """Return the `Held` of ``size`` bytes for ``owner``: result ``number`` of the op at ``at``; -1 is the arena."""
    if at < 0:
        return Held(owner, size, "arena of collectives' results", "", "")
    node = step.ops[at].node
    items = (user for user in node.users if user.target is getitem and user.args[1] == number)
    node = next(items, node)
    record = ir.info(node)
    param = record.role is not None and record.role.kind == "param"
    module = record.name.rpartition(".")[0] if param else record.origin.module
    return Held(owner, size, record.name, module, record.origin.source or _first_use(node))


_NEAR = 64  # most nodes behind a value that are searched for a source line


def _first_use(node: fx.Node) -> str:
    """Return the source line of the first op behind ``node`` that has one; "" if there is none nearby.

    Behind a bucket of collectives, only the result for the value that went in is followed.
    """
    work: list[tuple[fx.Node, fx.Node | None]] = [(node, None)]  # each with the operand that led to it
    for current, operand in islice(work, _NEAR):  # grows
        if current is not node and (source := ir.info(current).origin.source):
            return source
        operands: Any = current.args[0] if current.args else None
        place = operands.index(operand) if isinstance(operands, list) and operand in operands else None
        for user in current.users:
            if user.op != "output" and (place is None or user.target is not getitem or user.args[1] == place):
                work.append((user, current))
    return ""


def _owner(gathered: bool, grad: bool, communicated: bool, buffer: Buffer, phases: list[str]) -> str:
    """Return the owner, one of `OWNERS`, of a buffer that an op allocates.

    Args:
        gathered: its value is an unsharded parameter.
        grad: its value is a gradient that leaves the step.
        communicated: it is the result of a collective.
        phases: phase of each op.
    """
    if gathered:
        return "gathered"
    if grad:
        return "gradients"
    if phases[buffer.allocated] == "forward" and phases[buffer.last] == "backward":
        return "activations"
    return "communication" if communicated else "temporaries"


def _samples(changes: Mapping[int, Mapping[str, int]], end: int) -> tuple[Sample, ...]:
    """Return the memory at each position of ``changes`` (position -> owner -> bytes) up to ``end``."""
    sizes = dict.fromkeys(OWNERS, 0)
    out = []
    for at in sorted(changes):
        for owner, change in changes[at].items():
            sizes[owner] += change
        if at <= end:
            out.append(Sample(at, tuple(sizes.values())))
    return tuple(out)


ORDERS = ("graph", "earliest")


@dataclass
class Span:
    """The start and end of a kernel or collective since the start of the step, and the rank's wait, in seconds."""

    start: float
    end: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The simulated times of a step.

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


def simulate(
    step: Sequence,
    kernels: Mapping[int, Kernel],
    kernel_seconds: Callable[[Kernel], float],
    streams: Mapping[int, tuple[str, ...]],
    wire_seconds: Mapping[int, float],
    order: str,
    start_seconds: Mapping[int, float] | None = None,
    share: float = 0.0,
    begins: Mapping[int, float] | None = None,
) -> Timeline:
    """Return the simulated times of a step.

    Args:
        step: the ops of the step.
        kernels: position of the last op -> kernel.
        kernel_seconds: returns the duration of a kernel.
        streams: position of a collective -> the mesh axes that it occupies.
        wire_seconds: position of a collective -> its duration.
        order: "graph" or "earliest".
        start_seconds: position of a collective -> seconds that the rank is busy starting it, which count as exposed.
        share: share of the transfer time that concurrent kernels lose; below 1.
        begins: position of an op -> seconds before which it does not run.
    """
    eager = order == "earliest"
    clock = 0.0
    clocks: list[float] = []
    free: dict[str, float] = {}
    ready = [0.0] * len(step.ops)
    owed: list[int | None] = [None] * len(step.ops)  # for each value, the pending collective that it comes from
    spans: dict[int, Span] = {}
    runs: dict[int, Span] = {}
    began: dict[str, float] = {}

    def stall(read: int) -> None:
        """Advance the clock until the value at position ``read`` is ready."""
        nonlocal clock
        source = owed[read]
        if ready[read] > clock:
            if source is not None:
                spans[source].exposed += ready[read] - clock
            clock = ready[read]

    member = {at: last for last, kernel in kernels.items() for at in kernel.ops}
    for at, op in enumerate(step.ops):
        clock = max(clock, begins.get(at, 0.0)) if begins else clock
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
    """Return the duration of a kernel of ``seconds`` that starts ``sending`` seconds before current transfers end.

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
HOST = "host"  # stands for the mesh axes in copies between host and device


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
        """Return the duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Run:
    """A kernel of a step, with its start and end in seconds since the start of the step."""

    kernel: Kernel
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Total:
    """Sums over a group of collectives.

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
    tokens: int = 0
    notes: tuple[str, ...] = ()
    symbols: Callable[[], Costs] | None = field(default=None, repr=False, compare=False)
    model: str = ""
    plan: str = ""

    @property
    def title(self) -> str:
        """Return mesh, hardware and order, after model and plan if these are known."""
        where = f"{self.mesh} on {self.hardware.name}, {self.order} order"
        return ", ".join(filter(None, (self.model, self.plan, where)))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Return the transfers between ranks."""
        return tuple(transfer for transfer in self.transfers if transfer.axis != HOST)

    @property
    def moves(self) -> tuple[Collective, ...]:
        """Return the transfers between host and device."""
        return tuple(transfer for transfer in self.transfers if transfer.axis == HOST)

    @cached_property
    def by_node(self) -> dict[str, list[Collective]]:
        """Return node name in the global graph -> its collectives; ZeRO-3 gathers have two."""
        return grouped(self.collectives, lambda c: c.name.rpartition(".")[0])

    @property
    def wire(self) -> int:
        """Return the bytes that each rank sends to others."""
        return sum(c.wire for c in self.collectives)

    @property
    def compute_seconds(self) -> float:
        """Return the seconds of all kernels."""
        return sum(run.seconds for run in self.runs)

    @property
    def peak(self) -> int:
        """Return the bytes at the peak, of the rank that needs the most."""
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
        owners = self.memory.by_owner()
        return self.hardware.copy_seconds(3 * owners["parameters"] + 2 * owners["optimizer"])

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
        """Return value of ``by`` -> `Total`, largest exposed time first; ``by`` is "axis", "kind", "module", "tensor",
        "phase" or "entry".
        """
        groups = grouped(self.transfers, attrgetter(f"cause.{by}" if by in ("module", "tensor", "entry") else by))
        totals = {
            key: Total(len(of), sum(c.wire for c in of), sum(c.seconds for c in of), sum(c.exposed for c in of))
            for key, of in groups.items()
        }
        return dict(sorted(totals.items(), key=lambda item: (-item[1].exposed, -item[1].wire, item[0])))

    def fits(self, gigabytes: float | None = None) -> bool:
        """Return whether the peak fits in ``gigabytes`` (of 10^9 bytes; by default the memory of the hardware)."""
        return self.peak <= (self.hardware.memory if gigabytes is None else gigabytes * 1e9)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return key -> list of the ``items`` with it, in the order in which the keys first occur."""
    out: dict[K, list[T]] = {}
    for item in items:
        out.setdefault(key(item), []).append(item)
    return out
