"""The factors of an op call (`Spec`), and the sharding strategies that follow from them.

A *factor* is one loop of an op (an einsum letter). Each dim of an operand or result is an ordered product of factors.
Splitting a factor over a mesh axis splits every dim that carries it; a result that lacks the factor becomes partial
over the axis. One `Spec` gives all strategies on all axes, forward and backward: no op is treated by name here.

An *assignment* maps each factor to its digits, the radices of its split (see `shardc.ir.layout`).

Some ops exchange data between ranks themselves, so that one axis may split two of their factors at once (`Routed`):
routed experts (tokens and experts: expert parallelism) and attention (queries and keys: context parallelism).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import gcd, prod

from shardc.errors import RuleError
from shardc.ir.layout import Digit, Digits, Layout, canonical, cut_digits, refine, strides
from shardc.ir.mesh import Mesh, split_part

Assignment = dict[str, Digits]  # factor -> its digits


@dataclass(frozen=True)
class Routed:
    """A pair of factors (loops of an op, such as tokens and experts) that one axis may split together: the op
    communicates between the ranks of that axis itself.

    Args:
        rows, owners: names of the factors (tokens and experts; queries and keys).
        elements: number of elements sent per row, there and back, if rows are sent to the rank of their owner.
        moving: positions of the operands that every rank receives, if owners are sent to all rows.
        trips: number of times that each of these operands is sent.
        around: whether they are passed from rank to rank during the computation (ring); else they are gathered first.
        way: "send": an axis that splits the owners must split the rows; "gather": it must not; "auto": the cheaper.
        required: (axis, sets of factors): by the plan the axis must split one of these sets, wherever it can.
    """

    rows: str
    owners: str
    elements: int = 0
    moving: tuple[int, ...] = ()
    trips: int = 1
    around: bool = False
    way: str = "auto"
    required: tuple[tuple[str, tuple[frozenset[str], ...]], ...] = ()


def routed_axes(spec: Spec, assignment: Mapping[str, Digits]) -> frozenset[str]:
    """Return the axes over which an op exchanges data: those that split both factors of its `Routed`, such as tokens
    and experts.
    """
    if spec.routed is None:
        return frozenset()
    return frozenset(_axes_of(assignment, spec.routed.rows) & _axes_of(assignment, spec.routed.owners))


def _axes_of(assignment: Mapping[str, Digits], factor: str) -> set[str]:
    """Return the axes that split ``factor``, by ``assignment`` (factor -> digits)."""
    return {digit.axis for digit in assignment.get(factor, ()) if digit.axis is not None}


def required_splits(spec: Spec, mesh: Mesh, routed: Routed, proposals: Sequence[Assignment]) -> list[Assignment]:
    """Return further proposals (factor -> digits) beside ``proposals``: for each axis over which the plan requires
    certain factors to be split (`Routed.required`), splits of these factors over the axis.
    """
    out: list[Assignment] = []
    pair = (routed.rows, routed.owners)
    for axis, factors in ((axis, factors) for axis, sets in routed.required for factors in sets):
        if factors == frozenset(pair):
            # Copy the digits from the factor that an operand splits to its partner. Their radices multiply up to the
            # size of the factor, so the partner must have the same size.
            for source, target in (pair, pair[::-1]) if spec.size(pair[0]) == spec.size(pair[1]) else ():
                out += [{target: p[source]} for p in proposals if axis in _axes_of(p, source)]
            continue
        # The axis is divided among the factors: each takes the largest part that divides its size, and leaves the rest
        # to the next. In order of names, because that of a set differs from process to process. It must be used up.
        left, splits = axis, {}
        for factor in sorted(factors & dict(spec.sizes).keys()):
            size = spec.size(factor)
            if (part := gcd(size, mesh.size(left))) > 1:
                axis_part, left = mesh.cut(left, part)
                splits[factor] = canonical(mesh, [Digit(part, axis_part), Digit(size // part)])
        if mesh.size(left) == 1 and splits.keys() == factors:
            out.append(splits)
    return list({str(assignment): assignment for assignment in out}.values())  # each once


def overlaps(spec: Spec, mesh: Mesh, assignment: Mapping[str, Digits]) -> bool:
    """Return whether the two factors of ``spec.routed`` are split over different axes that overlap (``tp`` and its part
    ``tp:1x2``), which no op can run. ``assignment``: factor -> digits.
    """
    if spec.routed is None:
        return False
    rows, owners = (_axes_of(assignment, factor) for factor in (spec.routed.rows, spec.routed.owners))
    return any(a != b and mesh.overlap(a, b) for a in rows for b in owners)


def meets_requirements(spec: Spec, assignment: Mapping[str, Digits], axes: Iterable[str]) -> bool:
    """Return whether the splits ``assignment`` (factor -> digits) are as the plan requires of an op with a `Routed`.
    Over each axis in ``axes`` it must split the factors that `Routed.required` names, and send rows or gather them as
    `Routed.way` says.
    """
    if (routed := spec.routed) is None:
        return True
    owners, sent = _axes_of(assignment, routed.owners), routed_axes(spec, assignment)
    for required, sets in routed.required:
        # Parts of the required axis count as the axis.
        split = {f for f in assignment for axis in _axes_of(assignment, f) if split_part(axis)[0] == required}
        if required in axes and split not in sets:
            return False
    # "gather": no axis may split both factors; "send": each that splits the owners must split the rows.
    return not (routed.way == "gather" and sent) and not (routed.way == "send" and owners - sent)


Factors = tuple[str, ...]
Dims = tuple[Factors, ...]


@dataclass(frozen=True)
class Spec:
    """The factors (loops) of one op at given shapes, and what a split of each does to the results.

    Args:
        operands: per tensor operand, per dim, its factors major to minor; a dim of size 1 has none.
        results: the same per result.
        sizes: (factor, size) of every factor.
        reduce: (factor, reduce op) of the factors whose split makes results partial.
        whole: factors that must not be split.
        linear: sets of operand positions; a partial sum over an axis passes through the op if exactly the operands of
            one set are partial over it.
        moves: the op only moves data, so any partial reduction of operand 0 passes through.
        flops: floating-point operations, at these sizes.
        replicated: positions of results that are the same on every rank, whatever is split (a kernel's random state).
        indexed: factors whose elements the op finds by index; such a dim may be padded at its end only.
        ordered: factors of which each rank must have one piece, in the order of ranks; operands that are split in
            another way are moved so.
        in_turn: factors over whose split the ranks compute one after another, each from what the one before sends: a
            split saves memory and no time. The op itself ignores the padding of such a dim. A result without such
            a factor is a partial sum, even if it is in ``replicated``.
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
    replicated: frozenset[int] = frozenset()
    indexed: frozenset[str] = frozenset()
    ordered: frozenset[str] = frozenset()
    in_turn: frozenset[str] = frozenset()
    routed: Routed | None = None
    _size: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)
    _reduce: dict[str, str] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        # Pairs make the spec hashable; these dicts are for look-ups.
        object.__setattr__(self, "_size", dict(self.sizes))
        object.__setattr__(self, "_reduce", dict(self.reduce))

    def size(self, factor: str) -> int:
        """Return the size of ``factor``."""
        return self._size[factor]

    def splittable(self, factor: str) -> bool:
        """Return whether ``factor`` may be split: it is neither empty nor ``whole``, and has a reduce op or is in every
        result.
        """
        if factor in self.whole or not self._size[factor]:
            return False
        return factor in self._reduce or self.carried_by_all(factor)

    def carried_by_all(self, factor: str) -> bool:
        """Return whether every result has a dim with ``factor``. Results whose positions are in `replicated` are
        ignored.
        """
        return all(
            any(factor in dim for dim in result) for at, result in enumerate(self.results) if at not in self.replicated
        )

    def check(self, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], what: str) -> None:
        """Raise RuleError, which names the op ``what``, if the factors do not multiply up to the shapes of operands and
        results.
        """
        for kind, dims, shapes in (("operand", self.operands, operands), ("result", self.results, results)):
            if len(dims) != len(shapes):
                raise RuleError(f"the rule of {what} has {len(dims)} {kind}s, the op has {len(shapes)}")
            for at, (tensor_dims, shape) in enumerate(zip(dims, shapes, strict=True)):
                rule_shape = tuple(prod(self.size(f) for f in factors) for factors in tensor_dims)
                if rule_shape != tuple(shape):
                    raise RuleError(
                        f"the rule of {what} gives {kind} {at} the shape {list(rule_shape)}, it is {list(shape)}",
                        fix="make the rule's factors multiply up to the op's shapes",
                    )


