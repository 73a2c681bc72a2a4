"""The predicted memory of a step, of one rank: bytes by owner at every op, and the peak.

A kernel's results are allocated before it runs and its inputs are freed after it, so both are counted while it runs. A
value that moves to the host is counted on the device until the wait for its move. If results of collectives are in an
arena (CPU ranks), the arena is counted for the whole step, as communication. Not counted: rounding and fragmentation of
the caching allocator, library workspaces, temporaries of the optimizer, messages between stages that a CPU rank
receives before it reads them (two at most).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby, islice
from operator import getitem, itemgetter
from typing import Any, NamedTuple

from torch import fx

from shardc.cost.compute import Buffer, Kernel, is_inner
from shardc.cost.step_sequence import INPUT, START, Op, Sequence
from shardc.ir import graph as ir
from shardc.ir.comm import is_loaded, is_stored
from shardc.ir.executable import TERM, TRANSFER

OWNERS = ("parameters", "optimizer", "inputs", "gradients", "activations", "gathered", "communication", "temporaries")


@dataclass(frozen=True)
class Sample:
    """The bytes that are allocated at the time an op runs, by what they hold (`OWNERS`: parameters, activations, and so
    on).

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
class PeakTensor:
    """A tensor that is allocated at the peak: its owner, bytes, name and source line.

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
    """The predicted memory of one rank over a step, in bytes: by owner over time, at the peak, and on the host.

    Args:
        samples: one for every op that allocates or frees, in order.
        peak: the largest sample.
        peak_op: name of the op at the peak.
        host: (owner, bytes) kept in host memory instead, at the most.
        tensors_at_peak: the tensors at the peak, in the order in which they are allocated.
    """

    samples: tuple[Sample, ...]
    peak: Sample
    peak_op: str
    host: tuple[tuple[str, int], ...] = ()
    tensors_at_peak: tuple[PeakTensor, ...] = ()

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
    holds = list(_holds(step, outputs, kernels, optimizer_copies))
    on_device = [hold for hold in holds if not hold.host]
    samples = _samples(on_device, len(step.ops))
    peak = max(samples, key=lambda sample: (sample.total, -sample.at))
    tensors_at_peak = tuple(_peak_tensor(step, hold) for hold in on_device if hold.start <= peak.at <= hold.end)
    peak_op = ir.info(step.ops[min(peak.at, len(step.ops) - 1)].node).name
    host: dict[str, int] = {}  # owner -> most bytes on the host
    on_host = dict.fromkeys(OWNERS, 0)
    for _, owner, change in _changes([hold for hold in holds if hold.host]):
        on_host[owner] += change
        host[owner] = max(host.get(owner, 0), on_host[owner])
    return Memory(samples, peak, peak_op, tuple(sorted(host.items())), tensors_at_peak)


class _Hold(NamedTuple):
    """Memory that is allocated while some of a step's ops run.

    Attributes:
        owner: one of ``OWNERS``.
        size: bytes.
        start, end: positions of the first and the last of these ops.
        at: position of the op whose result it holds; -1 for the arena.
        number: which of the op's results it holds.
        host: whether it is host memory.
    """

    owner: str
    size: int
    start: int
    end: int
    at: int
    number: int = 0
    host: bool = False


def _holds(
    step: Sequence, outputs: list[tuple[Buffer | None, ...]], kernels: Mapping[int, Kernel], optimizer_copies: float
) -> Iterator[_Hold]:
    """Yield what is allocated in a step, in the order of the ops that allocate it. The arguments are as for
    `memory_of`.
    """
    phases, whole_step = [op.phase for op in step.ops], len(step.ops)
    step_outputs = {id(b) for _, at in step.outputs for b in outputs[at] if b is not None}
    lasting = {id(b) for role, at in step.outputs if role.kind != TRANSFER for b in outputs[at] if b is not None}
    summed = [(role, at) for role, at in step.passed_on if role.kind == TERM and phases[at] == "backward"]
    # A graph returns its terms at its end, and the first is the sum.
    until = {id(b): run_end(step, at) for role, at in step.passed_on if role.kind == TERM for b in outputs[at] if b}
    leaving = [(role, at) for role, at in step.outputs if role.kind == "grad"]
    grads = {id(b) for _, at in (*leaving, *summed) for b in outputs[at] if b is not None}
    kernel_of = {at: kernel.ops for kernel in kernels.values() for at in kernel.ops}
    if step.arena:
        yield _Hold("communication", step.arena, 0, whole_step, -1)
    for at, op in enumerate(step.ops):
        placed = step.placed.get(at, ())
        role, value = ir.info(op.node).role, ir.info(op.node).value
        host = isinstance(value, ir.Value) and value.host
        for number, buffer in enumerate(outputs[at]):
            if buffer is None or buffer.allocated != at or not buffer.size or number in placed:
                continue
            size, last = buffer.size, kernel_of.get(buffer.last, (buffer.last,))[-1]
            if op.kind == INPUT and (host or (role is not None and role.kind == "param")):
                yield _Hold("parameters", size, 0, whole_step, at, host=host)
                yield _Hold("optimizer", int(size * optimizer_copies), 0, whole_step, at, host=host)
            elif host and is_stored(op.node):
                yield _Hold("activations", size, at, buffer.last, at, host=True)
            elif host:
                yield _Hold("gradients", size, at, whole_step, at, host=True)
            elif op.kind == INPUT and role is not None and role.kind == TRANSFER:
                yield _Hold(_owner(op, buffer, phases, grads), size, at, last, at)
            elif op.kind == INPUT:
                yield _Hold("inputs", size, 0, whole_step, at)
            else:
                mine = kernel_of.get(at, (at,))
                if at in kernel_of and id(buffer) not in until and is_inner(buffer, set(mine), step_outputs):
                    continue
                end = max(whole_step if id(buffer) in lasting else last, until.get(id(buffer), 0))
                yield _Hold(_owner(op, buffer, phases, grads), size, mine[0], end, at, number)


def run_end(step: Sequence, at: int) -> int:
    """Return the position of the last op of the graph (forward, backward, ...) to which the op at ``at`` belongs."""
    after = bisect_right(step.begins, at)
    return (step.begins[after] if after < len(step.begins) else len(step.ops)) - 1


def _peak_tensor(step: Sequence, hold: _Hold) -> PeakTensor:
    """Return ``hold`` as a `PeakTensor`, with the name, module and source line of the node that computes it. For one of
    several results of an op (a bucketed collective), this node is its getitem.
    """
    if hold.at < 0:
        return PeakTensor(hold.owner, hold.size, "arena of collectives' results", "", "")
    node = step.ops[hold.at].node
    items = (user for user in node.users if user.target is getitem and user.args[1] == hold.number)
    node = next(items, node)
    record = ir.info(node)
    param = record.role is not None and record.role.kind == "param"
    module = record.name.rpartition(".")[0] if param else record.origin.module
    return PeakTensor(hold.owner, hold.size, record.name, module, record.origin.source or _first_use(node))


_NEAR = 64  # most nodes behind a value that are searched for a source line


def _first_use(node: fx.Node) -> str:
    """Return the source line of an op that uses ``node``, directly or through other ops: the nearest op that has a
    source line. "" if none is nearby.

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


