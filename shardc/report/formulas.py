"""Costs as formulas: bytes and seconds of each mesh axis in batch, sequence, axis sizes, latencies and bandwidths.

`shardc.report.derive` makes them of a program, and says how. Each kind of collective over each group has a symbol for
its latency, ``latency_all_gather_dp``, and each group one for its bandwidth, ``bandwidth_dp``; `Costs.values` has their
numbers on a mesh and hardware, as `shardc.cost.hardware.price` has them. Times are those of the program before its
collectives are bucketed; bytes hold for both.
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
DIRECT = ("all_to_all", "permute_ranks", "broadcast")  # kinds that go straight to their receivers, not round a ring


@dataclass(frozen=True)
class Moves:
    """Collectives of one kind over one group, of tensors that the same axes cut.

    Args:
        kind, group: as in `shardc.report.prediction.Collective`; the axes of the group.
        cut: the axes that cut the tensor that a rank hands in.
        count: of them.
        itemsize: bytes of an element.
        size: bytes of the tensor that each moves, all ranks' parts together, in batch and sequence.
    """

    kind: str
    group: tuple[str, ...]
    cut: tuple[str, ...]
    count: int
    itemsize: int
    size: sympy.Expr

    @property
    def ranks(self) -> sympy.Expr:
        return sympy.Mul(*(axis_symbol(axis) for axis in self.group))

    @property
    def wire(self) -> sympy.Expr:
        """Bytes that each rank sends, as `shardc.ir.tally` counts them."""
        held = self.size / sympy.Mul(*(axis_symbol(axis) for axis in self.cut))
        n = self.ranks
        if self.kind == "all_reduce":  # alone its parts need not be whole elements: the sum of one number over 4 ranks
            return self.count * self.itemsize * sympy.ceiling(2 * (n - 1) * held / (self.itemsize * n))
        per = {"all_gather": n - 1, "permute_ranks": sympy.Integer(1), "broadcast": sympy.Integer(1)}
        return self.count * held * per.get(self.kind, (n - 1) / n)

    @property
    def latency(self) -> sympy.Symbol:
        """Seconds of one before its first byte."""
        return sympy.Symbol(f"latency_{self.kind}_{'_'.join(self.group)}", nonnegative=True)

    @property
    def bandwidth(self) -> sympy.Symbol:
        """Bytes per second that a rank sends."""
        how = f"{self.kind}_" if self.kind in DIRECT else ""
        return sympy.Symbol(f"bandwidth_{how}{'_'.join(self.group)}", positive=True)

    @property
    def seconds(self) -> sympy.Expr:
        """Latency, then bytes over bandwidth."""
        return self.count * self.latency + self.wire / self.bandwidth

    def machine(self, mesh: Mesh, hardware: Hardware) -> Values:
        """Numbers for latency and bandwidth, those of `shardc.cost.hardware.price`."""
        where = route(mesh, self.group, hardware.node)
        ring = where.ring_bandwidth(hardware)
        return {
            self.latency: price(hardware, self.kind, where, 0).seconds,
            self.bandwidth: direct_bandwidth(hardware, self.kind, where) if self.kind in DIRECT else ring,
        }


def axis_symbol(axis: str) -> sympy.Symbol:
    return sympy.Symbol(axis, integer=True, positive=True)


def unrounded(formula: sympy.Expr) -> sympy.Expr:
    return formula.replace(sympy.ceiling, lambda x: x)


@dataclass(frozen=True)
class Cost:
    """What the collectives over one group cost a rank in a training step.

    Args:
        axis: the axes of the group, joined by commas.
        moves: its collectives, alike ones together.
    """

    axis: str
    moves: tuple[Moves, ...]

    @cached_property
    def count(self) -> int:
        return sum(each.count for each in self.moves)

    @cached_property
    def wire(self) -> sympy.Expr:
        """Bytes that each rank sends; of a reduction, its parts rounded up to whole elements."""
        return sympy.Add(*(each.wire for each in self.moves))

    @cached_property
    def smooth(self) -> sympy.Expr:
        """``wire`` without the rounding, as one fraction."""
        return sympy.factor(unrounded(self.wire))

    @cached_property
    def seconds(self) -> sympy.Expr:
        """Seconds on the wire, hidden or not."""
        return sympy.Add(*(each.seconds for each in self.moves))


@dataclass(frozen=True)
class Crossover:
    """Where two meshes take equally long.

    Args:
        at: the batches, ascending; none where one mesh is never slower.
        faster: the mesh that is faster below the first of ``at``, between each two, and above the last.
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
    """The formulas of one program.

    Args:
        mesh: that it was made on.
        hardware: that `values` takes its numbers from by default.
        batch, sequence: at which it was made (sequence is 1 where no input has one).
        moves: collectives, alike ones together.
        flops: operations of the whole model's dense ops, in batch and sequence.
        dtype: of most of them.
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
        """The groups over which something moves."""
        return tuple(dict.fromkeys(",".join(each.group) for each in self.moves))

    def cost(self, axis: str) -> Cost:
        """Of the collectives over ``axis`` (axes joined by commas for a group over several).

        Raises:
            PlanError: nothing moves over it.
        """
        found = tuple(each for each in self.moves if ",".join(each.group) == axis)
        if not found:
            raise PlanError(f"nothing moves over {axis!r}", fix=f"use one of {', '.join(self.axes) or 'no axis'}")
        return Cost(axis, found)

    @cached_property
    def compute_seconds(self) -> sympy.Expr:
        """The dense operations shared out to all ranks at the rate that matrix products reach."""
        return self.flops / (sympy.Mul(*(axis_symbol(axis) for axis in self.mesh.axes)) * RATE)

    @cached_property
    def seconds(self) -> sympy.Expr:
        """A step in which nothing hides: dense operations, then all collectives. An upper bound but for small ops."""
        return self.compute_seconds + sympy.Add(*(each.seconds for each in self.moves))

    def values(self, mesh: Mesh | None = None, hardware: Hardware | None = None, **sizes: int) -> Values:
        """Numbers for every symbol: of ``mesh`` on ``hardware``, and ``batch`` and ``sequence`` where given.

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
        out[RATE] = hardware.peak(self.dtype) * hardware.matmul
        for each in self.moves:
            out |= each.machine(mesh, hardware)
        return out

    def crossover(self, one: Mesh, other: Mesh, **sizes: int) -> Crossover:
        """From which batch on ``one`` or ``other`` is faster for a step in which nothing hides.

        Args:
            sizes: ``sequence``, by default the program's.
        """
        whole = unrounded(self.seconds)
        steps = [whole.subs({**self.values(mesh, None, **sizes), BATCH: BATCH}) for mesh in (one, other)]
        gap = sympy.Poly(sympy.expand(steps[0] - steps[1]), BATCH)
        roots = () if gap.is_zero or gap.is_ground else sympy.nroots(gap, n=15)
        at = sorted(float(sympy.re(r)) for r in roots if abs(sympy.im(r)) < 1e-9 and sympy.re(r) > 0)
        edges = [0.0, *at, 2 * at[-1] if at else 1.0]
        middles = [(low + high) / 2 for low, high in zip(edges, edges[1:], strict=False)]
        faster = tuple(str(one if gap.eval(middle) < 0 else other) for middle in middles)
        return Crossover(tuple(at), faster)
