"""`Tiles`: the ranks that store each part of a tensor, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from shardc.ir.layout import Layout
from shardc.report.page import figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 8  # most ranks listed in a tile; of a larger group the first three and the last are listed


@dataclass(frozen=True)
class Stretch:
    """A range of indices along a dim, ``start`` to ``stop`` (exclusive), and the ranks that store all of it."""

    start: int
    stop: int
    ranks: frozenset[int]

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True)
class Tiles:
    """The parts (tiles) into which a layout splits one tensor, and the ranks that store each, for a table or picture.

    Two dims are shown: those that are split, or else the last ones. If further dims are split, a tile lists all ranks
    that store some of it.

    Args:
        name: name of the tensor.
        layout: its layout on the mesh.
    """

    name: str
    layout: Layout

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Return the dims of the tensor that the picture shows: at most two, split dims before others, in ascending
        order.
        """
        split = [dim for dim in range(self.layout.ndim) if self.layout.dim_axes(dim)]
        rest = [dim for dim in reversed(range(self.layout.ndim)) if dim not in split]
        return tuple(sorted([*split, *rest][:2]))

    def stretches(self, dim: int) -> list[Stretch]:
        """Return ``dim`` as consecutive ranges of indices. All indices of a range are stored by the same ranks."""
        owners: list[list[int]] = [[] for _ in range(self.layout.shape[dim])]
        for rank in range(self.layout.mesh.ranks):
            for at in self.layout.local_index(dim, rank):
                owners[at].append(rank)
        stretches, start = [], 0
        for ranks, indices in groupby(owners):
            stop = start + sum(1 for _ in indices)
            stretches.append(Stretch(start, stop, frozenset(ranks)))
            start = stop
        return stretches

    @cached_property
    def grid(self) -> tuple[list[Stretch], list[Stretch]]:
        """Return how a table of the tensor is divided: (ranges of indices of its rows, ranges of its columns). A tensor
        with one dim has one row.
        """
        whole = [Stretch(0, 1, frozenset(range(self.layout.mesh.ranks)))]
        cut = [self.stretches(dim) for dim in self.dims]
        return cut[0] if len(cut) == 2 else whole, cut[-1] if cut else whole

    @property
    def title(self) -> str:
        """Return name, layout and mesh as text."""
        return f"{self.name} {self.layout} on mesh {self.layout.mesh}"

    def __str__(self) -> str:
        rows, columns = self.grid
        cells = [[_ranks(sorted(row.ranks & column.ranks)) for column in columns] for row in rows]
        header = [*map(str, columns)] if self.dims else []
        if len(self.dims) == 2:
            header = [f"dim {self.dims[0]} \\ {self.dims[1]}", *header]
            cells = [[str(row), *line] for row, line in zip(rows, cells, strict=True)]
        table = tabulate(cells, header, "grid", disable_numparse=True)
        return f"{self.title}; ranks that hold each part\n{table}"

    def figure(self) -> Figure:
        """Return the picture as a matplotlib figure, with one colour per group of ranks."""
        from matplotlib import colormaps
        from matplotlib.patches import Rectangle

        rows, columns = self.grid
        title = self.title.replace(" on mesh ", "\non mesh ")
        # Wide enough for the title: a letter takes a fifteenth of an inch.
        wide = max(4, min(12, 1.2 * len(columns)), 0.8 + max(map(len, title.split("\n"))) / 15)
        drawn = figure(wide, max(2.4, min(9, 0.6 * len(rows) + 1.4)))
        axes = drawn.subplots()
        groups: dict[frozenset[int], tuple[float, ...]] = {}
        colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
        for row in rows:
            for column in columns:
                ranks = row.ranks & column.ranks
                colour = groups.setdefault(ranks, colours[(2 * len(groups) + 1) % 20])
                size = column.stop - column.start, row.stop - row.start
                axes.add_patch(Rectangle((column.start, row.start), *size, facecolor=colour, edgecolor="white"))
                middle = column.start + size[0] / 2, row.start + size[1] / 2
                axes.text(*middle, _ranks(sorted(ranks)), ha="center", va="center", fontsize=8)
        axes.set(xlim=(0, columns[-1].stop), ylim=(rows[-1].stop, 0))
        axes.set_xticks([0, *(column.stop for column in columns)])
        axes.set_yticks([0, *(row.stop for row in rows)] if len(self.dims) == 2 else [])
        if self.dims:
            axes.set_xlabel(f"dim {self.dims[-1]}")
        if len(self.dims) == 2:
            axes.set_ylabel(f"dim {self.dims[0]}")
        axes.set_title(title, fontsize=9)
        return drawn

    def save(self, path: str | Path) -> None:
        """Write the picture to ``path``, whose suffix selects the format (png, svg, pdf).

        Raises:
            InputError: matplotlib is not installed, or does not support the suffix.
        """
        save(self.figure(), path)


def _ranks(ranks: Sequence[int]) -> str:
    """Return rank numbers as text; if there are more than `SHOWN`, the first three, the last, and how many
    there are.
    """
    if not ranks:
        return "none"
    if len(ranks) <= SHOWN:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))}, ... {ranks[-1]} ({len(ranks)} ranks)"
