"""The predicted memory of a step, of one rank: bytes by owner at every op, and the peak.

A kernel's results are allocated before it runs and its inputs are freed after it, so both are counted while it runs. A
value that moves to the host is counted on the device until the wait for its move. If results of collectives are in an
arena (CPU ranks), the arena is counted for the whole step, as communication. Not counted: rounding and fragmentation of
the caching allocator, library workspaces, temporaries of the optimizer, messages between stages that a CPU rank
receives before it reads them (two at most).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import getitem
from typing import Any

from torch import fx

from shardc.cost.compute import Buffer, Kernel, is_inner
from shardc.cost.step_sequence import INPUT, START, Sequence
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
    phases = [op.phase for op in step.ops]
    step_outputs = {id(b) for _, at in step.outputs for b in outputs[at] if b is not None}
    lasting = {id(b) for role, at in step.outputs if role.kind != TRANSFER for b in outputs[at] if b is not None}
    summed = [(role, at) for role, at in step.passed_on if role.kind == TERM and phases[at] == "backward"]
    # A graph returns its terms at its end, and the first is the sum.
    until = {id(b): run_end(step, at) for role, at in step.passed_on if role.kind == TERM for b in outputs[at] if b}
    leaving = [(role, at) for role, at in step.outputs if role.kind == "grad"]
    grads = {id(b) for _, at in (*leaving, *summed) for b in outputs[at] if b is not None}
    kernel_of = {at: kernel.ops for kernel in kernels.values() for at in kernel.ops}
    changes: dict[int, dict[str, int]] = {}
    holds: list[tuple[str, int, int, int, int, int]] = []

    def hold(owner: str, size: int, start: int, end: int, by: int, number: int = 0) -> None:
        """Count ``size`` bytes for ``owner`` while ops ``start`` to ``end`` run. The bytes hold result ``number`` of op
        ``by``.
        """
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
                    hold(_owner(False, False, True, False, buffer, phases), buffer.size, at, end, at)
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
                _owner(op.gathered, id(buffer) in grads, op.kind == START, is_loaded(op.node), buffer, phases),
                buffer.size,
                mine[0],
                end,
                at,
                number,
            )
    samples = _samples(changes, whole_step)
    peak = max(samples, key=lambda sample: (sample.total, -sample.at))
    tensors_at_peak = tuple(
        _peak_tensor(step, owner, size, by, number)
        for owner, size, start, end, by, number in holds
        if start <= peak.at <= end
    )
    peak_op = ir.info(step.ops[min(peak.at, whole_step - 1)].node).name
    host = tuple((owner, max(accumulate(change for _, change in sorted(on_host[owner])))) for owner in sorted(on_host))
    return Memory(samples, peak, peak_op, host, tensors_at_peak)


def run_end(step: Sequence, at: int) -> int:
    """Return the position of the last op of the graph (forward, backward, ...) to which the op at ``at`` belongs."""
    after = bisect_right(step.begins, at)
    return (step.begins[after] if after < len(step.begins) else len(step.ops)) - 1


def _peak_tensor(step: Sequence, owner: str, size: int, at: int, number: int) -> PeakTensor:
    """Return a `PeakTensor` of ``size`` bytes for ``owner``: for result ``number`` of the op at ``at``, or for the
    arena if ``at`` is -1.
    """
    if at < 0:
        return PeakTensor(owner, size, "arena of collectives' results", "", "")
    node = step.ops[at].node
    items = (user for user in node.users if user.target is getitem and user.args[1] == number)
    node = next(items, node)
    record = ir.info(node)
    param = record.role is not None and record.role.kind == "param"
    module = record.name.rpartition(".")[0] if param else record.origin.module
    return PeakTensor(owner, size, record.name, module, record.origin.source or _first_use(node))


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


def _owner(gathered: bool, grad: bool, communicated: bool, loaded: bool, buffer: Buffer, phases: list[str]) -> str:
    """Return the owner (one of `OWNERS`, such as "activations") under which a buffer that an op allocates is counted.

    Args:
        gathered: its value is an unsharded parameter.
        grad: its value is a gradient that leaves the step.
        communicated: it is the result of a collective or move.
        loaded: it is a saved value that was moved back to the device.
        phases: phase of each op.
    """
    if gathered:
        return "gathered"
    if grad:
        return "gradients"
    if loaded or (phases[buffer.allocated] == "forward" and phases[buffer.last] == "backward"):
        return "activations"
    return "communication" if communicated else "temporaries"


def _samples(changes: Mapping[int, Mapping[str, int]], end: int) -> tuple[Sample, ...]:
    """Return the memory in use by owner, at each op (up to position ``end``) where it changes. ``changes`` maps
    position -> owner -> bytes added.
    """
    sizes = dict.fromkeys(OWNERS, 0)
    out = []
    for at in sorted(changes):
        for owner, change in changes[at].items():
            sizes[owner] += change
        if at <= end:
            out.append(Sample(at, tuple(sizes.values())))
    return tuple(out)
