"""The cost model: seconds of communication, compute and local copies, per rank.

Linear in bytes and messages (the alpha-beta model of Hockney, 1994): good enough to rank plans, and
its few numbers can be measured (``python -m shardc calibrate``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class CostModel:
    """What a rank and its links can do.

    Args:
        latency: seconds that a collective takes before its first byte.
        hop: seconds more for each further rank of the group.
        bandwidth: bytes per second that a rank receives.
        flops: floating-point operations per second.
        memory_bandwidth: bytes per second read or written by local ops.
        kinds: (kind, latency, bandwidth) of collectives that differ, e.g. gloo's reduce_scatter, which
            runs as a whole all-reduce.
    """

    latency: float = 20e-6
    hop: float = 1e-6
    bandwidth: float = 50e9
    flops: float = 100e12
    memory_bandwidth: float = 1e12
    kinds: tuple[tuple[str, float, float], ...] = (("permute_ranks", 30e-6, 40e9),)

    @cached_property
    def _by_kind(self) -> dict[str, tuple[float, float]]:
        return {kind: (latency, bandwidth) for kind, latency, bandwidth in self.kinds}

    @cached_property
    def _best(self) -> tuple[float, float]:
        rows = [(self.latency, self.bandwidth), *self._by_kind.values()]
        return min(latency for latency, _ in rows), max(bandwidth for _, bandwidth in rows)

    def seconds(self, kind: str, ranks: int, wire_bytes: float, messages: int = 1) -> float:
        """Seconds of ``messages`` collectives of ``kind`` on ``ranks`` ranks, each receiving ``wire_bytes`` in all."""
        if ranks == 1:
            return 0.0
        latency, bandwidth = self._by_kind.get(kind, (self.latency, self.bandwidth))
        return messages * (latency + self.hop * (ranks - 1)) + wire_bytes / bandwidth

    def least_seconds(self, wire_bytes: float) -> float:
        """A lower bound of ``seconds`` for receiving ``wire_bytes`` by whatever collectives."""
        latency, bandwidth = self._best
        return latency + wire_bytes / bandwidth

    def compute_seconds(self, flops: float, nbytes: float) -> float:
        """Seconds of a local op that does ``flops`` operations and reads and writes ``nbytes``."""
        return max(flops / self.flops, nbytes / self.memory_bandwidth)
