"""An op as loops over factors, and the strategies that follow from it.

A *factor* names one loop of an op. Each dim of an operand or result is an ordered product of factors.
Splitting a factor over a mesh axis splits every dim that carries it; a factor that a result lacks
leaves the result partial over the axis. One `Spec` gives all strategies on all axes, forward and
backward: nothing here knows an op by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod

from shardc.errors import RuleError
from shardc.ir.layout import Digit, Digits, Layout, canonical, cut_digits, refine, strides
from shardc.ir.mesh import Mesh, split_part
from shardc.rules.routed import Assignment, Routed, as_held, as_said, in_part, routed_axes

Factors = tuple[str, ...]
Dims = tuple[Factors, ...]


@dataclass(frozen=True)
class Spec:
    """One op at given shapes.

    Args:
        operands: per tensor operand, per dim, its factors major to minor; a dim of size 1 has none.
        results: the same per result.
        sizes: (factor, size) of every factor.
        reduce: (factor, reduce op) of the factors whose split leaves a partial result.
        whole: factors that must not be split.
        linear: sets of operand positions; an op carries a pending sum over an axis through when exactly
            the operands of one set are partial over it.
        moves: the op only moves data, so it carries any pending reduction of operand 0.
        flops: floating-point operations, at these sizes.
        aside: results that no factor's split changes (a kernel's random state): the same on every rank.
        indexed: factors whose elements the op finds by their place; what fills a dim up may stand at its end alone.
        routed: two factors that an axis may split together.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[tuple[str, int], ...]
    reduce: tuple[tuple[str, str], ...] = ()
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    moves: bool = False
    flops: int = 0
    aside: frozenset[int] = frozenset()
    indexed: frozenset[str] = frozenset()
    routed: Routed | None = None
    _size: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)
    _reduce: dict[str, str] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_size", dict(self.sizes))
        object.__setattr__(self, "_reduce", dict(self.reduce))

    def size(self, factor: str) -> int:
        return self._size[factor]

    def splittable(self, factor: str) -> bool:
        """Whether ``factor`` may be split: every result carries it, or its reduction is known."""
        if factor in self.whole or not self._size[factor]:
            return False
        return factor in self._reduce or self.carried_by_all(factor)

    def carried_by_all(self, factor: str) -> bool:
        """Whether every result (but those aside) has a dim with ``factor``."""
        return all(
            any(factor in dim for dim in result) for at, result in enumerate(self.results) if at not in self.aside
        )

    def check(self, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], what: str) -> None:
        """Raises RuleError where the factors do not make up the shapes."""
        for kind, dims, shapes in (("operand", self.operands, operands), ("result", self.results, results)):
            if len(dims) != len(shapes):
                raise RuleError(f"the rule of {what} has {len(dims)} {kind}s, the op has {len(shapes)}")
            for at, (one, shape) in enumerate(zip(dims, shapes, strict=True)):
                said = tuple(prod(self.size(f) for f in factors) for factors in one)
                if said != tuple(shape):
                    raise RuleError(
                        f"the rule of {what} gives {kind} {at} the shape {list(said)}, it is {list(shape)}",
                        fix="make the rule's factors multiply up to the op's shapes",
                    )


