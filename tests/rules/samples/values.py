"""Seeded tensors for samples: float64 where an op computes, so that only a wrong rule differs."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from shardc.cli.rules import functional, overloads
from shardc.rules.proof import Sample


class Draw:
    """Random tensors, the same for the same ``name`` in every process."""

    def __init__(self, name: str) -> None:
        self._generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self._generator)

    def unit(self, *shape: int) -> Tensor:
        """Between 0.1 and 0.9, where every function of one variable is defined (but acosh)."""
        return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=self._generator)

    def below(self, high: int, *shape: int) -> Tensor:
        """int64 in ``range(high)``."""
        return torch.randint(high, shape, generator=self._generator)

    def bools(self, *shape: int) -> Tensor:
        return self.below(2, *shape).bool()

    def order(self, *shape: int) -> Tensor:
        """A permutation of ``range(shape[-1])`` in every row: indices without duplicates."""
        return torch.rand(shape, generator=self._generator).argsort(-1)


__all__ = ["Draw", "Sample", "functional", "overloads"]
