"""Pricing: what layouts are chosen by, and what steps are predicted by, are the same questions."""

from __future__ import annotations

from typing import Protocol

import torch

from shardc.ir.mesh import Mesh


class Pricing(Protocol):
    """Seconds of what a rank does; a frozen, hashable value.

    `shardc.cost.model.CostModel` prices a group by how many ranks it has, `shardc.cost.hardware.Hardware` by the links
    between them too.
    """

    def __hash__(self) -> int: ...

    def collective_seconds(self, kind: str, mesh: Mesh, axes: tuple[str, ...], wire_bytes: float) -> float:
        """Seconds of a collective of one tensor over ``axes``, in which a rank receives ``wire_bytes``."""

    def least_seconds(self, wire_bytes: float) -> float:
        """A lower bound of the seconds of any collectives in which a rank receives ``wire_bytes`` in all."""

    def compute_seconds(
        self, flops: float, nbytes: float, dtype: torch.dtype = torch.float32, attention: bool = False
    ) -> float:
        """Seconds of a local op that does ``flops`` operations in ``dtype`` and reads and writes ``nbytes``."""

    def copy_seconds(self, nbytes: float) -> float:
        """Seconds of a local op that reads and writes ``nbytes`` and computes nothing."""

    def linear(self, direct: bool) -> tuple[float, float]:
        """(seconds before the first byte of a collective, bytes per second after it), by which buckets are sized.

        Args:
            direct: where collectives may be messages straight between ranks.
        """
