"""Derive: the formulas of a program's costs, from captures, each compared with captures that it was not made from.

Nothing is traced with symbols. In axis sizes the formulas are read off the program: how many ranks a group has, which
axes cut the tensor that moves, and how a collective's wire bytes follow. In batch and sequence the sizes of the tensors
are polynomials (of degree 1 in the batch, 2 in the sequence), whose coefficients are solved exactly, in rationals, from
captures at 2 batches and 3 sequences. Then bytes and seconds are compared with a capture at another batch and sequence,
and with one on another size of each axis; where one differs there is an error, not a formula.

A formula holds while the program keeps its form: sizes divide over the axes, and the same collectives are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import sympy
from torch import fx

from shardc.cost.hardware import Hardware
from shardc.errors import PlanError, ShardcError
from shardc.ir import graph as ir
from shardc.ir import tally
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.report.formulas import BATCH, SEQUENCE, Costs, Moves
from shardc.report.repeated import model_flops
from shardc.report.schedule import Schedule

DEGREES = {BATCH: 1, SEQUENCE: 2}
Dims = Mapping[str, Sequence[Any]]  # input -> the symbol (or None) of each of its dims


class Again(Protocol):
    """A program that can be made again at other sizes."""

    mesh: Mesh
    inputs: tuple[tuple[str, Layout], ...]

    def graph(self, stage: str) -> fx.Graph: ...

    def whole(self, stage: str) -> fx.Graph: ...

    def schedule(self, hardware: Hardware, *, stage: str) -> Schedule: ...

    again: Any  # (mesh, shapes of the inputs) -> the program there


# Name and phase, kind, group, the axes that cut what is handed in, bytes of an element; of each collective.
Form = tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], int], ...]


@dataclass(frozen=True)
class _Sample:
    """One capture: its collectives, bytes of the whole tensor that each moves a part of, operations."""

    form: Form
    sizes: tuple[int, ...]
    flops: int
    schedule: Schedule


def derive(program: Again, hardware: Hardware, dims: Dims | None = None) -> Costs:
    """The formulas of a program.

    Args:
        hardware: whose numbers `Costs.values` has by default, and whose times the formulas are checked against.
        dims: for each input the symbol of each dim, "batch", "sequence" or None. By default dim 0 of every input is
            the batch, and dim 1 of inputs of integers (tokens) the sequence.

    Raises:
        PlanError: a formula does not hold at a size that it was not made from, or the program cannot be described so.
    """
    if program.again is None:
        raise PlanError("no formula: a program that was loaded cannot be made again", fix="compile the model")
    known = _named(program, dims)
    base = {symbol: _size(program, known, symbol) for symbol in (BATCH, SEQUENCE)}
    has = {symbol: size is not None for symbol, size in base.items()}
    batch, sequence = base[BATCH] or 1, base[SEQUENCE] or 1
    degrees = [DEGREES[symbol] if has[symbol] else 0 for symbol in (BATCH, SEQUENCE)]
    powers = list(product(range(degrees[0] + 1), range(degrees[1] + 1)))
    points = [(batch * (1 + i), sequence * (1 + j)) for i, j in powers]

    def sample(mesh: Mesh, at: tuple[int, int]) -> _Sample:
        if mesh == program.mesh and at == (batch, sequence):
            return _sample(program, hardware)
        numbers = {"batch": at[0], "sequence": at[1]}
        shapes = [
            [numbers.get(str(said), size) for said, size in zip(known[name], layout.shape, strict=True)]
            for name, layout in program.inputs
        ]
        try:
            return _sample(program.again(mesh, shapes), hardware)
        except ShardcError as error:
            raise PlanError(f"no formula: {mesh} at {_said(at, has)} fails: {error.what}", fix=error.fix) from error

    samples = [sample(program.mesh, at) for at in points]
    first = samples[0]
    for point, other in zip(points, samples, strict=True):
        _same_form(first, other, f"{program.mesh} at {_said(point, has)}")
    solve = sympy.Matrix([[b**i * s**j for i, j in powers] for b, s in points]).inv()

    def fitted(values: Sequence[int]) -> sympy.Expr:
        factors = solve * sympy.Matrix(values)
        return sympy.Add(*(c * BATCH**i * SEQUENCE**j for c, (i, j) in zip(factors, powers, strict=True)))

    alike: dict[tuple[Any, ...], int] = {}
    for row, (_, kind, group, cut, itemsize) in enumerate(first.form):
        key = kind, group, cut, itemsize, tuple(each.sizes[row] for each in samples)
        alike[key] = alike.get(key, 0) + 1
    moves = tuple(
        Moves(kind, group, cut, count, itemsize, fitted(sizes))
        for (kind, group, cut, itemsize, sizes), count in alike.items()
    )
    costs = Costs(
        program.mesh, hardware, batch, sequence, moves, fitted([s.flops for s in samples]), first.schedule.dtype
    )
    elsewhere = (batch * (3 if has[BATCH] else 1), sequence * (4 if has[SEQUENCE] else 1))
    held_out = sample(program.mesh, elsewhere)
    _same_form(first, held_out, f"{program.mesh} at {_said(elsewhere, has)}")
    verify(costs, held_out.schedule, elsewhere)
    for axis in program.mesh.axes:
        _verify_axis(costs, axis, first, sample, (batch, sequence))
    return costs


def verify(costs: Costs, schedule: Schedule, at: tuple[int, int]) -> None:
    """Compares formulas with the schedule of a capture at ``at`` (batch, sequence), before bucketing.

    Raises:
        PlanError: a number differs.
    """
    values = costs.values(schedule.mesh, schedule.hardware, batch=at[0], sequence=at[1])
    where = f"{schedule.mesh} at batch {at[0]}, sequence {at[1]}"
    totals = schedule.totals("axis")
    for axis in dict.fromkeys([*costs.axes, *totals]):
        total = totals.get(axis)
        said = costs.cost(axis) if axis in costs.axes else None
        wire, seconds = (int(said.wire.subs(values)), float(said.seconds.subs(values))) if said else (0, 0.0)
        real = (total.wire, total.seconds) if total else (0, 0.0)
        if wire != real[0] or abs(seconds - real[1]) > 1e-9 * max(real[1], 1e-30):
            raise PlanError(
                f"no formula: over {axis} it says {wire} bytes and {seconds:.9g} s for {where}, a capture there has "
                f"{real[0]} and {real[1]:.9g}",
                fix="use sizes that the axes divide, or name the dims of the inputs",
            )


def _verify_axis(
    costs: Costs, axis: str, first: _Sample, sample: Callable[[Mesh, tuple[int, int]], _Sample], at: tuple[int, int]
) -> None:
    """Compares the formulas with a capture on another size of ``axis`` on which the program keeps its form."""
    size = costs.mesh.size(axis)
    if size == 1:
        return
    others = [size // 2] * (size > 2 and size % 2 == 0) + [2 * size, 3 * size]
    problems = []
    for other in others:
        mesh = Mesh({a: other if a == axis else costs.mesh.size(a) for a in costs.mesh.axes})
        sizes = (at[0] * max(other // size, 1), at[1] * (max(other // size, 1) if at[1] > 1 else 1))
        try:
            made = sample(mesh, sizes)
            _same_form(first, made, str(mesh))
        except PlanError as error:
            problems.append(error.what.removeprefix("no formula: "))
            continue
        verify(costs, made.schedule, sizes)
        return
    raise PlanError(
        f"no formula: on no other size of {axis} has the program the same form: {'; '.join(problems)}",
        fix="start from a mesh whose axes divide heads and features at other sizes too",
    )


def _sample(program: Again, hardware: Hardware) -> _Sample:
    schedule, graph = program.schedule(hardware, stage="localize"), program.whole("collectives")
    operands = {
        ir.info(node).name: node.all_input_nodes[0]
        for node in graph.nodes
        if node.op == "call_function" and tally.collective_kind(node) is not None
    }
    form, sizes = [], []
    for row in schedule.collectives:
        operand = operands.get(row.name.rpartition(".")[0])
        if operand is None:
            raise PlanError(
                f"no formula: {row.name} is inside a manual region, or of experts", source=row.cause.source or None
            )
        layout, itemsize = ir.layout(operand), ir.value(operand).itemsize
        group = tuple(row.axis.split(","))
        if any(":" in axis for axis in (*group, *layout.bound)):
            raise PlanError(f"no formula: {row.name} moves {layout}, in which an axis is cut into parts")
        if layout.local_numel * itemsize != row.bytes:
            raise PlanError(f"no formula: {row.name} hands in {row.bytes} bytes, of {layout}")
        cut = tuple(sorted(layout.bound, key=program.mesh.order))
        form.append((f"{row.name} of {row.phase}", row.kind, group, cut, itemsize))
        sizes.append(layout.numel * itemsize)
    return _Sample(tuple(form), tuple(sizes), sum(flops for _, flops in model_flops(graph)), schedule)


def _same_form(first: _Sample, other: _Sample, where: str) -> None:
    if first.form == other.form:
        return
    for one, two in zip((*first.form, None), (*other.form, None), strict=False):
        if one != two:
            told = [f"{x[1]} over {','.join(x[2])} ({x[0]})" if x is not None else "none" for x in (one, two)]
            raise PlanError(f"no formula: {where} has other collectives: {told[1]} where there was {told[0]}")


def _named(program: Again, dims: Dims | None) -> dict[str, tuple[Any, ...]]:
    """The symbol of each dim of each input."""
    integers = {
        ir.role(node).name
        for node in ir.placeholders(program.graph("capture"), "input")
        if isinstance(made := ir.info(node).value, ir.Value) and not made.dtype.is_floating_point
    }
    out = {}
    for name, layout in program.inputs:
        said: Sequence[Any] = () if dims is None else dims.get(name, ())
        if dims is None:
            said = ("batch", *(["sequence"] if name in integers else []))
        out[name] = (*said, *[None] * layout.ndim)[: layout.ndim]
    return out


def _size(program: Again, known: Mapping[str, Sequence[Any]], symbol: sympy.Symbol) -> int | None:
    sizes = {
        size
        for name, layout in program.inputs
        for said, size in zip(known[name], layout.shape, strict=True)
        if said == str(symbol)
    }
    if len(sizes) > 1:
        raise PlanError(f"no formula: inputs disagree on {symbol}: {sorted(sizes)}", fix="name the dims of the inputs")
    return next(iter(sizes), None)


def _said(at: tuple[int, int], has: Mapping[Any, bool]) -> str:
    parts: Iterator[str] = (f"{s} {n}" for s, n in zip((BATCH, SEQUENCE), at, strict=True) if has[s])
    return ", ".join(parts) or "its size"
