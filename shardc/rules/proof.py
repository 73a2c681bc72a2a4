"""Proof of rules by execution: runs every strategy of a rule on shards, and compares with the op on full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from shardc._compat import OpOverload
from shardc.ir.graph import Value
from shardc.ir.layout import Digit, Digits, Layout, canonical
from shardc.ir.mesh import Mesh
from shardc.rules.rule import Builder, Call, Emitted, Local, Rule
from shardc.rules.spec import Routed, Spec, Strategy, commute, infer, strategy_of

# Tolerated relative errors: of data movement and arithmetic in float64, and of arithmetic in other dtypes.
MOVED, COMPUTED = 1e-12, 1e-9
COARSER = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Sample:
    """One call of an op with real arguments, tensors in float64 or integers.

    Args:
        op: the op overload.
        args, kwargs: its arguments.
        defined: whether the values of its results are defined (those of ``empty`` are not).
        device: device of its kernel, to which the arguments are moved.
        tolerance: largest relative error, if the kernel does not compute in float64.
    """

    op: OpOverload[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)
    defined: bool = True
    device: str = "cpu"
    tolerance: float | None = None

    def on_device(self) -> Sample:
        """Return a copy of this sample with its tensors moved to the device that its attribute ``device`` names."""
        kwargs = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in self.kwargs.items()}
        args = tuple(x.to(self.device) if isinstance(x, Tensor) else x for x in self.args)
        return replace(self, args=args, kwargs=kwargs)

    def dense(self) -> list[Tensor | None]:
        """Return the results of the op on the unsharded tensors; None for results that are not tensors."""
        outputs = self.op(*self.args, **self.kwargs)
        results = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        return [x if isinstance(x, Tensor) else None for x in results]

    def call(self, results: Sequence[Tensor | None]) -> Call:
        """Return the `Call` with the shapes of the arguments and of ``results``."""
        kwargs = tuple(sorted((name, _as_value(x)) for name, x in self.kwargs.items()))
        return Call(self.op, tuple(map(_as_value, self.args)), kwargs, tuple(map(_as_value, results)))

    def __str__(self) -> str:
        shown = [f"{_as_value(x)}" for x in self.args] + [f"{name}={_as_value(x)}" for name, x in self.kwargs.items()]
        return f"{self.op}({', '.join(shown)})"


def _as_value(x: object) -> Any:
    """Return an argument with tensors replaced by their `Value`, and lists by tuples."""
    if isinstance(x, Tensor):
        return Value(x.dtype, tuple(x.shape))
    return tuple(map(_as_value, x)) if isinstance(x, (list, tuple)) else x


class Ranks(Builder, Protocol):
    """All ranks of a mesh, simulated in one process; implemented by `shardc.runtime.sim.lockstep.Lockstep`."""

    mesh: Mesh

    def scatter_terms(self, x: Tensor, layout: Layout, generator: torch.Generator) -> Emitted:
        """Return ``x`` as one shard per rank. If ``layout`` has a pending reduction, each rank gets a random term
        instead, drawn by ``generator``, and the terms reduce to ``x``.
        """

    def assemble(self, values: Sequence[Tensor], layout: Layout) -> Tensor:
        """Return the global tensor of the shards of all ranks (``values``), with pending reductions performed."""


@dataclass(frozen=True)
class Proof:
    """Result of a proof: the number of strategies tried for a sample, and one message for each that failed."""

    tried: int
    wrong: tuple[str, ...]


def prove(rule: Rule, sample: Sample, ranks: Callable[[Mesh], Ranks], meshes: Sequence[Mesh]) -> Proof:
    """Run ``sample`` under every strategy of ``rule`` on each of ``meshes``, simulated by ``ranks(mesh)``; return the
    `Proof`, with a text per failure. Strategies that the sample's values do not allow are skipped.
    """
    sample = sample.on_device()
    dense = sample.dense()
    call = sample.call(dense)
    spec = rule.spec(call)
    finite = all(x is None or bool(torch.isfinite(x).all()) for x in dense)
    tried, wrong = 0, []
    for mesh in meshes:
        for strategy in offered(spec, mesh):
            if not all(_can_be_pending(v, layout) for v, layout in zip(call.operands, strategy.operands, strict=True)):
                continue
            if any(0 in layout.shape and layout.bound for layout in strategy.operands):
                continue  # an empty tensor has nothing to split, and `Layout.split` refuses
            if not finite and any(layout.partial for layout in strategy.operands):
                continue  # terms of an infinity may be infinities of both signs
            tried += 1
            error = run(rule, sample, call, spec, dense, strategy, ranks(mesh))
            if error is not None:
                shown = ", ".join(map(str, strategy.operands)) + " -> " + ", ".join(map(str, strategy.results))
                wrong.append(f"{sample}\n  on {mesh}: {shown}\n  {error}")
    return Proof(tried, tuple(wrong))


def _can_be_pending(value: Value, layout: Layout) -> bool:
    """Return whether the dtype of ``value`` allows the pending reductions of ``layout``: bools cannot be summed, and
    complex numbers have no maximum.
    """
    ops = {op for _, op in layout.partial}
    return not (value.dtype == torch.bool and "sum" in ops) and not (value.dtype.is_complex and "max" in ops)


# --- the strategies of a spec


def offered(spec: Spec, mesh: Mesh) -> Iterator[Strategy]:
    """Yield each strategy in which every axis of ``mesh`` is used: it either splits a factor, or the operands are
    partial over it and the pending reduction passes through the op.
    """
    for uses in product(_uses(spec), repeat=len(mesh.axes)):  # one use for each axis
        carried: list[tuple[str, str, frozenset[int]]] = []  # (axis, reduce op, positions of the partial operands)
        split: dict[str, list[str]] = {}  # factor -> the axes that split it
        for axis, use in zip(mesh.axes, uses, strict=True):
            if isinstance(use, tuple):
                reduce_op, partial_operands = use
                carried.append((axis, reduce_op, partial_operands))
                continue
            # A `Routed` has two factors, which an axis splits at once.
            factors = (use.rows, use.owners) if isinstance(use, Routed) else (use,)
            for factor in factors:
                split.setdefault(factor, []).append(axis)
        # Every way to split each factor over its axes.
        for cuts in product(*(_cuts(mesh, spec.size(factor), axes) for factor, axes in split.items())):
            assignment = dict(zip(split, cuts, strict=True))
            if commute(spec, assignment, [(axis, op) for axis, op, _ in carried]):
                yield strategy_of(spec, mesh, assignment, carried)


def _uses(spec: Spec) -> list[str | Routed | tuple[str, frozenset[int]]]:
    """Return what a mesh axis can do to the op: split a factor (given by name), split both factors of a `Routed` at
    once, or carry a pending reduction, as (reduce op, positions of the operands that are partial).
    """
    carried: list[tuple[str, frozenset[int]]] = [("sum", positions) for positions in spec.linear]
    if spec.moves:  # any reduction passes through; two kinds stand for all
        carried += [("sum", frozenset({0})), ("max", frozenset({0}))]
    split: list[str | Routed] = [factor for factor, _ in spec.sizes if spec.splittable(factor)]
    return [*split, *([] if spec.routed is None else [spec.routed]), *carried]


def _cuts(mesh: Mesh, size: int, axes: Sequence[str]) -> list[Digits]:
    """Return the ways to split a factor of ``size`` over ``axes``, one for each order of the axes and each place of the
    local digit among them. A way is a sequence of digits, (radix, axis) pairs.
    """
    split = prod(mesh.size(axis) for axis in axes)
    if size % split:
        return []
    cuts = set()
    for order in permutations(axes):
        bound = [Digit(mesh.size(axis), axis) for axis in order]
        for at in range(len(bound) + 1):
            cuts.add(canonical(mesh, [*bound[:at], Digit(size // split), *bound[at:]]))
    return sorted(cuts, key=str)


# --- running one strategy


def run(
    rule: Rule, sample: Sample, call: Call, spec: Spec, dense: Sequence[Tensor | None], strategy: Strategy, ranks: Ranks
) -> str | None:
    """Run ``sample`` on shards as ``strategy`` says and compare with ``dense``, the results of the op on full tensors.
    Return a description of the failure, or None if it passes.
    """
    # The layouts of the results must also follow from those of the operands alone. But an axis that splits only factors
    # of results is in no operand, so nothing follows from these.
    inferred = infer(spec, strategy.operands) if strategy.operands else strategy.results
    bound_axes = {axis for layout in strategy.operands for axis in layout.axes}
    if isinstance(inferred, str) or (bound_axes == set(ranks.mesh.axes) and inferred != strategy.results):
        return f"inferred {inferred}"
    # `shard` takes the next layout for each tensor, so it is called on the tensors in the order of the op's operands.
    layouts = iter(strategy.operands)
    generator = torch.Generator().manual_seed(0)

    def shard(x: object) -> Emitted:
        if isinstance(x, Tensor):
            return ranks.scatter_terms(x, next(layouts), generator)
        return [shard(item) for item in x] if isinstance(x, (list, tuple)) else x

    args = tuple(map(shard, sample.args))
    # In the order of the schema, in which the operands are numbered.
    names = (argument.name for argument in sample.op._schema.arguments)
    kwargs = {name: shard(sample.kwargs[name]) for name in names if name in sample.kwargs}
    local = Local(ranks, call, spec, strategy.operands, strategy.results, args, kwargs)
    try:
        outputs = rule.localize(local)
        return _difference(sample, call, spec, dense, outputs, strategy.results, ranks)
    except (RuntimeError, AssertionError, IndexError, ValueError, TypeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def _difference(
    sample: Sample,
    call: Call,
    spec: Spec,
    dense: Sequence[Tensor | None],
    outputs: Any,
    layouts: Sequence[Layout],
    ranks: Ranks,
) -> str | None:
    """Return how the assembled results differ from the dense ones; None if they agree.

    Args:
        dense: results of the op on full tensors; None for those that are not tensors.
        outputs: for each rank a tensor or a list of tensors; a plain ``list`` has per result the tensors of all ranks.
        layouts: of the results that are tensors.
    """
    if type(outputs) is list:  # a rule that returns a list of several results: by rank in place of by result
        outputs = list(zip(*outputs, strict=True))
    many = isinstance(outputs[0], (tuple, list))
    places = [i for i, x in enumerate(dense) if x is not None]
    for number, (place, layout) in enumerate(zip(places, layouts, strict=True)):  # ``number``: among the tensors
        expected = dense[place]
        assert expected is not None
        if number in spec.replicated:  # not compared: a kernel's random state differs from run to run
            continue
        got = ranks.assemble([output[place] if many else output for output in outputs], layout)
        if got.dtype != expected.dtype or got.shape != expected.shape:
            return f"result {place} is {got.dtype} {list(got.shape)}, not {expected.dtype} {list(expected.shape)}"
        if sample.defined and not close(got, expected, _tolerance(sample, spec, call)):
            return f"result {place} differs: {got.flatten()[:8].tolist()}, not {expected.flatten()[:8].tolist()}"
    return None


def _tolerance(sample: Sample, spec: Spec, call: Call) -> float:
    """Return the relative error that is tolerated for ``sample``: the error that the sample states, else a default by
    dtype and by whether the op only moves data.
    """
    dtypes = {value.dtype for value in (*call.operands, *call.results) if value is not None}
    exact = MOVED if spec.moves else COMPUTED
    return sample.tolerance or max((COARSER[dtype] for dtype in dtypes if dtype in COARSER), default=exact)


def close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether ``got`` equals ``expected``: exactly for integers, else up to ``tolerance`` times the largest
    value, or times 1 if all values are smaller.
    """
    if not expected.is_floating_point() and not expected.is_complex():
        return torch.equal(got, expected)
    # Without infinities and NaN, which `allclose` compares exactly.
    scale = max(expected.abs().nan_to_num(0, 0, 0).flatten().tolist(), default=0.0)
    return torch.allclose(got, expected, rtol=0, atol=tolerance * max(scale, 1.0), equal_nan=True)
