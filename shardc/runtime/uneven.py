"""Converts inputs of ranks to global inputs: batches with different numbers of rows on each rank are gathered, and
row numbers made global.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardc.errors import InputError
from shardc.ir.layout import Layout
from shardc.runtime.groups import Groups
from shardc.runtime.shards import bytes_of, flat_index
from shardc.runtime.storage import local_indices

Axes = tuple[str, ...]


def row_axes(tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> tuple[Axes, ...]:
    """Returns, per input, the mesh axes that split its rows (dim 0) into contiguous blocks; () if no axis does.

    A layout writes a row's index in digits, slowest first, each split by a mesh axis or local (axis None). Blocks are
    contiguous if at most the last digit is local.
    """
    return tuple(
        layout.dim_axes(0)
        if x.dim() and not isinstance(x, DTensor) and all(digit.axis for digit in layout.dims[0][:-1])
        else ()
        for x, layout in zip(tensors, layouts, strict=True)
    )


@dataclass(frozen=True)
class Rows:
    """Row counts of one call: how many rows of each input each rank of the mesh passes.

    Args:
        names: names of the inputs.
        axes: per input, the axes that split its rows.
        counts: by mesh rank, the rows of each input; 0 if its rows are not split.
    """

    names: tuple[str, ...]
    axes: tuple[Axes, ...]
    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def exchanged(
        cls, names: Sequence[str], tensors: Sequence[Tensor], axes: Sequence[Axes], groups: Groups, device: torch.device
    ) -> Rows:
        """Exchanges row counts between ranks by a collective, for a call with batches of different sizes. Returns
        them as `Rows`; ``axes`` has, per tensor, the axes that split its rows.
        """
        counts = torch.tensor([x.shape[0] if over else 0 for x, over in zip(tensors, axes, strict=True)], device=device)
        # One line of counts per rank of the mesh.
        table = torch.stack(gather(counts, groups, groups.mesh.axes)).tolist()
        return cls(tuple(names), tuple(axes), tuple(map(tuple, table)))

    @property
    def even(self) -> bool:
        """Whether every rank passes the same number of rows of each input."""
        return len(set(self.counts)) == 1

    def blocks(self, at: int, groups: Groups) -> list[int]:
        """Returns the number of rows in each block of input ``at``. A block is what ranks with the same index along
        the input's row axes pass; the blocks are in the order of that index.

        Raises InputError if ranks that should pass the same rows pass different numbers.
        """
        blocks: dict[int, tuple[int, int]] = {}  # index of a block -> its first rank, and that rank's count
        for rank, counts in enumerate(self.counts):
            first, count = blocks.setdefault(flat_index(groups.mesh, self.axes[at], rank), (rank, counts[at]))
            if count != counts[at]:  # replicas of a block must have the same
                first_rank, this_rank = groups.everyone()[first], groups.everyone()[rank]
                raise InputError(
                    f"rank {first_rank} passes input {self.names[at]!r} of {count} rows, "
                    f"rank {this_rank} of {counts[at]}; both hold the same rows, "
                    f"as it is split over {', '.join(self.axes[at])} only",
                    fix="pass the same rows on ranks that differ along other axes",
                )
        return [blocks[index][1] for index in range(len(blocks))]

    def totals(self, shapes: Sequence[tuple[int, ...]], groups: Groups) -> list[tuple[int, ...]]:
        """Returns the global shapes of the inputs for the row counts that the ranks really pass. ``shapes`` are the
        global shapes computed as if every rank passed as many rows as this rank.
        """
        return [
            (sum(self.blocks(at, groups)), *shape[1:]) if over else shape
            for at, (over, shape) in enumerate(zip(self.axes, shapes, strict=True))
        ]

    def local(self, at: int, x: Tensor, layout: Layout, groups: Groups) -> Tensor:
        """Gathers input ``at`` from ranks that pass different numbers of rows, and returns this rank's shard of the
        whole under ``layout``. Raises InputError if ``x``, this rank's rows, requires a gradient.
        """
        if x.requires_grad:
            raise InputError(
                f"input {self.names[at]!r} needs a gradient, and ranks pass different numbers of its rows",
                fix="pass as many rows on every rank, or detach it",
            )
        counts, axes = self.blocks(at, groups), self.axes[at]
        width = prod(x.shape[1:]) * x.element_size()  # bytes of a row
        # An all-gather takes equal sizes: shorter blocks are padded, and cut below.
        sent = torch.zeros(max(counts) * width, dtype=torch.uint8, device=x.device)
        sent[: x.shape[0] * width] = bytes_of(x)
        # Groups are named by axes in mesh order; blocks are numbered in the order of the layout's axes.
        ordered = sorted(axes, key=groups.mesh.order)
        parts = gather(sent, groups, tuple(ordered))
        members = [groups.everyone().index(rank) for rank in groups.ranks(axes)]
        by_block = {flat_index(groups.mesh, axes, rank): part for rank, part in zip(members, parts, strict=True)}
        whole = torch.cat([by_block[block][: count * width] for block, count in enumerate(counts)])
        # As the program splits the rows of all ranks: evenly.
        index = local_indices(layout, layout.shape, 0, groups.rank)
        return whole.view(x.dtype).view(-1, *x.shape[1:])[index[0] : index[-1] + 1].contiguous()


def gather(x: Tensor, groups: Groups, axes: Axes, what: str = "exchange of rows") -> list[Tensor]:
    """All-gathers ``x`` along mesh ``axes``. Returns one tensor per rank of the group, in group order; errors call
    the exchange ``what``.
    """
    group = groups.group(axes)
    out = [torch.empty_like(x) for _ in range(group.size())]
    with groups.consistency.communicates(what):
        dist.all_gather(out, x, group=group)
    return out


def global_rows(
    inputs: Sequence[tuple[str, Layout]],
    tensors: Sequence[Tensor],
    numbered: Mapping[int, int],
    rows: Rows | None,
    groups: Groups,
) -> list[Tensor]:
    """Returns ``tensors`` with row numbers made global: to an input that numbers rows of another input, counted in this
    rank's shard, the number of rows in the shards before is added.

    Numbers outside the rank's rows become numbers outside the global rows, so that lookups refuse them. In a vector,
    the number of rows itself is allowed, as an end offset.

    Args:
        inputs: (name, layout) of each input of the program.
        tensors: the inputs as this rank passes them.
        numbered: position of an input with row numbers -> position of the input that they index.
        rows: row counts, if ranks pass different numbers of rows.

    Returns:
        The inputs, converted.

    Raises:
        InputError: row numbers are in a small dtype, or in a DTensor (whose values are global already).
    """
    out = list(tensors)
    for at, indexed in numbered.items():
        x, name, (other, layout) = tensors[at], inputs[at][0], inputs[indexed]
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            continue  # these values number nothing
        if isinstance(x, DTensor) or x.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"input {name!r} is {'a DTensor' if isinstance(x, DTensor) else f'of {x.dtype}'}, and by the plan "
                f"(per_rank) it numbers each rank's own rows of {other!r}",
                fix="pass a plain tensor of int64",
            )
        if rows is not None and rows.axes[indexed]:
            blocks = rows.blocks(indexed, groups)
            block = flat_index(groups.mesh, rows.axes[indexed], groups.rank)
            start, count, total = sum(blocks[:block]), blocks[block], sum(blocks)
        else:
            row_range = local_indices(layout, layout.shape, 0, groups.rank)
            if not isinstance(row_range, range):
                raise InputError(
                    f"input {name!r} numbers rows of {other!r}, of which a rank's are not in a row: {layout}",
                    fix="write relative_to=None, and pass global row numbers",
                )
            start, count, total = row_range.start, len(row_range), layout.shape[0]
        # A rank that has all rows counts them globally already. Else negative numbers stay, those of own rows are
        # shifted, and larger ones get beyond the last global row.
        if total > count:
            end = count + (x.dim() == 1)  # a vector may have `count` itself, as an end offset
            out[at] = torch.where(x < 0, x, torch.where(x < end, x + start, x + total))
    return out


def refuse_own(names: Sequence[str], numbered: Mapping[int, int]) -> None:
    """Raises InputError for the first input in ``numbered``: it numbers each rank's own rows, so it cannot be cut
    from a global input.

    Args:
        names: names of the inputs.
        numbered: position of such an input -> position of the input whose rows it numbers.
    """
    for at in numbered:
        raise InputError(
            f"input {names[at]!r} is each rank's own by the plan (per_rank), and no part of a global one",
            fix="pass each rank's own inputs to the module",
        )