@dataclass(frozen=True)
class Strategy:
    """A sharding strategy of an op: the layouts that its operands must have, and the layouts of its results."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


def project(spec: Spec, dims: Dims, layout: Layout) -> Assignment:
    """Return how an operand at ``layout`` splits each of its factors: factor -> digits (the radices of its index, each
    bound to a mesh axis or local). ``dims`` has the factors of each dim of the operand.

    An axis is dropped (its digits become local) if it crosses the border of two factors and no part of it fits, or if
    it splits a factor that must be whole.
    """
    out: Assignment = {}
    for factors, digits in zip(dims, layout.dims, strict=True):
        out.update(_share_out(layout.mesh, tuple((f, spec.size(f), spec.splittable(f)) for f in factors), digits))
    # Of an ordered factor each rank needs one contiguous piece: axes come first.
    for factor in spec.ordered & out.keys():
        out[factor] = canonical(layout.mesh, _axes_first(out[factor]))
    return out


def _axes_first(digits: Iterable[Digit]) -> list[Digit]:
    """Return ``digits`` of one dim with those that are bound to an axis first, so that each rank holds one contiguous
    piece of the dim.
    """
    return sorted(digits, key=lambda digit: digit.axis is None)


@lru_cache(maxsize=65536)
def _share_out(
    mesh: Mesh, factors: tuple[tuple[str, int, bool], ...], digits: Digits
) -> tuple[tuple[str, Digits], ...]:
    """Distribute the ``digits`` of a dim (radices of its index, each bound to a mesh axis or local) over its factors;
    return (factor name, its digits) for each. ``factors``: (name, size, may be split) of each, the major one first.
    """
    if any(size == 0 for _, size, _ in factors):  # nothing to split
        return tuple((factor, (Digit(size),)) for factor, size, _ in factors)
    below, cuts = 1, []  # the stride of each factor in the dim, the product of the sizes of those below it
    for _, size, _ in reversed(factors):
        cuts.append(below)
        below *= size
    cuts.reverse()
    # An axis that straddles the border of two factors splits neither: it is dropped.
    while (fine := refine(mesh, digits, cuts)) is None:
        digits = _drop_clashing(mesh, digits, cuts)
    # Digits and factors both go from major to minor: each factor takes digits down to its stride.
    out = []
    at, stride = 0, prod(d.radix for d in fine)
    for (factor, _, free), cut in zip(factors, cuts, strict=True):
        start = at
        while at < len(fine) and stride > cut:
            stride //= fine[at].radix
            at += 1
        piece = fine[start:at]
        # Digits of a factor that must not be split become local.
        out.append((factor, canonical(mesh, piece if free else [Digit(d.radix) for d in piece])))
    return tuple(out)


def _drop_clashing(mesh: Mesh, digits: Digits, cuts: Sequence[int]) -> Digits:
    """Make one digit that an axis splits local, so that the digits of a dim can be cut at the strides ``cuts``; return
    the digits. If no single change suffices, the first (major) split digit becomes local, and the caller calls again.
    """
    for at, (radix, axis) in reversed(list(enumerate(digits))):
        trial = canonical(mesh, [*digits[:at], Digit(radix), *digits[at + 1 :]])
        if axis is not None and refine(mesh, trial, cuts) is not None:
            return trial
    for at, (radix, axis) in enumerate(digits):
        if axis is not None:
            return canonical(mesh, [*digits[:at], Digit(radix), *digits[at + 1 :]])
    raise RuleError(f"factors with strides {list(cuts)} do not divide a dim of {prod(d.radix for d in digits)}")


def place(spec: Spec, dims: Dims, assignment: Mapping[str, Digits]) -> list[list[Digit]]:
    """Return the digits of each dim of an operand or result, given the factors ``dims`` of each dim and the digits of
    each factor (``assignment``); a factor not in ``assignment`` is local.
    """
    out = []
    for factors in dims:
        by_factor = [(f, assignment.get(f, (Digit(spec.size(f)),))) for f in factors]
        # Of an ordered factor each rank has one contiguous piece.
        out.append([d for f, digits in by_factor for d in (_axes_first(digits) if f in spec.ordered else digits)])
    return out


def results_of(
    spec: Spec, mesh: Mesh, assignment: Mapping[str, Digits], carried: Sequence[tuple[str, str]] = ()
) -> tuple[Layout, ...]:
    """Return the layouts of the results if factors are split as in ``assignment`` (factor -> digits). ``carried``:
    (axis, reduce op) of pending reductions of operands that pass through.
    """
    out, routed = [], routed_axes(spec, assignment)
    for at, dims in enumerate(spec.results):
        present = {f for factors in dims for f in factors}  # a split of the others leaves a pending reduction
        # A split does not change a replicated result; only ranks that take turns each have a term of it.
        if at in spec.replicated:
            present |= assignment.keys() - spec.in_turn
        # The op itself communicates over an axis that splits both factors of a `Routed`: a result with either of them
        # is complete, and only one with neither is a sum.
        inside = routed if spec.routed and present & {spec.routed.rows, spec.routed.owners} else frozenset[str]()
        pending = dict(carried)
        for factor, digits in assignment.items():
            if factor not in present:
                pending |= {a: spec._reduce[factor] for _, a in digits if a is not None and a not in inside}
        out.append(Layout(mesh, place(spec, dims, assignment), list(pending.items())))
    return tuple(out)


def from_results(spec: Spec, layout: Layout) -> Strategy | None:
    """Return the strategy that computes the first result at ``layout`` and leaves no result partial; None if there
    is none.
    """
    # Split the factors as the result has them, and check what that gives.
    mesh, assignment = layout.mesh, project(spec, spec.results[0], layout.without_partial())
    strategy = strategy_of(spec, mesh, assignment)
    if strategy.results[0] != layout or any(result.partial for result in strategy.results):
        return None
    return strategy if meets_requirements(spec, assignment, mesh.axes) else None


def strategy_of(
    spec: Spec, mesh: Mesh, assignment: Assignment, carried: Sequence[tuple[str, str, frozenset[int]]] = ()
) -> Strategy:
    """Return the strategy in which ``assignment`` (factor -> digits) splits the factors. The pending reductions
    ``carried``, as (axis, reduce op, positions of the operands that are partial), pass through.
    """
    operands = tuple(
        Layout(mesh, place(spec, dims, assignment), [(axis, op) for axis, op, partial in carried if at in partial])
        for at, dims in enumerate(spec.operands)
    )
    return Strategy(operands, results_of(spec, mesh, assignment, [(axis, op) for axis, op, _ in carried]))


def infer(spec: Spec, operands: Sequence[Layout], results: Sequence[Layout] = ()) -> tuple[Layout, ...] | str:
    """Return the layouts of the results that follow from the layouts ``operands`` without any reshard. If there are
    none (operands are split differently, or the op does not carry their partial sums), return the reason as text.

    Args:
        results: layouts that decide the split of factors that no operand carries; by default these are not split.
    """
    if not operands:
        return "the op has no tensor operand"
    mesh = operands[0].mesh
    joint: Assignment = {}
    for at, (dims, layout) in enumerate(zip(spec.operands, operands, strict=True)):
        digits_of = project(spec, dims, layout)
        if Layout(mesh, place(spec, dims, digits_of)) != layout.without_partial():  # `project` has dropped an axis
            return f"operand {at} at {layout} splits a factor that must stay whole"
        for factor, digits in digits_of.items():
            if joint.setdefault(factor, digits) != digits:
                return f"operand {at} at {layout} splits factor {factor} differently from an operand before it"
    for dims, layout in zip(spec.results, results, strict=False):
        for factor, digits in project(spec, dims, layout).items():
            joint.setdefault(factor, digits)
    # Each axis may split one factor; one that may split both factors of a `Routed` counts once.
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
    """Return whether the reductions that a strategy leaves pending can be done in any order: those of factors that
    ``assignment`` (factor -> digits) splits, and those ``carried`` through, as (axis, reduce op).
    """
    ops = {op for _, op in carried}
    for factor in assignment:
        if factor in spec._reduce and _axes_of(assignment, factor) and not spec.carried_by_all(factor):
            ops.add(spec._reduce[factor])
    # Reductions of one kind commute, and sums and averages do; a sum of maxima is not the maximum of sums.
    return len(ops) <= 1 or ops == {"sum", "avg"}


def carried_partials(spec: Spec, operands: Sequence[Layout]) -> tuple[tuple[str, str], ...] | str:
    """Return (axis, reduce op) of the partials that pass through from ``operands``, or the reason, as text, why they
    cannot.
    """
    partial_at: dict[tuple[str, str], set[int]] = {}  # (axis, reduce op) -> positions of the operands that have it
    for at, layout in enumerate(operands):
        for pair in layout.partial:
            partial_at.setdefault(pair, set()).add(at)
    for (axis, op), positions in partial_at.items():
        if not carries(spec, op, frozenset(positions)):
            return f"operands {sorted(positions)} are partial ({op} over {axis}), which the op does not carry"
    return tuple(partial_at)


def carries(spec: Spec, op: str, positions: frozenset[int]) -> bool:
    """Return whether a pending reduction ``op`` ("sum", "max") passes through an op to its results, if the operands at
    ``positions``, and no others, have this pending reduction.
    """
    if spec.moves and positions == {0}:  # elements keep their values, whatever reduces them later
        return True
    return op in ("sum", "avg") and positions in spec.linear


# --- enumerating strategies


@dataclass(frozen=True)
class AxisUse:
    """What one mesh axis does in a strategy: it splits factors, or carries a pending reduction through the op. By
    default it does nothing.

    Args:
        splits: the factors that it splits, each with the number of the proposal that says how.
        carried: the reduce op, and the positions of the operands that are partial over the axis.
    """

    splits: tuple[tuple[str, int], ...] = ()
    carried: tuple[str, frozenset[int]] | None = None


def strategies(spec: Spec, operands: Sequence[Layout]) -> Iterator[Strategy]:
    """Yield the strategies whose splits occur in the operands' layouts, the most split first. If some meet the plan's
    requirements (`Routed.required`), yield only these.

    The choices per axis: split the factor that some operand splits; split nothing; or pass through (if operands are
    partial over it and the op is linear in them). If a dense op can use an axis as no operand has it, the axis may
    split another of its factors. The caller adds the cost of redistributing the operands.
    """
    mesh = operands[0].mesh
    # Each operand's layout as a split of the op's factors: factor -> digits.
    proposals = [project(spec, dims, layout) for dims, layout in zip(spec.operands, operands, strict=True)]
    if spec.routed is not None:
        proposals += required_splits(spec, mesh, spec.routed, proposals)
    # The axes that are used. Where operands have an axis and a part of it, each part gets a choice of its own.
    bound = [axis for p in proposals for digits in p.values() for _, axis in digits if axis is not None]
    parts = atoms(mesh, [*bound, *(axis for layout in operands for axis, _ in layout.partial)])
    if any(len(cut) > 1 for cut in parts.values()):
        proposals = [{f: cut_digits(mesh, digits, parts.__getitem__) for f, digits in p.items()} for p in proposals]
    if spec.flops:
        # An axis that operands have, but on no factor that it may split: its ranks would all compute the same.
        unused = {axis for layout in operands for axis in layout.bound if axis in mesh.axes}
        proposals += _further_splits(spec, mesh, unused.difference(split_part(axis)[0] for axis in bound))
    uses = _splits_by_axis(spec, proposals)
    for axis, carried in _carried_by_axis(spec, operands, parts).items():
        uses[axis] = uses.get(axis, []) + carried
    axes = sorted(uses, key=mesh.order)
    # Every combination of one use per axis; the unused axis (`AxisUse()`) comes last. Several may be one strategy.
    fits_by_strategy: dict[Strategy, bool] = {}
    for choice in product(*([*uses[axis], AxisUse()] for axis in axes)):
        candidate = _strategy(spec, mesh, proposals, dict(zip(axes, choice, strict=True)))
        if candidate is not None:
            fits_by_strategy.setdefault(*candidate)
    any_fits = any(fits_by_strategy.values())
    yield from (strategy for strategy, fits in fits_by_strategy.items() if fits or not any_fits)


def _further_splits(spec: Spec, mesh: Mesh, axes: Iterable[str]) -> list[Assignment]:
    """Return proposals (factor -> digits) that split one factor over one of ``axes``, which other proposals do not use:
    one for each axis and each factor that it can split.
    """
    return [
        {factor: canonical(mesh, [Digit(mesh.size(axis), axis), Digit(size // mesh.size(axis))])}
        for axis in sorted(axes, key=mesh.order)
        for factor, size in spec.sizes
        if spec.splittable(factor) and size % mesh.size(axis) == 0 and factor not in spec.in_turn
    ]


def _splits_by_axis(spec: Spec, proposals: Sequence[Assignment]) -> dict[str, list[AxisUse]]:
    """Return axis -> its uses: for each proposal and each factor that the axis splits there, a split of this factor. If
    these are both factors of a `Routed`, also a split of both at once.
    """
    uses: dict[str, list[AxisUse]] = {}
    for number, proposal in enumerate(proposals):
        for factor, digits in proposal.items():
            for _, axis in digits:
                if axis is not None:
                    uses.setdefault(axis, []).append(AxisUse(splits=((factor, number),)))
    if spec.routed is not None:
        for of_axis in uses.values():
            # The last proposal's split of each factor: what the plan requires comes behind what operands have.
            last = {split[0]: split for use in of_axis for split in use.splits}
            if spec.routed.rows in last and spec.routed.owners in last:
                of_axis.append(AxisUse(splits=(last[spec.routed.rows], last[spec.routed.owners])))
    return uses


def _carried_by_axis(
    spec: Spec, operands: Sequence[Layout], parts: Mapping[str, Sequence[str]]
) -> dict[str, list[AxisUse]]:
    """Return axis part -> [the `AxisUse` that carries through the op the reduction that ``operands`` have pending over
    it]; [] if the op cannot carry that reduction. ``parts``: axis -> the parts of it that are used one by one.
    """
    pending: dict[str, dict[str, set[int]]] = {}  # axis -> reduction -> the operands in which it is pending
    for at, layout in enumerate(operands):
        for axis, op in layout.partial:
            for part in parts[axis]:
                pending.setdefault(part, {}).setdefault(op, set()).add(at)
    # Two kinds of reductions over one axis cannot both pass through.
    return {
        axis: [
            AxisUse(carried=(op, frozenset(positions)))
            for op, positions in ops.items()
            if len(ops) == 1 and carries(spec, op, frozenset(positions))
        ]
        for axis, ops in pending.items()
    }


def _strategy(
    spec: Spec, mesh: Mesh, proposals: Sequence[Assignment], uses: Mapping[str, AxisUse]
) -> tuple[Strategy, bool] | None:
    """Return (strategy, whether it meets the requirements of `Routed`) in which each axis has its use in ``uses``.
    Return None if no op can follow these uses together.

    Args:
        proposals: ways to split the factors, factor -> digits each; uses refer to them by number.
    """
    axes_by_split: dict[tuple[str, int], set[str]] = {}  # (factor, number of the proposal) -> axes that split it so
    for axis, use in uses.items():
        for split in use.splits:
            axes_by_split.setdefault(split, set()).add(axis)
    assignment: Assignment = {}
    for (factor, number), axes in axes_by_split.items():
        # The digits of the proposal, with those of axes that are used otherwise local.
        chosen = tuple(d if d.axis in axes else Digit(d.radix) for d in proposals[number][factor])
        merged = merge(mesh, assignment.get(factor), canonical(mesh, chosen))
        if merged is None:
            return None
        assignment[factor] = merged
    carried = [(axis, *use.carried) for axis, use in uses.items() if use.carried is not None]
    # Pending sums and maxima may not meet in a result, nor may an axis and a part of it in a `Routed`.
    if not commute(spec, assignment, [(axis, op) for axis, op, _ in carried]) or overlaps(spec, mesh, assignment):
        return None
    return strategy_of(spec, mesh, assignment, carried), meets_requirements(spec, assignment, mesh.axes)


def merge(mesh: Mesh, digits: Digits | None, other: Digits) -> Digits | None:
    """Return the digits of a factor that is split as in ``digits`` (None: not split) and also as in ``other``. Return
    None if the sizes do not fit together, or if a digit would have two axes.
    """
    if digits is None:
        return other
    # Cut both at the borders of both, so that they have digits of the same radices.
    fine, fine_other = refine(mesh, digits, strides(other)), refine(mesh, other, strides(digits))
    if fine is None or fine_other is None:
        return None
    out = []
    for a, b in zip(fine, fine_other, strict=True):
        if a.axis is not None and b.axis is not None and a.axis != b.axis:
            return None
        out.append(a if a.axis is not None else b)
    return canonical(mesh, out)


def atoms(mesh: Mesh, axes: Sequence[str]) -> dict[str, list[str]]:
    """Cut each of ``axes`` (axes and parts of axes) so finely that any two pieces are equal or disjoint; return axis ->
    its pieces.
    """
    edges = mesh.edges(axes)
    return {axis: mesh.parts(axis, edges) for axis in axes}
