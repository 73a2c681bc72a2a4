"""The cost model: seconds of communication, compute and local copies, per rank.

Linear in bytes and messages (the alpha-beta model of Hockney, 1994): good enough to rank plans, and
its few numbers can be measured: ``python -m shardc calibrate`` writes a file that `CostModel.load` reads.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import torch

from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from shardc.validate import Range, check_fields, checked

Time = Annotated[float, Range(0)]
Rate = Annotated[float, Range(0, above=True)]
_EXCHANGEABLE = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class Measured(NamedTuple):
    """What a kind of collective takes on groups of ``ranks`` ranks.

    Args:
        kind: as in `shardc.cost.redistribute.Step`.
        ranks: ranks of a group; a group of another size is priced by the nearest.
        latency: seconds before the first byte.
        bandwidth: bytes per second that a rank receives.
    """

    kind: str
    ranks: int
    latency: Time
    bandwidth: Rate


class Messages(NamedTuple):
    """What collectives take that go in messages from rank to rank (`shardc.runtime.wire.direct`).

    Args:
        latency: seconds from a collective's start to its first byte that a rank could compute meanwhile.
        call: seconds of a rank's own time, whatever is sent.
        message: seconds of its own time more for each message, that is to each peer for each tensor, or for those that
            share one (`shardc.ir.packing`).
        hop: seconds more of latency for each peer after the first.
        bandwidth: bytes per second that a rank receives while it sends as many.
        share: of the time that bytes are on their way, how much of a rank's core they take.
    """

    latency: float
    call: float
    message: float
    hop: float
    bandwidth: float
    share: float


@dataclass(frozen=True)
class CostModel:
    """What a rank and its links can do.

    Args:
        latency: seconds that a collective takes before its first byte.
        hop: seconds more for each further rank of the group.
        bandwidth: bytes per second that a rank receives.
        flops: floating-point operations per second.
        memory_bandwidth: bytes per second read or written by local ops.
        kinds: collectives that differ, as measured; ``latency``, ``hop`` and ``bandwidth`` are of the others.
        attention: share of ``flops`` that attention reaches.
        launch: seconds that a step takes for each of its kernels, beside their work.
        messages: of collectives in messages between CPU ranks, for schedules; None where it was not measured.
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
        out: dict[str, list[Measured]] = {}
        for row in self.kinds:
            out.setdefault(row.kind, []).append(row)
        return out

    @cached_property
    def _best(self) -> tuple[float, float]:
        latencies = [self.latency, *(row.latency for row in self.kinds)]
        return min(latencies), max([self.bandwidth, *(row.bandwidth for row in self.kinds)])

    def measured(self, kind: str) -> bool:
        """Whether ``kind`` was measured by itself."""
        return kind in self._by_kind

    def seconds(self, kind: str, ranks: int, wire_bytes: float, messages: int = 1) -> float:
        """Seconds of ``messages`` collectives of ``kind`` on ``ranks`` ranks, each receiving ``wire_bytes`` in all."""
        if ranks == 1:
            return 0.0
        rows = self._by_kind.get(kind)
        if rows is None:
            return messages * (self.latency + self.hop * (ranks - 1)) + wire_bytes / self.bandwidth
        row = min(rows, key=lambda row: abs(row.ranks - ranks))
        further = self.hop * max(ranks - row.ranks, 0)
        return messages * (row.latency + further) + wire_bytes / row.bandwidth

    def collective_seconds(self, kind: str, mesh: Mesh, axes: tuple[str, ...], wire_bytes: float) -> float:
        """Seconds of a collective over ``axes``, as `best_seconds` has them for so many ranks."""
        return self.best_seconds(kind, prod([mesh.size(axis) for axis in axes]), wire_bytes)

    def best_seconds(self, kind: str, ranks: int, wire_bytes: float) -> float:
        """Seconds of a collective of ``kind`` by its fastest algorithm; see `shardc.passes.algorithms`."""
        native = self.seconds(kind, ranks, wire_bytes)
        if ranks == 1 or not any(self.measured(one) for one in _EXCHANGEABLE):
            return native
        if kind in ("reduce_scatter", "all_gather"):
            return min(native, self.exchanged_seconds(ranks, wire_bytes))
        if kind == "all_reduce":
            halves = (self.best_seconds(one, ranks, wire_bytes / 2) for one in ("reduce_scatter", "all_gather"))
            return min(native, sum(halves))
        return native

    def exchanged_seconds(self, ranks: int, wire_bytes: float) -> float:
        """Seconds of a reduce-scatter or an all-gather as an all-to-all, and of what each rank sums up, or copies."""
        held = wire_bytes / max(ranks - 1, 1)  # of the result, or of what is gathered
        local = self.compute_seconds(0, (ranks + 1) * held)
        return self.seconds("all_to_all", ranks, wire_bytes) + local

    def least_seconds(self, wire_bytes: float) -> float:
        """A lower bound of ``seconds`` for receiving ``wire_bytes`` by whatever collectives."""
        latency, bandwidth = self._best
        return latency + wire_bytes / bandwidth

    def compute_seconds(
        self, flops: float, nbytes: float, dtype: torch.dtype = torch.float32, attention: bool = False
    ) -> float:
        """Seconds of a local op that does ``flops`` operations, in whatever dtype, and moves ``nbytes`` of memory."""
        rate = self.flops * self.attention if attention else self.flops
        return max(flops / rate, nbytes / self.memory_bandwidth)

    def copy_seconds(self, nbytes: float) -> float:
        """Seconds of a local op that reads and writes ``nbytes`` and computes nothing."""
        return self.compute_seconds(0, nbytes)

    def linear(self, direct: bool) -> tuple[float, float]:
        """(seconds before the first byte of a collective, bytes per second after it): of messages if ``direct``."""
        if (sent := self.messages) is not None and direct:
            return sent.latency + sent.call + sent.message, sent.bandwidth
        return self.latency, self.bandwidth

    # --- files

    def save(self, path: str | Path) -> None:
        """Writes the numbers as JSON; makes the folder."""
        table = asdict(self) | {"kinds": [row._asdict() for row in self.kinds]}
        if self.messages is not None:
            table["messages"] = self.messages._asdict()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(table, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """What `save` wrote.

        Raises:
            InputError: no such file, or one that is not a cost model.
        """
        fix = "write it with python -m shardc calibrate"
        try:
            table = json.loads(Path(path).read_text())
            if lacking := {"latency", "bandwidth", "flops", "memory_bandwidth"} - set(table):
                raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
            made: CostModel = checked(table, cls, "it", tables=True)
            return made
        except OSError as error:
            raise InputError(f"cost model {path} cannot be read: {error.strerror}", fix=fix) from error
        except (ValueError, TypeError, RecursionError) as error:
            names = ", ".join(field.name for field in fields(cls))
            said = getattr(error, "what", error)
            raise InputError(f"{path} is not a cost model ({names}): {said}", fix=fix) from error
