"""A run of alike blocks, by the name of their container."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Repeat:
    """A run of alike blocks.

    Args:
        path: qualified name of the container.
        first: the child that is the first of them.
        count: how many there are.
    """

    path: str
    first: int
    count: int

    @property
    def prefix(self) -> str:
        """What the names of the children begin with, before their numbers."""
        return f"{self.path}." if self.path else ""

    def names(self) -> list[str]:
        """The qualified names of the blocks."""
        return [f"{self.prefix}{self.first + at}" for at in range(self.count)]

    def __str__(self) -> str:
        blocks = self.names()
        return f"{blocks[0]} to {blocks[-1]}"
