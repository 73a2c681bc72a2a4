"""Checks data-movement ops (all-gather, shard, ...): whether each op of `shardc.ir.ops` may change the layout of its
operand as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import prod

from shardc.ir import ops
from shardc.ir.layout import Digit, Digits, Layout, cut_digits


def broken_step(
    op: Callable[..., object], source: Layout, result: Layout, axes: Sequence[str], reduce_op: str
) -> str | None:
    """Check that ``op`` over ``axes`` turns the layout ``source`` into ``result``. Return None if it does, else the
    reason why not as text.

    Args:
        op: one of `ops.COLLECTIVES` or `ops.LOCAL_MOVES`.
        source, result: layouts of operand and result, of one global shape.
        axes: the mesh axes (or parts) of the op.
        reduce_op: the reduction that it performs or leaves pending.
    """
    mesh = source.mesh
    unknown = [axis for axis in axes if axis not in mesh]
    if unknown:
        return f"axis {unknown[0]!r} is not on the mesh {mesh}"
    if source.numel == 0:
        return None
    return _Step(source, result, axes, reduce_op).broken(op)


class _Step:
    """One data-movement op to check. Mesh axes are cut into *atoms*: parts that are so small that both layouts and the
    op's axes consist of them.
    """

    def __init__(self, source: Layout, result: Layout, axes: Sequence[str], reduce_op: str) -> None:
        self.mesh, self.source, self.result = source.mesh, source, result
        self.edges = self.mesh.edges((*source.axes, *result.axes, *axes))
        self.axes, self.op = ",".join(axes), reduce_op
        self.over = [atom for axis in axes for atom in self.atoms(axis)]

    def broken(self, op: Callable[..., object]) -> str | None:
        """Return None if ``op`` turns the operand's layout into the result's, else the reason why not as text."""
        source, result = self.source, self.result
        if op in (ops.all_gather, ops.shard):
            split, whole = (source, result) if op is ops.all_gather else (result, source)
            return self.unbinds(split, whole) or self.same_pending()
        if op is ops.reduce_scatter:
            return self.unbinds(result, source) or self.reduces(source, result)
        if op in (ops.all_reduce, ops.to_partial):
            pending, done = (source, result) if op is ops.all_reduce else (result, source)
            return self.same_dims() or self.reduces(pending, done)
        if op is ops.permute_ranks:  # one axis may take another's place
            used = self.missing(self.bound(source) | self.bound(result), f"neither {source} nor {result}")
            return used or self.moves() or self.whole_shards() or self.same_pending()
        return self.splits(source) or self.splits(result) or self.moves() or self.same_pending()

    # --- conditions of the ops; each returns None if it holds, else a reason as text

    def missing(self, bound: set[str], what: str) -> str | None:
        """Return None if all of the op's axes are in ``bound``, else the reason "AXIS splits ``what``". ``what`` is a
        text such as "no dim of the operand".
        """
        lost = next((atom for atom in self.over if atom not in bound), None)
        return None if lost is None else f"{lost!r} splits {what}"

    def splits(self, layout: Layout) -> str | None:
        """Check that all of the op's axes split dims of ``layout``, that of the operand or the result. Return None if
        they do, else a reason as text.
        """
        what = "the operand" if layout is self.source else "the result"
        return self.missing(self.bound(layout), f"no dim of {what}, {layout}")

    def unbinds(self, split: Layout, whole: Layout) -> str | None:
        """Check that the dims of ``split`` without the op's axes are those of ``whole``. Return None if they are, else
        a reason as text.
        """
        expected = self.without(split)
        if (lost := self.splits(split)) is not None or expected.dims == whole.dims:
            return lost
        return f"[{split.dims_text()}] without {self.axes} is [{expected.dims_text()}], not [{whole.dims_text()}]"

    def moves(self) -> str | None:
        """Check that operand and result differ in which dims the op's axes split, and in nothing else. Return None if
        so, else a reason as text.
        """
        if self.source.dims == self.result.dims:
            return "nothing moves"
        before, after = self.without(self.source), self.without(self.result)
        if before.dims == after.dims:
            return None
        return f"without {self.axes}, [{before.dims_text()}] becomes [{after.dims_text()}]"

    def whole_shards(self) -> str | None:
        """Check that each shard of the result is a whole shard of the operand, on any rank. Return None if so, else a
        reason as text.
        """
        if _cuts(self.source) == _cuts(self.result):
            return None
        return f"the shards of {self.source} are not those of {self.result}"

    def reduces(self, pending: Layout, done: Layout) -> str | None:
        """Check that ``pending`` has the pending reductions of ``done`` and, over each of the op's axes, the op's
        reduction. Return None if so, else a reason as text.
        """
        left = self.pending(done)
        if not set(self.over) & set(left) and self.pending(pending) == left | dict.fromkeys(self.over, self.op):
            return None
        before, after = _pending_text(pending), _pending_text(done)
        return f"a {self.op} over {self.axes} does not stand between {before} pending and {after} pending"

    def same_dims(self) -> str | None:
        """Check that operand and result have the same dims. Return None if so, else a reason as text."""
        if self.source.dims == self.result.dims:
            return None
        return f"the dims change from [{self.source.dims_text()}] to [{self.result.dims_text()}]"

    def same_pending(self) -> str | None:
        """Check that operand and result have the same pending reductions. Return None if so, else a reason as text."""
        if self.pending(self.source) == self.pending(self.result):
            return None
        return f"{_pending_text(self.source)} pending becomes {_pending_text(self.result)} pending"

    # --- layouts in atoms

    def atoms(self, axis: str) -> list[str]:
        """Return the atoms of ``axis``, major first: the parts into which the op's layouts and axes cut it. An axis of
        size 1 has none.
        """
        return self.mesh.parts(axis, self.edges)

    def digits(self, digits: Digits) -> Digits:
        """Return the ``digits`` of a dim with each digit that an axis splits cut into one digit for each atom."""
        return cut_digits(self.mesh, digits, self.atoms)

    def bound(self, layout: Layout) -> set[str]:
        """Return the atoms (parts of mesh axes) that split a dim of ``layout``."""
        return {digit.axis for digits in layout.dims for digit in self.digits(digits) if digit.axis is not None}

    def pending(self, layout: Layout) -> dict[str, str]:
        """Return the pending reductions of ``layout`` as atom (part of a mesh axis) -> reduce op."""
        return {atom: op for axis, op in layout.partial for atom in self.atoms(axis)}

    def without(self, layout: Layout) -> Layout:
        """Return ``layout`` with the op's axes removed from its dims."""
        dims = [
            [Digit(digit.radix) if digit.axis in self.over else digit for digit in self.digits(digits)]
            for digits in layout.dims
        ]
        return layout.replace(dims=dims)


def _pending_text(layout: Layout) -> str:
    """Return the pending reductions of ``layout`` as text."""
    return layout.partial_text() or "nothing"


def _cuts(layout: Layout) -> list[list[tuple[bool, int]]]:
    """Return each dim of ``layout`` as runs of digits that are all split or all local. A run is given as (whether it is
    split, product of its radices).
    """
    return [
        [(bound, prod(d.radix for d in run)) for bound, run in groupby(digits, lambda d: d.axis is not None)]
        for digits in layout.dims
    ]
