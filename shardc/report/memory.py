"""Predicts the memory of one rank over a step: bytes by owner at every op, and the peak.

A kernel's results are allocated before it runs and its inputs are freed after it, so both are counted while it runs.
If results of collectives are in an arena (CPU ranks), the arena is counted for the whole step, as communication.
Not counted: rounding and fragmentation of the caching allocator, library workspaces, temporaries of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardc.cost.fused_kernels import Buffer, Kernel, is_inner
from shardc.cost.step_sequence import INPUT, START, Sequence
from shardc.ir import graph as ir

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
        return sum(self.sizes)


@dataclass(frozen=True)
class Memory:
    """A rank's memory, in bytes.

    Args:
        samples: one for every op that allocates or frees, in order.
        peak: the largest sample.
        peak_op: name of the op at the peak.
        host: (owner, bytes) kept in host memory instead, for the whole step.
    """

    samples: tuple[Sample, ...]
    peak: Sample
    peak_op: str
    host: tuple[tuple[str, int], ...] = ()

    def by_owner(self) -> dict[str, int]:
        """Return the bytes at the peak by owner."""
        return dict(zip(OWNERS, self.peak.sizes, strict=True))


def memory_of(
    step: Sequence,
    outputs: list[tuple[Buffer | None, ...]],
    kernels: Mapping[int, Kernel],
    optimizer_copies: float,
) -> Memory:
    """Return the predicted memory of a step.

    Args:
        outputs: per op the buffers of its results.
        optimizer_copies: size of the optimizer's state as a multiple of the parameters (AdamW: 2).
    """
    backward_start = next((at for at, op in enumerate(step.ops) if op.phase == "backward"), len(step.ops))
    step_outputs = {id(b) for _, at in step.outputs for b in outputs[at] if b is not None}
    grads = {id(b) for role, at in step.outputs if role.kind == "grad" for b in outputs[at] if b is not None}
    kernel_of = {at: kernel.ops for kernel in kernels.values() for at in kernel.ops}
    changes: dict[int, dict[str, int]] = {}

    def hold(owner: str, size: int, start: int, end: int) -> None:
        for at, change in ((start, size), (end + 1, -size)):
            change_by_owner = changes.setdefault(at, {})
            change_by_owner[owner] = change_by_owner.get(owner, 0) + change

    host: dict[str, int] = {}

    def on_host(owner: str, size: int) -> None:
        host[owner] = host.get(owner, 0) + size

    whole_step = len(step.ops)
    if step.arena:
        hold("communication", step.arena, 0, whole_step)
    for at, op in enumerate(step.ops):
        placed = step.placed.get(at, ())
        for number, buffer in enumerate(outputs[at]):
            if buffer is None or buffer.allocated != at or not buffer.size or number in placed:
                continue
            value = ir.info(op.node).value
            if isinstance(value, ir.Value) and value.host:
                on_host("parameters" if op.kind == INPUT else "gradients", buffer.size)
                if op.kind == INPUT:
                    on_host("optimizer", int(buffer.size * optimizer_copies))
                continue
            if op.kind == INPUT:
                role = ir.info(op.node).role
                if role is not None and role.kind == "param":
                    hold("parameters", buffer.size, 0, whole_step)
                    hold("optimizer", int(buffer.size * optimizer_copies), 0, whole_step)
                else:
                    hold("inputs", buffer.size, 0, whole_step)
                continue
            mine = kernel_of.get(at, (at,))
            if at in kernel_of and is_inner(buffer, set(mine), step_outputs):
                continue
            end = whole_step if id(buffer) in step_outputs else kernel_of.get(buffer.last, (buffer.last,))[-1]
            hold(
                _owner(op.gathered, id(buffer) in grads, op.kind == START, buffer, backward_start),
                buffer.size,
                mine[0],
                end,
            )
    samples = _samples(changes, whole_step)
    peak = max(samples, key=lambda sample: (sample.total, -sample.at))
    return Memory(samples, peak, ir.info(step.ops[min(peak.at, whole_step - 1)].node).name, tuple(sorted(host.items())))


def _owner(gathered: bool, grad: bool, communicated: bool, buffer: Buffer, turn: int) -> str:
    if gathered:
        return "gathered"
    if grad:
        return "gradients"
    if buffer.allocated < turn <= buffer.last:
        return "activations"
    return "communication" if communicated else "temporaries"


def _samples(changes: Mapping[int, Mapping[str, int]], end: int) -> tuple[Sample, ...]:
    sizes = dict.fromkeys(OWNERS, 0)
    out = []
    for at in sorted(changes):
        for owner, change in changes[at].items():
            sizes[owner] += change
        if at <= end:
            out.append(Sample(at, tuple(sizes.values())))
    return tuple(out)
