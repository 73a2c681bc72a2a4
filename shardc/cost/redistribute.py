"""The redistribution planner: the cheapest sequence of steps from one layout to another.

Each step changes where some axis parts stand (see `shardc.cost.places`) and is one collective or
one local op. `shardc.cost.search` finds the sequence by its price.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardc.cost.places import common_places, join_axes
from shardc.cost.pricing import Pricing
from shardc.cost.search import Prices, cheapest
from shardc.ir import tally
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh

LOCAL = ("shard", "to_partial")  # the kinds of step that move nothing between ranks


@dataclass(frozen=True)
class Step:
    """One change of layout: a collective over ``axes`` (in mesh order) or a local op.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute_ranks", "shard" or "to_partial".
        axes: the mesh axes or parts of axes that it acts on.
        op: the reduce op, for "reduce_scatter", "all_reduce" and "to_partial".
        src: the layout before.
        dst: the layout after.
    """

    kind: str
    axes: tuple[str, ...]
    op: str | None
    src: Layout
    dst: Layout

    @property
    def ranks(self) -> int:
        """Ranks in each group."""
        return prod(self.src.mesh.size(axis) for axis in self.axes)

    def wire_elements(self) -> int:
        """Elements that a rank receives."""
        return 0 if self.kind in LOCAL else tally.wire_elements(self.kind, self.ranks, self.src.local_numel)

    def wire_bytes(self, itemsize: int) -> int:
        """Bytes that a rank receives."""
        return self.wire_elements() * itemsize

    def seconds(self, itemsize: int, cost: Pricing) -> float:
        """Predicted seconds: of the wire for a collective, of the copy for a local op."""
        held, after = self.src.local_numel, self.dst.local_numel
        return step_seconds(self.kind, self.src.mesh, self.axes, held, after, itemsize, cost)


@lru_cache(maxsize=65536)
def steps(src: Layout, dst: Layout, itemsize: int, cost: Pricing) -> tuple[Step, ...]:
    """The cheapest steps from ``src`` to ``dst`` for elements of ``itemsize`` bytes; () where they are equal.

    Raises:
        LayoutError: different meshes or global shapes.
    """
    if src == dst:
        return ()
    places = common_places(src, dst)
    if src.numel == 0:
        return (Step("shard", (), None, src, dst),)
    prices = Prices(
        seconds=lambda kind, axes, held, after: step_seconds(kind, src.mesh, axes, held, after, itemsize, cost),
        least=lambda elements: cost.least_seconds(elements * itemsize),
    )
    out, before = [], src
    for move, after in cheapest(places, prices):
        layout = dst if after == places.target else places.layout(after)
        axes = join_axes(places.mesh, [places.parts[k] for k in move.parts])
        out.append(Step(move.kind, axes, move.op, before, layout))
        before = layout
    return tuple(out)


@lru_cache(maxsize=1 << 20)
def seconds(src: Layout, dst: Layout, itemsize: int, cost: Pricing) -> float:
    """Predicted seconds of the cheapest steps."""
    return sum(step.seconds(itemsize, cost) for step in steps(src, dst, itemsize, cost))


def wire_bytes(src: Layout, dst: Layout, itemsize: int, cost: Pricing) -> int:
    """Bytes that a rank receives in the cheapest steps."""
    return sum(step.wire_bytes(itemsize) for step in steps(src, dst, itemsize, cost))


def step_seconds(
    kind: str, mesh: Mesh, axes: tuple[str, ...], held: int, after: int, itemsize: int, cost: Pricing
) -> float:
    """Predicted seconds of one step over ``axes``, of a rank that holds so many elements before and after."""
    if kind in LOCAL:
        return cost.copy_seconds(2 * after * itemsize)
    wire = tally.wire_elements(kind, prod([mesh.size(axis) for axis in axes]), held) * itemsize
    return cost.collective_seconds(kind, mesh, axes, wire)