@dataclass(frozen=True)
class Strategy:
    """One way to run an op on shards: the layouts its operands must have, and those its results get."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


def project(spec: Spec, dims: Dims, layout: Layout) -> Assignment:
    """The digits of ``layout`` shared out to the factors of an operand with ``dims``.

    An axis that straddles two factors where no part of it fits, or that splits a factor which must
    stay whole, is left out: its digits become local.
    """
    out: Assignment = {}
    for factors, digits in zip(dims, layout.dims, strict=True):
        out.update(_share_out(layout.mesh, tuple((f, spec.size(f), spec.splittable(f)) for f in factors), digits))
    return out


@lru_cache(maxsize=65536)
def _share_out(
    mesh: Mesh, factors: tuple[tuple[str, int, bool], ...], digits: Digits
) -> tuple[tuple[str, Digits], ...]:
    if any(size == 0 for _, size, _ in factors):
        return tuple((factor, (Digit(size),)) for factor, size, _ in factors)
    below, cuts = 1, []
    for _, size, _ in reversed(factors):
        cuts.append(below)
        below *= size
    cuts.reverse()
    while (fine := refine(mesh, digits, cuts)) is None:
        digits = _drop_clashing(mesh, digits, cuts)
    out = []
    at, stride = 0, prod(d.radix for d in fine)
    for (factor, _, free), cut in zip(factors, cuts, strict=True):
        start = at
        while at < len(fine) and stride > cut:
            stride //= fine[at].radix
            at += 1
        piece = fine[start:at]
        out.append((factor, canonical(mesh, piece if free else [Digit(d.radix) for d in piece])))
    return tuple(out)


def _drop_clashing(mesh: Mesh, digits: Digits, cuts: Sequence[int]) -> Digits:
    """``digits`` with one bound digit that no cut agrees with made local."""
    for at, (radix, axis) in reversed(list(enumerate(digits))):
        trial = canonical(mesh, [*digits[:at], Digit(radix), *digits[at + 1 :]])
        if axis is not None and refine(mesh, trial, cuts) is not None:
            return trial
    for at, (radix, axis) in enumerate(digits):
        if axis is not None:
            return canonical(mesh, [*digits[:at], Digit(radix), *digits[at + 1 :]])
    raise RuleError(f"factors with strides {list(cuts)} do not divide a dim of {prod(d.radix for d in digits)}")


def place(spec: Spec, dims: Dims, assignment: Mapping[str, Digits]) -> list[list[Digit]]:
    """The digits of an operand or result with ``dims`` when the factors have ``assignment``."""
    return [[d for f in factors for d in assignment.get(f, (Digit(spec.size(f)),))] for factors in dims]


def results_of(
    spec: Spec, mesh: Mesh, assignment: Mapping[str, Digits], carried: Sequence[tuple[str, str]] = ()
) -> tuple[Layout, ...]:
    """The layouts of the results when the factors have ``assignment`` and ``carried`` partials pass through."""
    out, routed = [], routed_axes(spec, assignment)
    for at, dims in enumerate(spec.results):
        present = {f for factors in dims for f in factors} if at not in spec.aside else assignment.keys()
        pending = list(carried)
        for factor, digits in assignment.items():
            if factor not in present:
                pending += [(a, spec._reduce[factor]) for _, a in digits if a is not None and a not in routed]
        out.append(Layout(mesh, place(spec, dims, assignment), pending))
    return tuple(out)


def from_results(spec: Spec, mesh: Mesh, index: int, layout: Layout) -> Strategy | None:
    """The strategy that computes result ``index`` at ``layout`` directly, without partials; or None."""
    assignment = project(spec, spec.results[index], layout.without_partial())
    operands = tuple(Layout(mesh, place(spec, dims, assignment)) for dims in spec.operands)
    results = results_of(spec, mesh, assignment)
    if results[index] != layout or any(r.partial for r in results):
        return None
    if spec.routed is not None and not as_said(spec, assignment, mesh.axes):
        return None
    return Strategy(operands, results)


def infer(spec: Spec, operands: Sequence[Layout], results: Sequence[Layout] = ()) -> tuple[Layout, ...] | str:
    """The result layouts that ``operands`` give exactly, or the reason why they do not fit together.

    Args:
        results: where given, say how the factors lie that no operand carries; free otherwise, they stay whole.
    """
    if not operands:
        return "the op has no tensor operand"
    mesh = operands[0].mesh
    joint: Assignment = {}
    for at, (dims, layout) in enumerate(zip(spec.operands, operands, strict=True)):
        mine = project(spec, dims, layout)
        if Layout(mesh, place(spec, dims, mine)) != layout.without_partial():
            return f"operand {at} at {layout} splits a factor that must stay whole"
        for factor, digits in mine.items():
            if joint.setdefault(factor, digits) != digits:
                return f"operand {at} at {layout} splits factor {factor} differently from an operand before it"
    for dims, layout in zip(spec.results, results, strict=False):
        for factor, digits in project(spec, dims, layout).items():
            joint.setdefault(factor, digits)
    axes = [d.axis for digits in joint.values() for d in digits if d.axis is not None]
    for axis in routed_axes(spec, joint):
        axes.remove(axis)
    if any(mesh.overlap(a, b) for i, a in enumerate(axes) for b in axes[i + 1 :]):
        return "two factors are split over one axis"
    carried = carried_partials(spec, operands)
    if isinstance(carried, str):
        return carried
    if not commute(spec, joint, carried):
        return "pending reductions of different kinds would meet in a result"
    return results_of(spec, mesh, joint, carried)


def commute(spec: Spec, assignment: Mapping[str, Digits], carried: Iterable[tuple[str, str]]) -> bool:
    """Whether the reductions that a strategy leaves pending, or lets through, can be done in any order."""
    ops = {op for _, op in carried}
    for factor, digits in assignment.items():
        if factor in spec._reduce and any(d.axis is not None for d in digits) and not spec.carried_by_all(factor):
            ops.add(spec._reduce[factor])
    return len(ops) <= 1 or ops == {"sum", "avg"}


def carried_partials(spec: Spec, operands: Sequence[Layout]) -> tuple[tuple[str, str], ...] | str:
    """The pending reductions that pass through from ``operands``, or why they cannot."""
    where: dict[tuple[str, str], set[int]] = {}
    for at, layout in enumerate(operands):
        for pair in layout.partial:
            where.setdefault(pair, set()).add(at)
    for (axis, op), positions in where.items():
        if not carries(spec, op, frozenset(positions)):
            return f"operands {sorted(positions)} are partial ({op} over {axis}), which the op does not carry"
    return tuple(where)


def carries(spec: Spec, op: str, positions: frozenset[int]) -> bool:
    """Whether a pending ``op`` reduction of exactly the operands at ``positions`` passes through."""
    if spec.moves and positions == {0}:
        return True
    return op in ("sum", "avg") and positions in spec.linear


# --- all strategies that some operand's layout suggests


def strategies(spec: Spec, operands: Sequence[Layout]) -> Iterator[Strategy]:
    """Every strategy whose splits come from the operands' own layouts, the most split first.

    For each axis the choices are: as some operand has it, not at all, or (where the operands are partial
    over it and the op is linear in them) carried through. Where a dense op cannot keep an axis as any operand has
    it, the axis may split another of its factors. Moving the operands there is the caller's cost.
    """
    mesh = operands[0].mesh
    proposals = [project(spec, dims, layout) for dims, layout in zip(spec.operands, operands, strict=True)]
    if spec.routed is not None:
        proposals += as_held(spec, mesh, spec.routed, proposals)
    bound = [axis for one in proposals for digits in one.values() for _, axis in digits if axis is not None]
    parts = atoms(mesh, [*bound, *(axis for layout in operands for axis, _ in layout.partial)])
    if any(len(cut) > 1 for cut in parts.values()):
        proposals = [
            {factor: cut_digits(mesh, digits, parts.__getitem__) for factor, digits in one.items()} for one in proposals
        ]
    options: dict[str, list[tuple[str, object]]] = {}
    for at, proposal in enumerate(proposals):
        for factor, digits in proposal.items():
            for _, axis in digits:
                if axis is not None:
                    options.setdefault(axis, []).append(("split", (factor, at)))
    if spec.flops:
        lost = {axis for layout in operands for axis in layout.bound if axis in mesh.axes}
        lost.difference_update(split_part(axis)[0] for axis in bound)
        for axis in sorted(lost, key=mesh.order):
            size = mesh.size(axis)
            fresh = [{f: canonical(mesh, [Digit(size, axis), Digit(n // size)])} for f, n in spec.sizes
                     if spec.splittable(f) and n % size == 0]  # fmt: skip
            options[axis] = [("split", (next(iter(one)), len(proposals) + at)) for at, one in enumerate(fresh)]
            proposals += fresh
    if spec.routed is not None:
        for found in options.values():
            by = {one[0]: one for kind, one in found if isinstance(one, tuple)}
            if spec.routed.rows in by and spec.routed.owners in by:
                found.append(("send", (by[spec.routed.rows], by[spec.routed.owners])))
    pending: dict[str, dict[str, set[int]]] = {}
    for at, layout in enumerate(operands):
        for axis, op in layout.partial:
            for part in parts[axis]:
                pending.setdefault(part, {}).setdefault(op, set()).add(at)
    for axis, ops in pending.items():
        options.setdefault(axis, [])
        for op, positions in ops.items():
            if len(ops) == 1 and carries(spec, op, frozenset(positions)):
                options[axis].append(("carry", (op, frozenset(positions))))
    axes = sorted(options, key=mesh.order)
    made: dict[Strategy, bool] = {}
    for choice in product(*([*options[axis], ("none", None)] for axis in axes)):
        one = _strategy(spec, mesh, proposals, dict(zip(axes, choice, strict=True)))
        if one is not None:
            made.setdefault(*one)
    fitting = any(made.values())
    yield from (strategy for strategy, fits in made.items() if fits or not fitting)


def _strategy(
    spec: Spec, mesh: Mesh, proposals: Sequence[Assignment], choice: Mapping[str, tuple[str, object]]
) -> tuple[Strategy, bool] | None:
    """A strategy, and whether its rows travel as is asked for; None where the choices clash."""
    wanted: dict[tuple[str, int], set[str]] = {}
    carried: dict[str, tuple[str, frozenset[int]]] = {}
    for axis, (kind, detail) in choice.items():
        if kind == "split":
            wanted.setdefault(detail, set()).add(axis)  # type: ignore[arg-type]
        elif kind == "send":
            for one in detail:  # type: ignore[attr-defined]
                wanted.setdefault(one, set()).add(axis)
        elif kind == "carry":
            carried[axis] = detail  # type: ignore[assignment]
    assignment: Assignment = {}
    for (factor, at), axes in wanted.items():
        kept = tuple(d if d.axis in axes else Digit(d.radix) for d in proposals[at][factor])
        merged = merge(mesh, assignment.get(factor), canonical(mesh, kept))
        if merged is None:
            return None
        assignment[factor] = merged
    pairs = [(axis, op) for axis, (op, _) in carried.items()]
    if not commute(spec, assignment, pairs) or in_part(spec, mesh, assignment):
        return None
    layouts = []
    for at, dims in enumerate(spec.operands):
        partial = [(axis, op) for axis, (op, positions) in carried.items() if at in positions]
        layouts.append(Layout(mesh, place(spec, dims, assignment), partial))
    made = Strategy(tuple(layouts), results_of(spec, mesh, assignment, pairs))
    return made, as_said(spec, assignment, mesh.axes)


def merge(mesh: Mesh, one: Digits | None, other: Digits) -> Digits | None:
    """The digits that carry the bindings of both, or None where their radices clash."""
    if one is None:
        return other
    fine, fine_other = refine(mesh, one, strides(other)), refine(mesh, other, strides(one))
    if fine is None or fine_other is None:
        return None
    out = []
    for a, b in zip(fine, fine_other, strict=True):
        if a.axis is not None and b.axis is not None and a.axis != b.axis:
            return None
        out.append(a if a.axis is not None else b)
    return canonical(mesh, out)


def atoms(mesh: Mesh, axes: Sequence[str]) -> dict[str, list[str]]:
    """Each of ``axes`` as parts of it, such that any two parts of any of them are equal or disjoint."""
    edges = mesh.edges(axes)
    return {axis: mesh.parts(axis, edges) for axis in axes}
