"""Which gradients a step reduces, and the local sums of those that it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shardc.ir.layout import Layout

Key = tuple[str, Layout]  # a parameter and how its local sum lies on the mesh


@dataclass
class Sync:
    """The gradients that backwards leave unreduced, and what they have summed up so far.

    ``"all"`` reduces every gradient in every backward. ``"levels"`` leaves out those of parameters that are whole
    between steps, or are stored at level 1: these are summed up whole on each rank. ``"none"`` leaves out all.

    Args:
        levels: of each parameter; 0 where no fsdp entry stores it.
        mode: "all", "levels" or "none".
        sums: local sums, at stored (padded) shapes, until a backward that reduces them.
    """

    levels: Mapping[str, int]
    mode: str = "all"
    sums: dict[Key, Tensor] = field(default_factory=dict)
    _own: set[Key] = field(default_factory=set)

    def held(self) -> frozenset[str]:
        """The parameters whose gradients the next backward leaves unreduced."""
        if self.mode == "all":
            return frozenset()
        return frozenset(name for name, level in self.levels.items() if self.mode == "none" or level <= 1)

    def deferred(self) -> frozenset[str]:
        """The parameters whose gradients the next backward sums up locally, be it to reduce the sum."""
        return self.held() | frozenset(name for name, _ in self.sums)

    def add(self, name: str, layout: Layout, grad: Tensor) -> None:
        """Adds a gradient to its sum, in place once the sum's memory is its own: two gradients may share theirs."""
        key = name, layout
        if key not in self.sums:
            self.sums[key] = grad
        elif key in self._own:
            self.sums[key].add_(grad)
        else:
            self.sums[key] = self.sums[key] + grad
            self._own.add(key)

    def take(self, names: frozenset[str]) -> dict[Key, Tensor]:
        """The sums of ``names``, which are to be reduced now."""
        taken = {key: self.sums.pop(key) for key in list(self.sums) if key[0] in names}
        self._own.difference_update(taken)
        return taken

    @contextlib.contextmanager
    def set(self, mode: str) -> Iterator[None]:
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before
