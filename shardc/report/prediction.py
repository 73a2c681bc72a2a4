"""The predicted step: each collective and kernel with its time, the memory, and the totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

import torch

from shardc.cost.causes import Cause
from shardc.cost.fused_kernels import Kernel
from shardc.cost.hardware import Hardware
from shardc.cost.step_sequence import Sequence
from shardc.ir.mesh import Mesh
from shardc.report.memory import Memory

if TYPE_CHECKING:
    from shardc.report.formulas import Costs

T = TypeVar("T")
K = TypeVar("K")
HOST = "host"  # stands for the mesh axes in copies between host and device


@dataclass(frozen=True)
class Collective:
    """One collective of a step, as every rank runs it, or one copy between host and device.

    Args:
        name: name of the node.
        kind: as in `shardc.ir.ops`; "to_device" or "to_host" for a copy.
        axis: the mesh axes of its group, joined by commas; "host" for a copy.
        ranks: size of the group; 1 for a copy.
        dtype: that of the tensors.
        bytes: input bytes per rank.
        wire: bytes that each rank sends, as `shardc.ir.comm_volume` counts them; all bytes of a copy.
        phase: "forward" or "backward".
        start, end: predicted seconds since the start of the step.
        exposed: seconds that the rank waits for it, or is busy starting it.
        hidden_by: the module whose kernels overlap it most; "" if none does.
        cause: why it exists.
        algorithm, link: what the prediction assumes.
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
        return self.end - self.start


@dataclass(frozen=True)
class Run:
    """One kernel of a step and when it runs (seconds since the start of the step)."""

    kernel: Kernel
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Total:
    """Sums over a group of collectives.

    Args:
        count: their number.
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
        order: "graph" or "earliest" (`shardc.report.simulate`).
        transfers, runs: collectives (and host copies) and kernels, in graph order.
        memory: bytes of a rank over the step.
        clock: seconds at which each op of the step is reached.
        seconds: duration of the step.
        useful_flops: operations of the model's dense ops divided by the number of ranks, without replicated work.
        dtype: that of most dense operations.
        step: the ops of the step.
        notes: remarks for people, such as approximations.
        symbols: returns the cost formulas of the program.
        model, plan: their names, for titles.
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
        """Return the collectives by the name of their node in the global graph; ZeRO-3 gathers twice."""
        return grouped(self.collectives, lambda c: c.name.rpartition(".")[0])

    @property
    def wire(self) -> int:
        """Return the bytes that each rank sends to others."""
        return sum(c.wire for c in self.collectives)

    @property
    def compute_seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    @property
    def exposed(self) -> float:
        """Return the seconds that a rank waits for collectives and host copies."""
        return sum(transfer.exposed for transfer in self.transfers)

    @property
    def flops(self) -> int:
        """Return the operations of a rank's dense ops, replicated work included."""
        return sum(run.kernel.flops for run in self.runs)

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: useful operations over the peak operations of the step."""
        return self.useful_flops / (self.seconds * self.hardware.peak(self.dtype)) if self.seconds else 0.0

    def totals(self, by: str) -> dict[str, Total]:
        """Return totals by "axis", "kind", "module", "tensor", "phase" or "entry", largest exposed time first."""
        groups = grouped(self.transfers, attrgetter(f"cause.{by}" if by in ("module", "tensor", "entry") else by))
        totals = {
            key: Total(len(of), sum(c.wire for c in of), sum(c.seconds for c in of), sum(c.exposed for c in of))
            for key, of in groups.items()
        }
        return dict(sorted(totals.items(), key=lambda item: (-item[1].exposed, -item[1].wire, item[0])))

    def fits(self, gigabytes: float | None = None) -> bool:
        """Return whether the peak fits in ``gigabytes`` (of 10^9 bytes; by default the memory of the hardware)."""
        return self.memory.peak.total <= (self.hardware.memory if gigabytes is None else gigabytes * 1e9)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group ``items`` by key, in the order in which the keys first occur."""
    out: dict[K, list[T]] = {}
    for item in items:
        out.setdefault(key(item), []).append(item)
    return out
