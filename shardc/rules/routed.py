"""Two factors that one axis may split at once because the op exchanges data between their ranks.

Two ops do: routed experts (tokens and experts: expert parallelism) and attention (queries and keys: context
parallelism).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol

from shardc.ir.layout import Digit, Digits, canonical
from shardc.ir.mesh import Mesh, split_part

Assignment = dict[str, Digits]  # factor -> its digits


@dataclass(frozen=True)
class Routed:
    """A pair of factors that one axis may split together: the op communicates between the ranks of that axis itself.

    Args:
        rows, owners: the factors (tokens and experts; queries and keys).
        elements: elements sent per row, there and back, if rows are sent to the rank of their owner.
        moving: positions of the operands that every rank receives, if owners are sent to all rows.
        trips: how often each of these is sent.
        around: they are passed from rank to rank during the computation (ring); else they are gathered first.
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


class SpecLike(Protocol):
    """Interface of `shardc.rules.spec.Spec`, as far as this module reads it."""

    @property
    def routed(self) -> Routed | None: ...
    @property
    def sizes(self) -> tuple[tuple[str, int], ...]: ...
    def size(self, factor: str) -> int: ...


def routed_axes(spec: SpecLike, assignment: Mapping[str, Digits]) -> frozenset[str]:
    """Return the axes over which an op exchanges data: those that split both factors of its `Routed`."""
    if spec.routed is None:
        return frozenset()
    rows, owners = (
        {axis for _, axis in assignment.get(factor, ()) if axis} for factor in (spec.routed.rows, spec.routed.owners)
    )
    return frozenset(rows & owners)


def required_splits(spec: SpecLike, mesh: Mesh, routed: Routed, proposals: Sequence[Assignment]) -> list[Assignment]:
    """Return assignments in which an axis splits what `Routed.required` asks for, from ``proposals``."""
    out: list[Assignment] = []
    pair = (routed.rows, routed.owners)
    for axis, factors in ((axis, factors) for axis, sets in routed.required for factors in sets):
        if factors == frozenset(pair):
            # Copy the digits from the factor that an operand splits to its partner.
            for source, target in (pair, pair[::-1]) if spec.size(pair[0]) == spec.size(pair[1]) else ():
                out += [{target: p[source]} for p in proposals if any(d.axis == axis for d in p.get(source, ()))]
            continue
        left, fresh = axis, {}
        for factor in sorted(factors & dict(spec.sizes).keys()):
            size = spec.size(factor)
            if (part := gcd(size, mesh.size(left))) > 1:
                mine, left = mesh.cut(left, part)
                fresh[factor] = canonical(mesh, [Digit(part, mine), Digit(size // part)])
        if mesh.size(left) == 1 and fresh.keys() == factors:
            out.append(fresh)
    return list({str(assignment): assignment for assignment in out}.values())


def in_part(spec: SpecLike, mesh: Mesh, assignment: Mapping[str, Digits]) -> bool:
    """Return whether the axes of the two factors of a `Routed` overlap without being equal (one is a part of the
    other).
    """
    if spec.routed is None:
        return False
    sides = (spec.routed.rows, spec.routed.owners)
    rows, owners = ([axis for _, axis in assignment.get(factor, ()) if axis] for factor in sides)
    return any(a != b and mesh.overlap(a, b) for a in rows for b in owners)


def meets_requirements(spec: SpecLike, assignment: Mapping[str, Digits], axes: Iterable[str]) -> bool:
    """Return whether ``assignment`` agrees with `Routed.way`, and with `Routed.required` for each of ``axes``."""
    if (routed := spec.routed) is None:
        return True
    owners = {axis for _, axis in assignment.get(routed.owners, ()) if axis}
    sent = routed_axes(spec, assignment)
    for required, sets in routed.required:
        split = {f for f, digits in assignment.items() for _, a in digits if a and split_part(a)[0] == required}
        if required in axes and split not in sets:
            return False
    return not (routed.way == "gather" and sent) and not (routed.way == "send" and owners - sent)
