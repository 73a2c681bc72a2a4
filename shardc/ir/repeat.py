"""Runs of repeated blocks, and the names of modules in a model that is shortened to a few blocks of each run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from shardc.ir.comm import IN_MESSAGES


@dataclass(frozen=True)
class Repeat:
    """A run of repeated blocks: consecutive children of a container.

    Args:
        path: qualified name of the container.
        first: number of the child that is the first block.
        count: number of blocks.
    """

    path: str
    first: int
    count: int

    @property
    def prefix(self) -> str:
        """The prefix of the children's qualified names, before their numbers."""
        return f"{self.path}." if self.path else ""

    def name(self, block: int, rest: str = "") -> str:
        """Return the qualified name of ``block`` (0 is the first of the run), or of ``rest`` in it."""
        return f"{self.prefix}{self.first + block}{rest}"

    def names(self) -> list[str]:
        """Return the qualified names of the blocks."""
        return [self.name(block) for block in range(self.count)]

    def split(self, name: str) -> tuple[int, str] | None:
        """Return the block of ``name`` and the name in it; None if it is outside the container or before the run.

        >>> Repeat("layers", 2, 6).split("layers.3.up.weight")
        (1, '.up.weight')
        """
        number, dot, rest = name.removeprefix(self.prefix).partition(".")
        if not name.startswith(self.prefix) or not number.isdecimal() or int(number) < self.first:
            return None
        return int(number) - self.first, f"{dot}{rest}"

    def __str__(self) -> str:
        return f"{self.name(0)} to {self.name(self.count - 1)}"


@dataclass(frozen=True)
class Repeats:
    """The runs of repeated blocks of a model, and the shortened model that has ``keep`` blocks of each."""

    runs: tuple[Repeat, ...] = ()
    keep: int = 0

    def __iter__(self) -> Iterator[Repeat]:
        return iter(self.runs)

    def __bool__(self) -> bool:
        return bool(self.runs)

    def place(self, name: str) -> tuple[Repeat, int, str] | None:
        """Return (run of equal blocks, index of the block, name in it) of ``name``; None if it is in no such block."""
        places = ((run, *place) for run in self.runs if (place := run.split(name)) and place[0] < self.keep)
        return next(places, None)

    def shortened(self) -> Repeats:
        """Return the runs in the model that has only ``keep`` blocks of each."""
        return Repeats(tuple(replace(run, count=self.keep) for run in self.runs), self.keep)

    def short(self, name: str) -> str | None:
        """Return the name that ``name`` has in the model with few blocks; None if its block is left out.

        The last block of the shortened model stands for the last one.

        >>> blocks = Repeats((Repeat("layers", 0, 8),), 4)
        >>> [blocks.short(f"layers.{n}.w") for n in (0, 2, 3, 6, 7, 8)]
        ['layers.0.w', 'layers.2.w', None, None, 'layers.3.w', 'layers.4.w']
        """
        for run in self.runs:
            block, rest = run.split(name) or (0, "")
            if self.keep - 1 <= block < run.count - 1:
                return None
            if block >= self.keep:
                name = run.name(block - run.count + self.keep, rest)
        return name

    def counterpart(self, name: str) -> str:
        """Return the name that stands for ``name`` in the model with few blocks: for a left-out block, the second's.

        >>> blocks = Repeats((Repeat("layers", 0, 8),), 4)
        >>> [blocks.counterpart(f"layers.{n}.w") for n in (0, 2, 3, 7)]
        ['layers.0.w', 'layers.2.w', 'layers.1.w', 'layers.3.w']
        """
        for run in self.runs:
            block, rest = run.split(name) or (0, "")
            if self.keep - 1 <= block < run.count - 1:
                name = run.name(1, rest)
        return self.short(name) or name

    def whole(self, name: str) -> str:
        """Return the name in the full model of ``name`` in the one with few blocks: later children count on."""
        for run in self.runs:
            block, rest = run.split(name) or (0, "")
            if block >= self.keep:
                name = run.name(block + run.count - self.keep, rest)
        return name


class Marks:
    """Numbers that are equal for nodes (or values) that can correspond in repeated blocks: equal ops and types."""

    def __init__(self) -> None:
        self._ids: dict[Any, int] = {}
        self._kinds: dict[fx.Node, int] = {}
        self._marks: dict[fx.Node, int] = {}
        self._operands: dict[fx.Node, list[fx.Node]] = {}

    def kind(self, node: fx.Node) -> int:
        """Return a number that is equal for values of the same type."""
        if node not in self._kinds:
            self._kinds[node] = self._id(type_of(node.meta.get("val")))
        return self._kinds[node]

    def mark(self, node: fx.Node) -> int:
        """Return a number that is equal for nodes of the same op, constants and types of operands and results.

        The slots of messages are not compared: they count on through the graph.
        """
        if node not in self._marks:
            args = node.args[:-1] if node.target in IN_MESSAGES else node.args
            written = fx.node.map_arg((args, node.kwargs), lambda x: f"%{self.kind(x)}")
            self._marks[node] = self._id((node.target, repr(written), self.kind(node)))
        return self._marks[node]

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands of ``node`` in order, with repetitions."""
        if node not in self._operands:
            nodes: list[fx.Node] = []
            self._operands[node] = nodes
            fx.node.map_arg((node.args, node.kwargs), nodes.append)
        return self._operands[node]

    def _id(self, key: Any) -> int:
        return self._ids.setdefault(key, len(self._ids))


def type_of(value: Any) -> Any:
    """Return the type of a value: dtype, shape, stride and device of tensors, the text of constants."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device
    if isinstance(value, list | tuple):
        return tuple(map(type_of, value))
    return type(value), repr(value)
