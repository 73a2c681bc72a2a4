"""Check of data-movement ops: how each op of `shardc.ir.ops` may change the layout of its operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import prod

from shardc.ir import ops
from shardc.ir.layout import Digit, Digits, Layout, cut_digits


def broken_step(
    op: Callable[..., object], source: Layout, result: Layout, axes: Sequence[str], reduce_op: str
) -> str | None:
    """Return why, as text, ``op`` over ``axes`` does not turn ``source`` into ``result``, or None if it does.

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
    """A data-movement op with each mesh axis cut into *atoms*: wherever one of its layouts or its own axes cut it."""

    def __init__(self, source: Layout, result: Layout, axes: Sequence[str], reduce_op: str) -> None:
        self.mesh, self.source, self.result = source.mesh, source, result
        self.edges = self.mesh.edges((*source.axes, *result.axes, *axes))
        self.axes, self.op = ",".join(axes), reduce_op
        self.over = [atom for axis in axes for atom in self.atoms(axis)]

    def broken(self, op: Callable[..., object]) -> str | None:
        """Return why, as text, ``op`` does not turn the operand's layout into the result's; None if it does."""
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
        """Return the reason "AXIS splits ``what``" if one of the op's axes is not among ``bound``, else None; ``what``
        is a text such as "no dim of the operand".
        """
        lost = next((atom for atom in self.over if atom not in bound), None)
        return None if lost is None else f"{lost!r} splits {what}"

    def splits(self, layout: Layout) -> str | None:
        """Return a reason, as text, if not all of the op's axes split the operand or result with this ``layout``; else
        None.
        """
        what = "the operand" if layout is self.source else "the result"
        return self.missing(self.bound(layout), f"no dim of {what}, {layout}")

    def unbinds(self, split: Layout, whole: Layout) -> str | None:
        """Return a reason, as text, if ``whole`` is not ``split`` without the op's axes in its dims; else None."""
        expected = self.without(split)
        if (lost := self.splits(split)) is not None or expected.dims == whole.dims:
            return lost
        return f"[{split.dims_text()}] without {self.axes} is [{expected.dims_text()}], not [{whole.dims_text()}]"

    def moves(self) -> str | None:
        """Return a reason, as text, if the layouts of operand and result are equal, or differ in digits of other axes
        than the op's; else None.
        """
        if self.source.dims == self.result.dims:
            return "nothing moves"
        before, after = self.without(self.source), self.without(self.result)
        if before.dims == after.dims:
            return None
        return f"without {self.axes}, [{before.dims_text()}] becomes [{after.dims_text()}]"

    def whole_shards(self) -> str | None:
        """Return a reason, as text, if the result's shards are not the operand's shards on other ranks; else None."""
        if _cuts(self.source) == _cuts(self.result):
            return None
        return f"the shards of {self.source} are not those of {self.result}"

    def reduces(self, pending: Layout, done: Layout) -> str | None:
        """Return a reason, as text, if ``done`` is not ``pending`` without the reductions over the op's axes; else
        None.
        """
        left = self.pending(done)
        if not set(self.over) & set(left) and self.pending(pending) == left | dict.fromkeys(self.over, self.op):
            return None
        before, after = _pending_text(pending), _pending_text(done)
        return f"a {self.op} over {self.axes} does not stand between {before} pending and {after} pending"

    def same_dims(self) -> str | None:
        """Return a reason, as text, if the dims of operand and result differ; else None."""
        if self.source.dims == self.result.dims:
            return None
        return f"the dims change from [{self.source.dims_text()}] to [{self.result.dims_text()}]"

    def same_pending(self) -> str | None:
        """Return a reason, as text, if the pending reductions of operand and result differ; else None."""
        if self.pending(self.source) == self.pending(self.result):
            return None
        return f"{_pending_text(self.source)} pending becomes {_pending_text(self.result)} pending"

    # --- layouts in atoms

    def atoms(self, axis: str) -> list[str]:
        """Return the parts into which all layouts of the op together cut ``axis``, major first; none for size 1."""
        return self.mesh.parts(axis, self.edges)

    def digits(self, digits: Digits) -> Digits:
        """Return the ``digits`` of a dim, in which each digit that an axis splits is cut into atoms."""
        return cut_digits(self.mesh, digits, self.atoms)

    def bound(self, layout: Layout) -> set[str]:
        """Return the atoms that split a dim of ``layout``."""
        return {digit.axis for digits in layout.dims for digit in self.digits(digits) if digit.axis is not None}

    def pending(self, layout: Layout) -> dict[str, str]:
        """Return atom -> reduce op of the pending reductions of ``layout``."""
        return {atom: op for axis, op in layout.partial for atom in self.atoms(axis)}

    def without(self, layout: Layout) -> Layout:
        """Return ``layout`` without the step's axes in its dims."""
        dims = [
            [Digit(digit.radix) if digit.axis in self.over else digit for digit in self.digits(digits)]
            for digits in layout.dims
        ]
        return layout.replace(dims=dims)


def _pending_text(layout: Layout) -> str:
    """Return the pending reductions of ``layout`` as text."""
    return layout.partial_text() or "nothing"


def _cuts(layout: Layout) -> list[list[tuple[bool, int]]]:
    """Return, for each dim of ``layout``, its longest runs of digits that are all split or all local, each as (whether
    split, number of values).
    """
    return [
        [(bound, prod(d.radix for d in run)) for bound, run in groupby(digits, lambda d: d.axis is not None)]
        for digits in layout.dims
    ]
