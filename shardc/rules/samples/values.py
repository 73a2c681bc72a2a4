"""Seeded tensors for samples: float64 where an op computes, so that only a wrong rule differs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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


def overloads(op: str) -> Iterator[Any]:
    """The functional overloads of a rule's op."""
    namespace, name, *one = op.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    yield from filter(functional, (getattr(packet, overload) for overload in one or packet.overloads()))


def functional(overload: Any) -> bool:
    """Whether an overload makes new tensors from tensors and numbers, and from nothing else."""
    schema = overload._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    tensors = all(str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns)
    return not writes and tensors and "Dimname" not in str(schema) and "Generator" not in str(schema)


__all__ = ["Draw", "Sample", "functional", "overloads"]