def _owner(op: Op, buffer: Buffer, phases: list[str], grads: Set[int]) -> str:
    """Return the owner (one of `OWNERS`, such as "activations") under which a buffer that ``op`` allocates is counted.

    Args:
        phases: phase of each op.
        grads: ids of the buffers that hold gradients which leave the step.
    """
    if op.gathered:
        return "gathered"
    if id(buffer) in grads:
        return "gradients"
    if is_loaded(op.node) or (phases[buffer.allocated] == "forward" and phases[buffer.last] == "backward"):
        return "activations"
    return "communication" if op.kind in (START, INPUT) else "temporaries"


def _changes(holds: Seq[_Hold]) -> list[tuple[int, str, int]]:
    """Return (position, owner, change in bytes) of each allocation and each release, in order."""
    allocated = [(hold.start, hold.owner, hold.size) for hold in holds]
    return sorted([*allocated, *((hold.end + 1, hold.owner, -hold.size) for hold in holds)])


def _samples(holds: Seq[_Hold], end: int) -> tuple[Sample, ...]:
    """Return the memory in use by owner, at each position up to ``end`` where it changes."""
    sizes = dict.fromkeys(OWNERS, 0)
    out = []
    for at, changes in groupby(_changes(holds), itemgetter(0)):
        for _, owner, change in changes:
            sizes[owner] += change
        if at <= end:
            out.append(Sample(at, tuple(sizes.values())))
    return tuple(out)
