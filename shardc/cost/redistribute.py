"""Plans redistributions: the cheapest sequence of collectives and local ops from one layout to another.

Each step is one collective or local op, and changes the location of some axis parts (`shardc.cost.places`);
`shardc.cost.redistribution_search` finds the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardc.cost.model import Pricing
from shardc.cost.places import common_places, join_axes
from shardc.cost.redistribution_search import Prices, cheapest
from shardc.ir import comm_volume
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh

LOCAL = ("shard", "to_partial")  # kinds of step without communication


@dataclass(frozen=True)
class Step:
    """One redistribution step: a collective over ``axes`` (in mesh order), or a local op.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute_ranks", "shard" or "to_partial".
        axes: the mesh axes, or parts of axes, that it acts on.
        op: the reduce op, for "reduce_scatter", "all_reduce" and "to_partial".
        src, dst: the layouts before and after.
    """

    kind: str
    axes: tuple[str, ...]
    op: str | None
    src: Layout
    dst: Layout

    @property
    def ranks(self) -> int:
        """Number of ranks in each process group of the step."""
        return prod(self.src.mesh.size(axis) for axis in self.axes)

    def wire_elements(self) -> int:
        return 0 if self.kind in LOCAL else comm_volume.wire_elements(self.kind, self.ranks, self.src.local_numel)

    def wire_bytes(self, itemsize: int) -> int:
        return self.wire_elements() * itemsize

    def seconds(self, itemsize: int, cost: Pricing) -> float:
        """Return the predicted seconds of the collective, or of the local copy."""
        before, after = self.src.local_numel, self.dst.local_numel
        return step_seconds(self.kind, self.src.mesh, self.axes, before, after, itemsize, cost)


@lru_cache(maxsize=65536)
def steps(src: Layout, dst: Layout, itemsize: int, cost: Pricing) -> tuple[Step, ...]:
    """Return the cheapest steps from ``src`` to ``dst``, () if equal; LayoutError if meshes or global shapes differ."""
    if src == dst:
        return ()
    places = common_places(src, dst)
    if src.numel == 0:
        return (Step("shard", (), None, src, dst),)
    prices = Prices(
        seconds=lambda kind, axes, n, after: step_seconds(kind, src.mesh, axes, n, after, itemsize, cost),
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
    """Return the predicted seconds of the cheapest steps from ``src`` to ``dst``."""
    return sum(step.seconds(itemsize, cost) for step in steps(src, dst, itemsize, cost))


def wire_bytes(src: Layout, dst: Layout, itemsize: int, cost: Pricing) -> int:
    """Return the bytes that a rank receives in the cheapest steps from ``src`` to ``dst``."""
    return sum(step.wire_bytes(itemsize) for step in steps(src, dst, itemsize, cost))


def step_seconds(
    kind: str, mesh: Mesh, axes: tuple[str, ...], before: int, after: int, itemsize: int, cost: Pricing
) -> float:
    """Return the predicted seconds of one step; a rank has ``before`` and ``after`` local elements."""
    if kind in LOCAL:
        return cost.copy_seconds(2 * after * itemsize)
    wire = comm_volume.wire_elements(kind, prod([mesh.size(axis) for axis in axes]), before) * itemsize
    return cost.collective_seconds(kind, mesh, axes, wire)
