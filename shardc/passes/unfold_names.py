"""Names of nodes in copied blocks, for `shardc.passes.unfold`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardc.errors import ShardcError
from shardc.ir.repeat import Repeat


class NotPeriodic(ShardcError):
    """Raised for a graph in which blocks do not repeat node by node."""


class Names:
    """Map from names in a graph of a few blocks to names in the graph of all blocks.

    A name either has its block's number after the container's path (``layers.3.up``), or belongs to a family that is
    numbered through the graph (``d.add.7``). The latter increases from block to block by the family's number of names
    in a block.

    Args:
        run: the repeated blocks of the whole model.
        keep: number of blocks that were captured.
    """

    def __init__(self, run: Repeat, keep: int) -> None:
        self.run, self.keep, self.missing = run, keep, run.count - keep
        self.last = run.first  # the last block before those that are inserted
        self.ends = {run.first, run.first + keep - 1}
        self._block = re.compile(rf"^(d\.)?{re.escape(run.prefix)}(\d+)(?=\.|$)")
        self._moved: dict[tuple[str, int], str] = {}
        # Family (the parts before the number) -> (numbers in a block, the first after the new blocks, direction).
        self._families: dict[tuple[str, ...], tuple[int, int, int]] = {}

    def block_of(self, name: str) -> int | None:
        """Returns the block of the run that ``name`` belongs to; None if it has no number of a captured block."""
        number = self._number(name)
        return number if number is not None and number < self.run.first + self.keep else None

    def learn(self, pairs: Iterable[tuple[str, str, int]], step: int) -> None:
        """Records families from (name in a block, its counterpart one period later in the graph, the first's block).

        Args:
            step: 1 where blocks follow in their order, -1 where in reverse.

        Raises:
            NotPeriodic: names that do not count on evenly.
        """
        for early, late, block in pairs:
            if self._number(early) is not None or early == late:
                continue
            family, first, second = _numbers(early, late)
            stride = second - first
            behind = first + stride * ((self.last + 1 - block) if step > 0 else (block - self.last))
            family_count = self._families.get(family, (stride, behind, step))
            if stride <= 0 or family_count[0] != stride:
                raise NotPeriodic(f"{early} and {late} do not count on evenly")
            self._families[family] = (stride, min(family_count[1], behind), step)

    def node(self, name: str, moved_by: int, placed: bool) -> str:
        """Returns the name, in the graph of all blocks, of the counterpart of node ``name`` shifted by ``moved_by``.

        Args:
            placed: the node has a place in a period, so that it is shifted with its block.
        """
        if self._number(name) is not None:
            return self.module(name, moved_by)
        if (numbered := self._family(name)) is None:
            return name
        family, at, value = numbered
        stride, behind, step = self._families[family]
        blocks = self.missing * (value >= behind)
        if placed:
            blocks = moved_by if step > 0 else self.missing - moved_by
        return _with_number(name, at, value + stride * blocks)

    def module(self, name: str, moved_by: int) -> str:
        """Returns the name of a module, or of its parameter, shifted by ``moved_by`` blocks.

        Modules after the captured blocks are shifted by all missing blocks.
        """
        if (cached := self._moved.get((name, moved_by))) is not None:
            return cached
        moved, number = name, self._number(name)
        if number is not None:
            on = number + (moved_by if number < self.run.first + self.keep else self.missing)
            moved = self._block.sub(lambda m: f"{m[1] or ''}{self.run.prefix}{on}", name)
        self._moved[name, moved_by] = moved  # cached: many nodes share their module's name
        return moved

    def _number(self, name: str) -> int | None:
        match = self._block.match(name)
        return int(match[2]) if match and int(match[2]) >= self.run.first else None

    def _family(self, name: str) -> tuple[tuple[str, ...], int, int] | None:
        """Returns (family, position of its number, number) of a name of a family; None for other names."""
        parts = name.split(".")
        for at in range(1, len(parts) + 1):
            if (family := tuple(parts[:at])) in self._families:
                numbered = at < len(parts) and parts[at].isdecimal()
                return family, at, int(parts[at]) if numbered else 0
        return None


def _numbers(early: str, late: str) -> tuple[tuple[str, ...], int, int]:
    """Returns (family, number in ``early``, number in ``late``) of names that differ in one number.

    >>> _numbers("d.add.scattered", "d.add.8.scattered")
    (('d', 'add'), 0, 8)
    """
    first, second = early.split("."), late.split(".")
    at = next((i for i, part in enumerate(second) if i >= len(first) or first[i] != part), len(second))
    if at < len(second) and second[at].isdecimal():
        if first[at:] == second[at + 1 :]:
            return tuple(second[:at]), 0, int(second[at])
        if at < len(first) and first[at].isdecimal() and first[at + 1 :] == second[at + 1 :]:
            return tuple(second[:at]), int(first[at]), int(second[at])
    raise NotPeriodic(f"{early} and {late} are not numbered alike")


def _with_number(name: str, at: int, value: int) -> str:
    """Returns ``name`` with the number ``value`` as its part ``at``; 0 is left out."""
    parts = name.split(".")
    rest = parts[at + 1 :] if at < len(parts) and parts[at].isdecimal() else parts[at:]
    return ".".join([*parts[:at], *([str(value)] if value else []), *rest])
