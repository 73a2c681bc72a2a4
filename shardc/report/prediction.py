"""What is predicted of a training step: each collective and kernel, when it runs, and what the step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

import torch

from shardc.cost.hardware import Hardware
from shardc.cost.kernels import Kernel
from shardc.cost.sequence import Sequence
from shardc.ir.mesh import Mesh
from shardc.report.causes import Cause
from shardc.report.memory import Memory

if TYPE_CHECKING:
    from shardc.report.formulas import Costs

T = TypeVar("T")
K = TypeVar("K")
HOST = "host"  # in the place of mesh axes, of copies between host and device


@dataclass(frozen=True)
class Collective:
    """One collective of a step, as every rank runs it, or one copy between a rank's host and its device.

    Args:
        name: of the node.
        kind: as in `shardc.ir.ops`; "to_device" or "to_host" of a copy.
        axis: the mesh axes of its groups, joined by commas; "host" of a copy.
        ranks: in each group; 1 of a copy.
        dtype: of what moves.
        bytes: that each rank hands in.
        wire: bytes that each rank sends, as `shardc.ir.tally` counts them; all of a copy.
        phase: "forward" or "backward".
        start, end: predicted seconds from the start of the step.
        exposed: seconds that the rank stands still for it, or is busy starting it.
        hidden_by: the module whose kernels run most of the time meanwhile; "" where none do.
        cause: where it comes from.
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
    """One kernel of a step and when it runs (seconds from the start of the step)."""

    kernel: Kernel
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Total:
    """Collectives that have something in common.

    Args:
        count: how many.
        wire: bytes that each rank sends.
        seconds: on the wire.
        exposed: seconds of them that nothing hides.
    """

    count: int
    wire: int
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Prediction:
    """What `shardc.report.schedule.Schedule` says of a step, without how it is shown.

    Args:
        mesh, hardware: what it is predicted for.
        order: "graph" or "earliest" (`shardc.report.simulate`).
        transfers, runs: in the order of the graph.
        memory: bytes of a rank over the step.
        clock: seconds at which each op of the step's sequence is reached.
        seconds: of the step.
        useful_flops: operations of the whole model's dense ops divided by the ranks, without replicated work.
        dtype: that most dense operations are in.
        step: the ops that it is of.
        notes: what the prediction takes together, for people.
        symbols: makes the formulas of its program's costs.
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
        """Mesh, hardware and order, behind model and plan where they are known."""
        where = f"{self.mesh} on {self.hardware.name}, {self.order} order"
        return ", ".join(filter(None, (self.model, self.plan, where)))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The transfers between ranks."""
        return tuple(each for each in self.transfers if each.axis != HOST)

    @property
    def moves(self) -> tuple[Collective, ...]:
        """The transfers between host and device."""
        return tuple(each for each in self.transfers if each.axis == HOST)

    @cached_property
    def by_node(self) -> dict[str, list[Collective]]:
        """The collectives by the name of their node in the global graph; level 3 gathers twice."""
        return grouped(self.collectives, lambda each: each.name.rpartition(".")[0])

    @property
    def wire(self) -> int:
        """Bytes that each rank sends to others."""
        return sum(each.wire for each in self.collectives)

    @property
    def compute_seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    @property
    def exposed(self) -> float:
        """Seconds that a rank stands still for collectives, and for copies between host and device."""
        return sum(each.exposed for each in self.transfers)

    @property
    def flops(self) -> int:
        """Operations of the dense ops that a rank runs, replicated ones included."""
        return sum(run.kernel.flops for run in self.runs)

    @property
    def mfu(self) -> float:
        """Model flops utilisation that the prediction allows: useful operations over the peak of the step's time."""
        return self.useful_flops / (self.seconds * self.hardware.peak(self.dtype)) if self.seconds else 0.0

    def totals(self, by: str) -> dict[str, Total]:
        """Totals by "axis", "kind", "module", "tensor", "phase" or "entry", largest exposed time first."""
        groups = grouped(self.transfers, attrgetter(f"cause.{by}" if by in ("module", "tensor", "entry") else by))
        made = {
            key: Total(len(of), sum(c.wire for c in of), sum(c.seconds for c in of), sum(c.exposed for c in of))
            for key, of in groups.items()
        }
        return dict(sorted(made.items(), key=lambda item: (-item[1].exposed, -item[1].wire, item[0])))

    def fits(self, gigabytes: float | None = None) -> bool:
        """Whether the peak is within ``gigabytes`` (of 10^9 bytes; by default what the hardware has)."""
        return self.memory.peak.total <= (self.hardware.memory if gigabytes is None else gigabytes * 1e9)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """``items`` by their keys, in the order in which these come first."""
    out: dict[K, list[T]] = {}
    for item in items:
        out.setdefault(key(item), []).append(item)
    return out
