"""Derives formulas of a program's communication costs in batch, sequence and mesh axis sizes, and verifies them.

No symbolic tracing is used. How costs depend on axis sizes follows from the program: the ranks of each group, the axes
that split the tensor that moves, and the wire bytes of each kind of collective. How tensor sizes depend on batch and
sequence is fitted: they are polynomials of degree 1 in the batch and 2 in the sequence, whose coefficients are solved
exactly (in rationals) from captures at 2 batches and 3 sequence lengths.

The formulas are then compared with captures that were not used for the fit: at another batch and sequence, and with
another size of each mesh axis. If one differs, an error is raised. A formula holds while sizes divide over the axes and
the compiler chooses the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import sympy
from torch import fx

from shardc.cost.compute import model_flops
from shardc.cost.hardware import Hardware
from shardc.errors import PlanError, ShardcError
from shardc.ir import comm_volume
from shardc.ir import graph as ir
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.report.formulas import BATCH, SEQUENCE, Costs, Moves
from shardc.report.predicted_schedule import Schedule

DEGREES = {BATCH: 1, SEQUENCE: 2}
Dims = Mapping[str, Sequence[str | None]]  # input -> for each of its dims "batch", "sequence" or None


class NoFormula(PlanError):
    """No formula holds for the program, for ``reason``."""

    def __init__(self, reason: str, **rest: str | None) -> None:
        super().__init__(f"no formula: {reason}", **rest)
        self.reason = reason


class Recompilable(Protocol):
    """A program that can be compiled again for another mesh and other input shapes."""

    mesh: Mesh
    inputs: tuple[tuple[str, Layout], ...]
    microbatches: int

    def graph(self, stage: str) -> fx.Graph: ...

    def whole(self, stage: str) -> fx.Graph: ...

    def schedule(self, hardware: Hardware, *, stage: str) -> Schedule: ...

    rebuild: Any  # maps (mesh, shapes of the inputs) to the program compiled for these


# Per collective: name and phase, kind, group, the axes that split its input, bytes per element.
Form = tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], int], ...]


@dataclass(frozen=True)
class _Sample:
    """The collectives, bytes, operations and schedule of the program compiled for one mesh, batch and sequence.

    Args:
        form: the collectives, without sizes.
        sizes: global bytes of the tensor that each collective moves.
        flops: operations of dense ops, on all ranks together.
        schedule: the predicted schedule before bucketing.
    """

    form: Form
    sizes: tuple[int, ...]
    flops: int
    schedule: Schedule


def derive(program: Recompilable, hardware: Hardware, dims: Dims | None = None) -> Costs:
    """Derive the cost formulas of a program: bytes and seconds in batch, sequence and mesh axis sizes. Return them as
    `Costs`.

    Args:
        program: the compiled program.
        hardware: the default of `Costs.values`; the formulas' times are verified against its numbers.
        dims: for each input the symbol of each dim, "batch", "sequence" or None. By default dim 0 of every input is
            the batch, and dim 1 of inputs of integers (tokens) the sequence.

    Raises:
        PlanError: a formula fails at a size that it was not fitted to, or the program has no such formula.
    """
    if program.rebuild is None:
        raise NoFormula("a loaded program cannot be compiled again", fix="compile the model")
    if program.microbatches > 1:
        raise NoFormula(
            "a step in microbatches gathers and reduces more often than formulas count",
            plan_entry=f"microbatches({program.microbatches})",
            fix="leave microbatches out of the plan, or take program.schedule() for numbers",
        )
    symbols_of = _symbols_of_inputs(program, dims)
    base = {symbol: _size(program, symbols_of, symbol) for symbol in (BATCH, SEQUENCE)}  # None: no dim has it
    has = {symbol: size is not None for symbol, size in base.items()}
    batch, sequence = base[BATCH] or 1, base[SEQUENCE] or 1
    # A number is a polynomial in batch and sequence: as many samples as it has terms give its factors.
    degrees = [DEGREES[symbol] if has[symbol] else 0 for symbol in (BATCH, SEQUENCE)]
    powers = list(product(range(degrees[0] + 1), range(degrees[1] + 1)))
    points = [(batch * (1 + i), sequence * (1 + j)) for i, j in powers]

    def sample(mesh: Mesh, at: tuple[int, int]) -> _Sample:
        """Compile the program for ``mesh`` and the sizes ``at`` (batch, sequence). Return its collectives, sizes, FLOPs
        and schedule as a `_Sample`.
        """
        if mesh == program.mesh and at == (batch, sequence):
            return _sample(program, hardware)
        numbers = {"batch": at[0], "sequence": at[1]}
        shapes = [
            [numbers.get(str(symbol), size) for symbol, size in zip(symbols_of[name], layout.shape, strict=True)]
            for name, layout in program.inputs
        ]
        try:
            return _sample(program.rebuild(mesh, shapes), hardware)
        except ShardcError as error:
            raise NoFormula(f"{mesh} at {_point_text(at, has)} fails: {error.what}", fix=error.fix) from error

    samples = [sample(program.mesh, at) for at in points]
    first = samples[0]
    for point, other in zip(points, samples, strict=True):
        _check_same_form(first, other, f"{program.mesh} at {_point_text(point, has)}")
    solve = sympy.Matrix([[b**i * s**j for i, j in powers] for b, s in points]).inv()

    def fitted(values: Sequence[int]) -> sympy.Expr:
        """Return the polynomial in batch and sequence that equals ``values`` at the sampled sizes."""
        factors = solve * sympy.Matrix(values)
        return sympy.Add(*(c * BATCH**i * SEQUENCE**j for c, (i, j) in zip(factors, powers, strict=True)))

    # Equal collectives, as of repeated layers -> how many there are.
    counts: dict[tuple[str, tuple[str, ...], tuple[str, ...], int, tuple[int, ...]], int] = {}
    for row, (_, kind, group, cut, itemsize) in enumerate(first.form):
        key = kind, group, cut, itemsize, tuple(x.sizes[row] for x in samples)
        counts[key] = counts.get(key, 0) + 1
    moves = tuple(
        Moves(kind, group, cut, count, itemsize, fitted(sizes))
        for (kind, group, cut, itemsize, sizes), count in counts.items()
    )
    costs = Costs(
        program.mesh, hardware, batch, sequence, moves, fitted([s.flops for s in samples]), first.schedule.dtype
    )
    # The formulas are checked at sizes, and then at sizes of axes, that they are not fitted to.
    validation_point = (batch * (3 if has[BATCH] else 1), sequence * (4 if has[SEQUENCE] else 1))
    validation = sample(program.mesh, validation_point)
    _check_same_form(first, validation, f"{program.mesh} at {_point_text(validation_point, has)}")
    verify(costs, validation.schedule, validation_point)
    for axis in program.mesh.axes:
        _verify_axis(costs, axis, first, sample)
    return costs


def verify(costs: Costs, schedule: Schedule, at: tuple[int, int]) -> None:
    """Compare the formulas ``costs`` with the schedule of a capture at ``at`` (batch, sequence), before bucketing.

    Raises:
        PlanError: a number differs.
    """
    values = costs.values(schedule.mesh, schedule.hardware, batch=at[0], sequence=at[1])
    where = f"{schedule.mesh} at batch {at[0]}, sequence {at[1]}"
    totals = schedule.totals("axis")
    for axis in dict.fromkeys([*costs.axes, *totals]):
        total = totals.get(axis)
        cost = costs.cost(axis) if axis in costs.axes else None
        wire, seconds = (int(cost.wire.subs(values)), float(cost.seconds.subs(values))) if cost else (0, 0.0)
        real = (total.wire, total.seconds) if total else (0, 0.0)
        if wire != real[0] or abs(seconds - real[1]) > 1e-9 * max(real[1], 1e-30):
            raise NoFormula(
                f"over {axis} it says {wire} bytes and {seconds:.9g} s for {where}, a capture there has "
                f"{real[0]} and {real[1]:.9g}",
                fix="use sizes that the axes divide, or name the dims of the inputs",
            )


def _verify_axis(costs: Costs, axis: str, first: _Sample, sample: Callable[[Mesh, tuple[int, int]], _Sample]) -> None:
    """Check the formulas against a capture with another size of ``axis``. Of a few sizes, the first is used at which
    the program has the same collectives.

    Args:
        first: the sample of the program itself.
        sample: maps (mesh, (batch, sequence)) to the sample there.

    Raises:
        PlanError: a number differs, or the program has other collectives at every size that is tried.
    """
    size = costs.mesh.size(axis)
    if size == 1:
        return
    others = [size // 2] * (size > 2 and size % 2 == 0) + [2 * size, 3 * size]
    problems = []
    for other in others:
        mesh = Mesh({a: other if a == axis else costs.mesh.size(a) for a in costs.mesh.axes})
        times = max(other // size, 1)
        sizes = costs.batch * times, costs.sequence * (times if costs.sequence > 1 else 1)
        try:
            other_sample = sample(mesh, sizes)
            _check_same_form(first, other_sample, str(mesh))
        except NoFormula as error:
            problems.append(error.reason)
            continue
        verify(costs, other_sample.schedule, sizes)
        return
    raise NoFormula(
        f"for no other size of {axis} does the program have the same collectives: {'; '.join(problems)}",
        fix="start from a mesh whose axes divide heads and features at other sizes too",
    )


def _sample(program: Recompilable, hardware: Hardware) -> _Sample:
    """Return the collectives, sizes, FLOPs and schedule of ``program`` as a `_Sample`. Raises PlanError if a formula
    cannot describe a collective.
    """
    schedule, graph = program.schedule(hardware, stage="localize"), program.whole("collectives")
    operands = {
        ir.info(node).name: node.all_input_nodes[0]
        for node in graph.nodes
        if node.op == "call_function" and comm_volume.collective_kind(node) is not None
    }
    form, sizes = [], []
    for row in schedule.collectives:
        operand = operands.get(row.name.rpartition(".")[0])
        if operand is None:
            raise NoFormula(f"{row.name} is inside a manual region, or of experts", source=row.cause.source or None)
        layout, itemsize = ir.layout(operand), ir.value(operand).itemsize
        group = tuple(row.axis.split(","))
        if any(":" in axis for axis in (*group, *layout.bound)):
            raise NoFormula(f"{row.name} moves {layout}, in which an axis is cut into parts")
        if layout.local_numel * itemsize != row.bytes:
            raise NoFormula(f"{row.name} hands in {row.bytes} bytes, of {layout}")
        cut = tuple(sorted(layout.bound, key=program.mesh.order))
        form.append((f"{row.name} of {row.phase}", row.kind, group, cut, itemsize))
        sizes.append(layout.numel * itemsize)
    return _Sample(tuple(form), tuple(sizes), sum(flops for _, flops in model_flops(graph)), schedule)


def _check_same_form(first: _Sample, other: _Sample, where: str) -> None:
    """Raise PlanError if the program sampled at ``where`` (``other``) has other collectives than the program itself
    (``first``).
    """
    if first.form == other.form:
        return
    for expected, actual in zip((*first.form, None), (*other.form, None), strict=False):
        if expected != actual:
            texts = [f"{x[1]} over {','.join(x[2])} ({x[0]})" if x is not None else "none" for x in (expected, actual)]
            raise NoFormula(f"{where} has other collectives: {texts[1]} where there was {texts[0]}")


def _symbols_of_inputs(program: Recompilable, dims: Dims | None) -> dict[str, tuple[str | None, ...]]:
    """Return the symbol of each dim of each input, for formulas: input -> ("batch", "sequence" or None per dim). By
    default (``dims`` is None), symbols are chosen by the inputs' dtypes.
    """
    integers = {
        ir.role(node).name
        for node in ir.placeholders(program.graph("capture"), "input")
        if isinstance(value := ir.info(node).value, ir.Value) and not value.dtype.is_floating_point
    }
    out = {}
    for name, layout in program.inputs:
        symbols: Sequence[str | None] = () if dims is None else dims.get(name, ())
        if dims is None:
            symbols = ("batch", *(["sequence"] if name in integers else []))
        out[name] = (*symbols, *[None] * layout.ndim)[: layout.ndim]
    return out


def _size(program: Recompilable, symbols_of: Dims, symbol: sympy.Symbol) -> int | None:
    """Return the size of the input dims that carry ``symbol`` in ``symbols_of``; None if no dim does. Raises PlanError
    if such dims have different sizes.
    """
    sizes = {
        size
        for name, layout in program.inputs
        for dim_symbol, size in zip(symbols_of[name], layout.shape, strict=True)
        if dim_symbol == str(symbol)
    }
    if len(sizes) > 1:
        raise NoFormula(f"inputs disagree on {symbol}: {sorted(sizes)}", fix="name the dims of the inputs")
    return next(iter(sizes), None)


def _point_text(at: tuple[int, int], has: Mapping[sympy.Symbol, bool]) -> str:
    """Return the sizes ``at`` (batch, sequence) as text. A size that the program does not have is left out."""
    parts: Iterator[str] = (f"{s} {n}" for s, n in zip((BATCH, SEQUENCE), at, strict=True) if has[s])
    return ", ".join(parts) or "its size"
