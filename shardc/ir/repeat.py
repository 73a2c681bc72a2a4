"""A run of equal blocks in a container, such as the layers of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Repeat:
    """A run of equal blocks.

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
        """Return the prefix of the children's qualified names, before their numbers."""
        return f"{self.path}." if self.path else ""

    def names(self) -> list[str]:
        """Return the qualified names of the blocks."""
        return [f"{self.prefix}{self.first + at}" for at in range(self.count)]

    def __str__(self) -> str:
        blocks = self.names()
        return f"{blocks[0]} to {blocks[-1]}"


def short_name(name: str, repeats: Sequence[Repeat], keep: int) -> str | None:
    """Return the name in the shortened (folded) model, or None if that leaves the block of ``name`` out.

    The last block of the shortened model stands for the last block of the model.

    >>> blocks = [Repeat("layers", 0, 8)]
    >>> [short_name(f"layers.{n}.w", blocks, 4) for n in (0, 2, 3, 6, 7, 8)]
    ['layers.0.w', 'layers.2.w', None, None, 'layers.3.w', 'layers.4.w']
    """
    for repeat in repeats:
        number, dot, rest = name.removeprefix(repeat.prefix).partition(".")
        if not name.startswith(repeat.prefix) or not number.isdecimal() or int(number) < repeat.first + keep - 1:
            continue
        if int(number) < repeat.first + repeat.count - 1:
            return None
        name = f"{repeat.prefix}{int(number) - repeat.count + keep}{dot}{rest}"
    return name
