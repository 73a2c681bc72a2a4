"""Two factors that one axis may split at once, because what one needs of the other is sent."""

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
    """Two factors that one axis may split at once, since elements of one are sent to where the other's lie.

    Args:
        rows, owners: the factors.
        elements: how many elements each row's way there and back takes, where rows are sent to their owners.
        moving: operands that all ranks of the axis get, where owners are sent to all rows.
        trips: how often each of these is sent.
        around: they go from rank to rank, while what has come is computed with; else they are gathered.
        way: "send": an axis that splits the owners splits the rows too; "gather": none does; "auto": as is cheapest.
        held: by axis, the factors that it may split together: it splits some of these wherever it can.
    """

    rows: str
    owners: str
    elements: int = 0
    moving: tuple[int, ...] = ()
    trips: int = 1
    around: bool = False
    way: str = "auto"
    held: tuple[tuple[str, tuple[frozenset[str], ...]], ...] = ()


class Loops(Protocol):
    """A `shardc.rules.spec.Spec`, as far as it is asked here."""

    @property
    def routed(self) -> Routed | None: ...
    @property
    def sizes(self) -> tuple[tuple[str, int], ...]: ...
    def size(self, factor: str) -> int: ...


def routed_axes(spec: Loops, assignment: Mapping[str, Digits]) -> frozenset[str]:
    """The axes over which an op sends rows: they split both factors of its `Routed`."""
    if spec.routed is None:
        return frozenset()
    rows, owners = (
        {axis for _, axis in assignment.get(factor, ()) if axis} for factor in (spec.routed.rows, spec.routed.owners)
    )
    return frozenset(rows & owners)


def as_held(spec: Loops, mesh: Mesh, routed: Routed, proposals: Sequence[Assignment]) -> list[Assignment]:
    """How axes that are held may split factors, besides how operands have it."""
    out: list[Assignment] = []
    pair = (routed.rows, routed.owners)
    for held, form in ((axis, form) for axis, forms in routed.held for form in forms):
        if form == frozenset(pair):
            for one, other in (pair, pair[::-1]) if spec.size(pair[0]) == spec.size(pair[1]) else ():
                out += [{other: p[one]} for p in proposals if any(d.axis == held for d in p.get(one, ()))]
            continue
        left, fresh = held, {}
        for factor in sorted(form & dict(spec.sizes).keys()):
            size = spec.size(factor)
            if (part := gcd(size, mesh.size(left))) > 1:
                mine, left = mesh.cut(left, part)
                fresh[factor] = canonical(mesh, [Digit(part, mine), Digit(size // part)])
        if mesh.size(left) == 1 and fresh.keys() == form:
            out.append(fresh)
    return list({str(one): one for one in out}.values())


def in_part(spec: Loops, mesh: Mesh, assignment: Mapping[str, Digits]) -> bool:
    """Whether an axis splits both factors of a `Routed`, and one of them by a part of it only."""
    if spec.routed is None:
        return False
    sides = (spec.routed.rows, spec.routed.owners)
    rows, owners = ([axis for _, axis in assignment.get(factor, ()) if axis] for factor in sides)
    return any(a != b and mesh.overlap(a, b) for a in rows for b in owners)


def as_said(spec: Loops, assignment: Mapping[str, Digits], axes: Iterable[str]) -> bool:
    """Whether an op's rows travel as is asked for, and each of ``axes`` that is held splits what it should."""
    if (routed := spec.routed) is None:
        return True
    owners = {axis for _, axis in assignment.get(routed.owners, ()) if axis}
    sent = routed_axes(spec, assignment)
    for held, forms in routed.held:
        split = {f for f, digits in assignment.items() for _, axis in digits if axis and split_part(axis)[0] == held}
        if held in axes and split not in forms:
            return False
    return not (routed.way == "gather" and sent) and not (routed.way == "send" and owners - sent)
