"""`CostModel`: predicts the seconds of communication, compute and local copies, per rank.

It is linear in bytes and messages (the alpha-beta model of Hockney, 1994), which is accurate enough to rank plans. Its
parameters can be measured: ``python -m shardc calibrate`` writes a file that `CostModel.load` reads.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import torch

from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from shardc.validate import Range, check_fields, checked

Time = Annotated[float, Range(0)]
Rate = Annotated[float, Range(0, above=True)]
_EXCHANGEABLE = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class Pricing(Protocol):
    """Interface of a cost model: predicts the seconds of a rank's collectives and local ops; frozen and hashable.

    `CostModel` prices a collective by the size of its group, `shardc.cost.hardware.Hardware` also by the links between
    its ranks. Layouts are chosen, and steps predicted, with the same methods.
    """

    def __hash__(self) -> int: ...

    def collective_seconds(self, kind: str, mesh: Mesh, axes: tuple[str, ...], wire_bytes: float) -> float:
        """Return the seconds of a collective of ``kind`` over ``axes``, of one tensor. Each rank sends
        ``wire_bytes``.
        """

    def least_seconds(self, wire_bytes: float) -> float:
        """Return a lower bound of the seconds of the collectives in which a rank sends ``wire_bytes`` in total,
        whatever their kinds and number.
        """

    def compute_seconds(
        self, flops: float, nbytes: float, dtype: torch.dtype = torch.float32, attention: bool = False
    ) -> float:
        """Return the seconds of a local op with ``flops`` operations in ``dtype`` that reads and writes ``nbytes``."""

    def copy_seconds(self, nbytes: float) -> float:
        """Return the seconds of a local op that reads and writes ``nbytes`` in total and has no FLOPs."""

    def linear(self, direct: bool) -> tuple[float, float]:
        """Return (seconds before the first byte, bytes per second) of a collective; of a direct one (messages between
        CPU ranks) if ``direct``.
        """


class Measured(NamedTuple):
    """The measured latency and bandwidth of a kind of collective on groups of ``ranks`` ranks.

    Args:
        kind: the kind of collective, as in `shardc.cost.redistribute.Step`.
        ranks: size of the group; a group of another size is priced by the nearest measured size.
        latency: seconds before the first byte.
        bandwidth: bytes per second that a rank receives.
    """

    kind: str
    ranks: int
    latency: Time
    bandwidth: Rate


class Messages(NamedTuple):
    """The cost of collectives that are sent as messages between ranks (`shardc.runtime.gloo.direct`).

    Args:
        latency: seconds from a collective's start to its first byte, during which the rank can compute.
        call: seconds that a rank is busy per collective.
        message: further busy seconds per message: one per peer and tensor, or per tensors that share a message
            (`shardc.ir.arena`).
        hop: further latency for each peer after the first.
        bandwidth: bytes per second that a rank receives while it sends as many.
        share: share of the transfer time during which a rank's core is busy.
    """

    latency: float
    call: float
    message: float
    hop: float
    bandwidth: float
    share: float


@dataclass(frozen=True)
class CostModel:
    """A cost model by the measured or assumed rates of a rank and its links: latency, bandwidth, FLOP/s.

    Args:
        latency: seconds of a collective before its first byte.
        hop: further seconds for each rank of the group.
        bandwidth: bytes per second that a rank receives.
        flops: floating-point operations per second.
        memory_bandwidth: bytes per second read or written by local ops.
        kinds: collectives that were measured by kind; ``latency``, ``hop`` and ``bandwidth`` apply to all others.
        attention: share of ``flops`` that attention reaches.
        launch: launch overhead in seconds per kernel.
        messages: cost of collectives in messages between CPU ranks, for schedules; None if not measured.
    """

    latency: Time = 20e-6
    hop: Time = 1e-6
    bandwidth: Rate = 50e9
    flops: Rate = 100e12
    memory_bandwidth: Rate = 1e12
    kinds: tuple[Measured, ...] = (Measured("permute_ranks", 2, 30e-6, 40e9),)
    attention: Rate = 1.0
    launch: Time = 0.0
    messages: Messages | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @cached_property
    def _by_kind(self) -> dict[str, list[Measured]]:
        """Return the measurements by kind of collective: kind -> its rows of `Measured`."""
        out: dict[str, list[Measured]] = {}
        for row in self.kinds:
            out.setdefault(row.kind, []).append(row)
        return out

    @cached_property
    def _best(self) -> tuple[float, float]:
        """Return (lowest latency, highest bandwidth) over all kinds of collectives."""
        latencies = [self.latency, *(row.latency for row in self.kinds)]
        return min(latencies), max([self.bandwidth, *(row.bandwidth for row in self.kinds)])

    def measured(self, kind: str) -> bool:
        """Return whether collectives of ``kind`` were measured. Otherwise their seconds are estimated from a general
        rate.
        """
        return kind in self._by_kind

    def seconds(self, kind: str, ranks: int, wire_bytes: float, messages: int = 1) -> float:
        """Return the seconds of ``messages`` collectives of ``kind`` on ``ranks`` ranks. Each rank sends ``wire_bytes``
        in all of them together.
        """
        if ranks == 1:
            return 0.0
        rows = self._by_kind.get(kind)
        if rows is None:
            return messages * (self.latency + self.hop * (ranks - 1)) + wire_bytes / self.bandwidth
        row = min(rows, key=lambda row: abs(row.ranks - ranks))
        further = self.hop * max(ranks - row.ranks, 0)
        return messages * (row.latency + further) + wire_bytes / row.bandwidth

    def collective_seconds(self, kind: str, mesh: Mesh, axes: tuple[str, ...], wire_bytes: float) -> float:
        """Return the seconds of a collective of ``kind`` over the mesh axes ``axes``, by the best algorithm
        (`best_seconds`) for this number of ranks.
        """
        return self.best_seconds(kind, prod([mesh.size(axis) for axis in axes]), wire_bytes)

    def best_seconds(self, kind: str, ranks: int, wire_bytes: float) -> float:
        """Return the seconds of a collective of ``kind`` on ``ranks`` ranks by its fastest algorithm. The candidates
        are those of the pass `Algorithms`.
        """
        native = self.seconds(kind, ranks, wire_bytes)
        if ranks == 1 or not any(map(self.measured, _EXCHANGEABLE)):
            return native
        if kind in ("reduce_scatter", "all_gather"):
            return min(native, self.exchanged_seconds(ranks, wire_bytes))
        if kind == "all_reduce":
            halves = (self.best_seconds(half, ranks, wire_bytes / 2) for half in ("reduce_scatter", "all_gather"))
            return min(native, sum(halves))
        return native

    def exchanged_seconds(self, ranks: int, wire_bytes: float) -> float:
        """Return the seconds of a reduce-scatter or all-gather done as an all-to-all and a local sum or copy."""
        shard = wire_bytes / max(ranks - 1, 1)
        local = self.compute_seconds(0, (ranks + 1) * shard)
        return self.seconds("all_to_all", ranks, wire_bytes) + local

    def least_seconds(self, wire_bytes: float) -> float:
        """Return a lower bound of the seconds of the collectives in which a rank sends ``wire_bytes`` in total,
        whatever their kinds and number.
        """
        latency, bandwidth = self._best
        return latency + wire_bytes / bandwidth

    def compute_seconds(
        self, flops: float, nbytes: float, dtype: torch.dtype = torch.float32, attention: bool = False
    ) -> float:
        """Return the seconds of a local op with ``flops`` operations that reads and writes ``nbytes``."""
        rate = self.flops * self.attention if attention else self.flops
        return max(flops / rate, nbytes / self.memory_bandwidth)

    def copy_seconds(self, nbytes: float) -> float:
        """Return the seconds of a local op that reads and writes ``nbytes`` in total and has no FLOPs."""
        return self.compute_seconds(0, nbytes)

    def linear(self, direct: bool) -> tuple[float, float]:
        """Return (seconds before the first byte, bytes per second) of a collective; of a direct one (messages between
        CPU ranks) if ``direct``.
        """
        if (messages := self.messages) is not None and direct:
            return messages.latency + messages.call + messages.message, messages.bandwidth
        return self.latency, self.bandwidth

    # --- files

    def save(self, path: str | Path) -> None:
        """Write the cost model to ``path`` as JSON. The folder is created if needed."""
        table = asdict(self) | {"kinds": [row._asdict() for row in self.kinds]}
        if self.messages is not None:
            table["messages"] = self.messages._asdict()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(table, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read a cost model from a file that `save` wrote.

        Raises:
            InputError: the file does not exist, or is not a cost model.
        """
        fix = "write it with python -m shardc calibrate"
        try:
            table = json.loads(Path(path).read_text())
            if lacking := {"latency", "bandwidth", "flops", "memory_bandwidth"} - set(table):
                raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
            model: CostModel = checked(table, cls, "it", tables=True)
            return model
        except OSError as error:
            raise InputError(f"cost model {path} cannot be read: {error.strerror}", fix=fix) from error
        except (ValueError, TypeError, RecursionError) as error:
            names = ", ".join(field.name for field in fields(cls))
            reason = getattr(error, "what", error)
            raise InputError(f"{path} is not a cost model ({names}): {reason}", fix=fix) from error
