"""Cost formulas: bytes and seconds per mesh axis as functions of batch, sequence, axis sizes, latencies, bandwidths.

`shardc.report.derive` derives them from a program. Each kind of collective over each group has a latency symbol, such
as ``latency_all_gather_dp``, and each group a bandwidth symbol, such as ``bandwidth_dp``. `Costs.values` returns their
numbers for a mesh and hardware, the same as `shardc.cost.hardware.price` uses. Times are before bucketing; bytes are
the same before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch

from shardc.cost.hardware import Hardware, direct_bandwidth, price, route
from shardc.errors import PlanError
from shardc.ir.mesh import Mesh

BATCH, SEQUENCE = (sympy.Symbol(name, integer=True, positive=True) for name in ("batch", "sequence"))
RATE = sympy.Symbol("flops_per_second", positive=True)
Values = dict[sympy.Symbol, Any]
DIRECT = ("all_to_all", "permute_ranks", "broadcast")  # kinds sent point to point, not around a ring


@dataclass(frozen=True)
class Moves:
    """A group of equal collectives of a step: their kind, mesh axes and number, and as a formula the bytes of the
    tensor that each moves.

    Args:
        kind: the kind, as in `shardc.report.prediction.Collective`.
        group: the axes of the group.
        cut: the axes that split the input of the collective.
        count: the number of these collectives.
        itemsize: bytes per element.
        size: global bytes of the tensor that each moves, as a formula in batch and sequence.
    """

    kind: str
    group: tuple[str, ...]
    cut: tuple[str, ...]
    count: int
    itemsize: int
    size: sympy.Expr

    @property
    def ranks(self) -> sympy.Expr:
        """Return the number of ranks in the group, as a formula."""
        return sympy.Mul(*(axis_symbol(axis) for axis in self.group))

    @property
    def wire(self) -> sympy.Expr:
        """Return the bytes that each rank sends in all ``count`` collectives together, as `shardc.ir.comm_volume`
        counts them.
        """
        local = self.size / sympy.Mul(*(axis_symbol(axis) for axis in self.cut))
        n = self.ranks
        if self.kind == "all_reduce":  # its chunks are rounded up to elements: the sum of one number over 4 ranks
            return self.count * self.itemsize * sympy.ceiling(2 * (n - 1) * local / (self.itemsize * n))
        per = {"all_gather": n - 1, "permute_ranks": sympy.Integer(1), "broadcast": sympy.Integer(1)}
        return self.count * local * per.get(self.kind, (n - 1) / n)

    @property
    def latency(self) -> sympy.Symbol:
        """Return the sympy symbol that stands for the seconds before the first byte of one collective."""
        return sympy.Symbol(f"latency_{self.kind}_{'_'.join(self.group)}", nonnegative=True)

    @property
    def bandwidth(self) -> sympy.Symbol:
        """Return the sympy symbol that stands for the bytes per second that a rank sends."""
        how = f"{self.kind}_" if self.kind in DIRECT else ""
        return sympy.Symbol(f"bandwidth_{how}{'_'.join(self.group)}", positive=True)

    @property
    def seconds(self) -> sympy.Expr:
        """Return the seconds of all ``count`` collectives: latency plus bytes over bandwidth."""
        return self.count * self.latency + self.wire / self.bandwidth

    def machine(self, mesh: Mesh, hardware: Hardware) -> Values:
        """Return the values of the symbols for latency and bandwidth on ``hardware``: symbol -> number."""
        where = route(mesh, self.group, hardware.node)
        ring = where.ring_bandwidth(hardware)
        return {
            self.latency: price(hardware, self.kind, where, 0).seconds,
            self.bandwidth: direct_bandwidth(hardware, self.kind, where) if self.kind in DIRECT else ring,
        }


def axis_symbol(axis: str) -> sympy.Symbol:
    """Return the symbol of the size of ``axis``."""
    return sympy.Symbol(axis, integer=True, positive=True)


def unrounded(formula: sympy.Expr) -> sympy.Expr:
    """Return ``formula`` with each ``ceiling(x)`` replaced by ``x``."""
    return formula.replace(sympy.ceiling, lambda x: x)


@dataclass(frozen=True)
class Cost:
    """Formulas of the cost of the collectives over one group, per rank and training step.

    Args:
        axis: the axes of the group, joined by commas.
        moves: its collectives, equal ones grouped.
    """

    axis: str
    moves: tuple[Moves, ...]

    @cached_property
    def count(self) -> int:
        """Return the number of collectives over the group in a step."""
        return sum(move.count for move in self.moves)

    @cached_property
    def wire(self) -> sympy.Expr:
        """Return the formula of the bytes that each rank sends. Reductions of uneven sizes are rounded up to whole
        elements.
        """
        return sympy.Add(*(move.wire for move in self.moves))

    @cached_property
    def smooth(self) -> sympy.Expr:
        """Return the formula `wire` without rounding up, as a single fraction."""
        return sympy.factor(unrounded(self.wire))

    @cached_property
    def seconds(self) -> sympy.Expr:
        """Return the seconds on the wire, whether or not compute hides them."""
        return sympy.Add(*(move.seconds for move in self.moves))


@dataclass(frozen=True)
class Crossover:
    """The batch sizes at which two meshes are equally fast, and which mesh is faster below, between and above them.

    Args:
        at: the batch sizes, ascending; empty if one mesh is never slower.
        faster: the faster mesh below the first of ``at``, between any two neighbours, and above the last.
    """

    at: tuple[float, ...]
    faster: tuple[str, ...]

    def __str__(self) -> str:
        if not self.at:
            return f"{self.faster[0]} is faster at every batch"
        parts = [f"{self.faster[0]} is faster below batch {self.at[0]:.4g}"]
        between = zip(self.at, self.at[1:], self.faster[1:], strict=False)
        parts += [f"{mesh} from {low:.4g} to {high:.4g}" for low, high, mesh in between]
        return ", ".join([*parts, f"{self.faster[-1]} above {self.at[-1]:.4g}"])


@dataclass(frozen=True)
class Costs:
    """The cost formulas of one program: of the collectives of each group, and of its dense operations.

    Args:
        mesh: the mesh that the program is compiled for.
        hardware: the default of `values`.
        batch, sequence: sizes that the program is compiled for (sequence is 1 if no input has one).
        moves: its collectives, equal ones grouped.
        flops: operations of the dense ops of the unsharded model, as a formula in batch and sequence.
        dtype: dtype of most of these operations.
    """

    mesh: Mesh
    hardware: Hardware
    batch: int
    sequence: int
    moves: tuple[Moves, ...]
    flops: sympy.Expr
    dtype: torch.dtype

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the groups of the collectives, each as the names of its mesh axes joined by commas (``"dp,tp"``)."""
        return tuple(dict.fromkeys(",".join(move.group) for move in self.moves))

    def cost(self, axis: str) -> Cost:
        """Return the cost of the collectives over the group ``axis`` (several axes joined by commas).

        Raises:
            PlanError: nothing moves over it.
        """
        moves = tuple(move for move in self.moves if ",".join(move.group) == axis)
        if not moves:
            raise PlanError(f"nothing moves over {axis!r}", fix=f"use one of {', '.join(self.axes) or 'no axis'}")
        return Cost(axis, moves)

    @cached_property
    def compute_seconds(self) -> sympy.Expr:
        """Return the formula of the seconds of dense operations: divided among all ranks, at the rate that matrix
        products reach.
        """
        return self.flops / (sympy.Mul(*(axis_symbol(axis) for axis in self.mesh.axes)) * RATE)

    @cached_property
    def seconds(self) -> sympy.Expr:
        """Return the seconds of dense operations and all collectives without overlap: an upper bound."""
        return self.compute_seconds + sympy.Add(*(move.seconds for move in self.moves))

    def values(self, mesh: Mesh | None = None, hardware: Hardware | None = None, **sizes: int) -> Values:
        """Return the value of every symbol in the formulas: symbol -> number. ``mesh`` gives the axis sizes,
        ``hardware`` the latencies and bandwidths.

        >>> from shardc.ir.mesh import Mesh
        >>> import shardc, torch
        >>> module = shardc.compile(torch.nn.Linear(8, 4, bias=False), Mesh(dp=2), shardc.ddp("dp"))
        >>> costs = module.lower(torch.empty(4, 8)).costs()
        >>> costs.cost("dp").smooth, costs.cost("dp").wire.subs(costs.values(Mesh(dp=4)))
        (256*(dp - 1)/dp, 192)
        """
        mesh, hardware = mesh or self.mesh, hardware or self.hardware
        out: Values = {axis_symbol(axis): mesh.size(axis) for axis in mesh.axes}
        out |= {BATCH: sizes.get("batch", self.batch), SEQUENCE: sizes.get("sequence", self.sequence)}
        out[RATE] = hardware.rate(self.dtype)
        for move in self.moves:
            out |= move.machine(mesh, hardware)
        return out

    def crossover(self, one: Mesh, other: Mesh, **sizes: int) -> Crossover:
        """Return the batch sizes at which mesh ``one`` and mesh ``other`` are equally fast, and which is faster in
        between. Overlap is not counted.

        Args:
            sizes: ``sequence``, by default the program's.
        """
        whole = unrounded(self.seconds)
        steps = [whole.subs({**self.values(m, None, **sizes), BATCH: BATCH}) for m in (one, other)]
        gap = sympy.Poly(sympy.expand(steps[0] - steps[1]), BATCH)
        roots = () if gap.is_zero or gap.is_ground else sympy.nroots(gap, n=15)
        at = sorted(float(sympy.re(r)) for r in roots if abs(sympy.im(r)) < 1e-9 and sympy.re(r) > 0)
        edges = [0.0, *at, 2 * at[-1] if at else 1.0]
        middles = [(low + high) / 2 for low, high in zip(edges, edges[1:], strict=False)]
        faster = tuple(str(one if gap.eval(middle) < 0 else other) for middle in middles)
        return Crossover(tuple(at), faster)
