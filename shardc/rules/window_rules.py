"""Rules of shifts and convolutions that read a few neighbours (`shardc.custom_ops.window_ops`).

The dim of these neighbours may be split if each rank has one piece of it, in order (`Spec.ordered`). A rank then gets
the edges of the pieces before and after its own: messages between neighbours, of as many elements as the
window reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from operator import getitem

import torch

import shardc.custom_ops.window_ops  # noqa: F401  (the ops)
from shardc.ir.comm import WAIT
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.rules.notation import FREE, WHOLE, Loops
from shardc.rules.positions import positions, to_local_indices, zero_unless
from shardc.rules.rule import ANY, Call, Emitted, Local, Rule, table
from shardc.rules.spec import Dims, Spec

aten = torch.ops.aten


def _group_ranks(mesh: Mesh, axes: Sequence[str]) -> list[int]:
    """Return, for each piece of a dim that ``axes`` split (major to minor), the index in their group of the rank that
    holds it. A group numbers its ranks by the mesh's order of axes.
    """
    by_piece = list(product(*(range(mesh.size(axis)) for axis in axes)))  # indices of each piece's rank along ``axes``
    in_mesh_order = sorted(range(len(axes)), key=lambda at: mesh.order(axes[at]))  # positions in ``axes``
    by_group_rank = sorted(by_piece, key=lambda indices: [indices[at] for at in in_mesh_order])
    group_rank = {indices: rank for rank, indices in enumerate(by_group_rank)}
    return [group_rank[indices] for indices in by_piece]


class Pieces:
    """One dim of an operand as pieces, one contiguous piece per rank. The methods emit what a rank needs of other
    ranks' pieces.

    Args:
        local: the op.
        at: position of the operand.
        dim: the dim.

    Attributes:
        run: emits an op on local tensors.
        layout: layout of the operand.
        axes: axes that split the dim, major to minor; () if it is whole, a single piece.
        ranks, group: number of pieces, and name of the process group of the ranks that hold them.
        members: for each piece, in the order of the dim, the index in the group of the rank that holds it.
        size: elements of a piece, padding included.
        true_size: elements of the dim, without padding, which is behind them.
    """

    def __init__(self, local: Local, at: int, dim: int) -> None:
        self.local, self.run, self.dim = local, local.builder.call, dim
        self.layout: Layout = local.operands[at]
        self.axes = self.layout.dim_axes(dim)
        mesh = self.layout.mesh
        in_mesh_order = tuple(sorted(self.axes, key=mesh.order))
        self.ranks, self.group = local.builder.group(in_mesh_order) if self.axes else (1, "")
        self.members = _group_ranks(mesh, self.axes)
        self.size = self.layout.local_shape[dim]
        # `Local.true_size` numbers dims through all operands.
        dims_before = sum(len(layout.shape) for layout in local.operands[:at])
        self.true_size: int = local.true_size(dims_before + dim, self.layout.shape[dim])

    def with_zero_padding(self, x: Emitted) -> Emitted:
        """Return ``x`` with zeros in the padding of the dim, behind its true size."""
        if self.true_size == self.layout.shape[self.dim]:
            return x
        inside = self.run(aten.lt.Scalar, positions(self.local, self.layout, self.dim, None), self.true_size)
        return zero_unless(self.local, self._broadcastable(inside, self.size), x)

    def from_rank(self, x: Emitted, begin: int, end: int, away: int) -> Emitted | None:
        """Emit and return elements ``begin`` to ``end`` of another rank's piece, which is ``away`` places after this
        rank's along the dim (before it if negative). Return zeros on ranks without such a neighbour, None if no rank
        has one or there are no such elements.
        """
        if begin >= end or abs(away) >= self.ranks:
            return None
        x = self.run(aten.slice.Tensor, x, self.dim, begin, end)
        if away == 0:
            return x
        # Destinations: the rank with piece number ``at`` sends to the one for which that is ``away`` places after.
        to = [0] * self.ranks
        for at, rank in enumerate(self.members):
            to[rank] = self.members[(at - away) % self.ranks]
        x = self.run(aten.clone.default, x, memory_format=torch.contiguous_format)
        x = self.run(WAIT, self.run(torch.ops.shardc.permute_ranks.default, x, to, self.group))
        # What came around the end of the dim is zero.
        piece, end_of_senders = self.local.builder.coordinate(self.axes), self.ranks - away
        exists = self.run(aten.ge.Scalar, piece, -away) if away < 0 else self.run(aten.lt.Scalar, piece, end_of_senders)
        return zero_unless(self.local, self._broadcastable(exists, 1), x)

    def extended(self, x: Emitted, before: int, after: int) -> Emitted:
        """Return ``x`` (this rank's piece) extended by its neighbours: ``before`` elements in front and ``after``
        elements behind. Beyond the ends of the dim they are zeros.
        """
        # A window that reaches beyond the last element has to find zeros in the padding.
        if after:
            x = self.with_zero_padding(x)
        parts, shape = [x], self.layout.shape[self.dim]
        # Number of elements from other pieces, in front and behind. Farther than these there are only zeros.
        reach = [min(count, shape - self.size) for count in (before, after)]
        for side, count in zip((-1, 1), reach, strict=True):  # in front, then behind
            # Neighbours from the nearest to the farthest that the window reaches; of the last maybe an edge only.
            for away in range(1, -(-count // self.size) + 1 if self.size else 1):
                edge = min(count - (away - 1) * self.size, self.size)
                begin = self.size - edge if side < 0 else 0
                part = self.from_rank(x, begin, begin + edge, side * away)
                assert part is not None
                parts = [part, *parts] if side < 0 else [*parts, part]
        if len(parts) > 1:
            x = self.run(aten.cat.default, parts, self.dim)
        return self._padded(x, before - reach[0], after - reach[1])

    def shifted(self, x: Emitted, by: int) -> Emitted:
        """Return this rank's piece of the whole dim shifted by ``by`` places towards its end (towards its begin if
        negative). Elements that nothing is shifted to are zero.
        """
        if by < 0:  # padding behind the last element moves to places of elements
            x = self.with_zero_padding(x)
        # The shifted piece begins at element ``begin`` of the piece ``away`` places on, and ends in the next.
        away, begin = divmod(-by, self.size)
        parts = [self.from_rank(x, begin, self.size, away), self.from_rank(x, 0, begin, away + 1)]
        present = [part for part in parts if part is not None]
        if not present:
            return self.run(aten.full_like.default, x, 0)
        shifted = self.run(aten.cat.default, present, self.dim) if len(present) > 1 else present[0]
        # A part that no rank has is beyond an end of the dim: zeros in its place.
        short = self.size - self.local.builder.shape(shifted)[self.dim]
        return self._padded(shifted, *((0, short) if parts[1] is None else (short, 0)))

    def with_fill(self, shifted: Emitted, fill: Emitted, by: int) -> Emitted:
        """Fill the places that a shift by ``by`` left open: at the begin of the dim if ``by`` is positive, else at its
        end. Return ``shifted`` (the shifted piece) with the elements of ``fill`` there. Each rank has all of ``fill``,
        ``abs(by)`` elements along the dim.
        """
        # For each element of the piece: its index in ``fill``, and whether it is taken from there.
        count, at = abs(by), positions(self.local, self.layout, self.dim, None)
        if by > 0:
            enters = self.run(aten.lt.Scalar, at, count)
        else:
            at = self.run(aten.sub.Tensor, at, self.true_size - count)
            enters = self.run(aten.ge.Scalar, at, 0)
        index = self.run(aten.clamp.default, at, 0, count - 1)  # of the others any index will do
        entering = self.run(aten.index_select.default, fill, self.dim, index)
        return self.run(aten.where.self, self._broadcastable(enters, self.size), entering, shifted)

    def earlier_sums(self, sums: Emitted, reverse: bool) -> Emitted:
        """Return the total of all pieces before this rank's (after it if ``reverse``). ``sums`` are the running sums of
        this rank's piece.

        The result has one element along the dim. A piece's total is the last of its running sums, or the first.
        """
        begin, end = (0, 1) if reverse else (self.size - 1, self.size)
        total = self.run(aten.slice.Tensor, sums, self.dim, begin, end)
        shape = self.local.builder.shape(total)
        total = self.run(aten.clone.default, total, memory_format=torch.contiguous_format)
        started = self.run(torch.ops._c10d_functional.all_gather_into_tensor.default, total, self.ranks, self.group)
        totals = self.run(aten.reshape.default, self.run(WAIT, started), [self.ranks, *shape])
        piece = self.local.builder.coordinate(self.axes)
        added = None
        # The total of piece number ``at``, which is on this ``rank`` of the group, counts on ranks with a later piece
        # (if ``reverse``, an earlier one). That of the last piece counts on none.
        for at, rank in enumerate(self.members[1:] if reverse else self.members[:-1], int(reverse)):
            counts = self.run(aten.lt.Scalar, piece, at) if reverse else self.run(aten.gt.Scalar, piece, at)
            counts = self.run(aten.reshape.default, counts, [1] * self.layout.ndim)
            term = zero_unless(self.local, counts, self.run(aten.select.int, totals, 0, rank))
            added = term if added is None else self.run(aten.add.Tensor, added, term)
        return added

    def _padded(self, x: Emitted, before: int, after: int) -> Emitted:
        """Emit and return ``x`` with ``before`` and ``after`` zeros at the ends of the dim."""
        if not before and not after:
            return x
        pad = [0, 0] * (self.layout.ndim - 1 - self.dim) + [before, after]
        return self.run(aten.constant_pad_nd.default, x, pad, 0)

    def _broadcastable(self, mask: Emitted, size: int) -> Emitted:
        """Return ``mask``, a bool for each of ``size`` elements of the split dim, with dims of size 1 for the dims
        behind that, so that it broadcasts.
        """
        return self.run(aten.reshape.default, mask, [size, *[1] * (self.layout.ndim - 1 - self.dim)])


def _shift(call: Call) -> Spec:
    """Return the spec of a shift along a dim. If the dim is split, each rank must have one contiguous piece of it."""
    loops = Loops(call)
    shape, dim = loops.shapes[0], call["dim"]
    x = loops.dims("d", shape, but={dim: loops.ordered("l", shape[dim])})
    if len(loops.shapes) == 1:  # without ``fill``; a partial sum passes through
        return loops.spec([x], [x], linear=[{0}])
    fill = (*x[:dim], loops.dim("fill", loops.shapes[1][dim], WHOLE), *x[dim + 1 :])
    # A partial sum passes through if both operands are one.
    return loops.spec([x, fill], [x], linear=[{0, 1}])


def _shift_local(local: Local) -> Emitted:
    """Emit and return a shift, in which this rank gets the elements that come in from its neighbours."""
    pieces, by, fill = Pieces(local, 0, local.call["dim"]), local.call["by"], local.operand("fill")
    shifted = pieces.shifted(local.operand("x"), by)
    return shifted if fill is None else pieces.with_fill(shifted, fill, by)


def _edge(call: Call) -> Spec:
    """Return the spec of a slice of a dim that may be split: a split leaves a partial sum, in which each rank has its
    own elements of the slice, and zeros.
    """
    loops = Loops(call)
    shape, dim = loops.shapes[0], call["dim"]
    x = loops.dims("d", shape, but={dim: loops.indexed("l", shape[dim], "sum")})
    edge = (*x[:dim], loops.dim("edge", loops.result_shapes[0][dim], WHOLE), *x[dim + 1 :])
    return loops.spec([x], [edge], linear=[{0}])  # a partial sum passes through


def _edge_local(local: Local) -> Emitted:
    """Emit and return a slice of a split dim, in full size on each rank: elements that other ranks hold are zero."""
    run, dim, layout = local.builder.call, local.call["dim"], local.operands[0]
    begin, end = local.call["begin"], local.call["end"]
    x = local.operand("x")
    if not layout.dim_axes(dim):  # every rank has all of the slice
        return run(aten.slice.Tensor, x, dim, begin, end)
    index, mask = to_local_indices(
        local, layout, dim, run(aten.arange.start, begin, end, dtype=torch.int64, device=local.builder.device)
    )
    mask = run(aten.reshape.default, mask, [end - begin, *[1] * (layout.ndim - 1 - dim)])
    return zero_unless(local, mask, run(aten.index_select.default, x, dim, index))


def _cumsum(call: Call) -> Spec:
    """Return the spec of a running sum along a dim. If the dim is split, each rank must have one contiguous piece of
    it.
    """
    loops = Loops(call)
    shape = loops.shapes[0]
    x = loops.dims("d", shape, but={call["dim"]: loops.ordered("l", shape[call["dim"]])})
    return loops.spec([x], [x], linear=[{0}])  # a partial sum passes through


def _cumsum_local(local: Local) -> Emitted:
    """Emit and return the running sums of this rank's piece, plus the totals of the pieces before (after it if
    ``reverse``).
    """
    run, dim, reverse = local.builder.call, local.call["dim"], local.call["reverse"]
    pieces, x = Pieces(local, 0, dim), local.operand("x")
    if reverse:  # sums from the end, where padding would be added first
        x = run(aten.flip.default, pieces.with_zero_padding(x), [dim])
    sums = run(aten.cumsum.default, x, dim)
    if reverse:
        sums = run(aten.flip.default, sums, [dim])
    return run(aten.add.Tensor, sums, pieces.earlier_sums(sums, reverse)) if pieces.axes else sums


def _dims(loops: Loops, x: tuple[int, ...], w: tuple[int, ...], *, backward: bool = False) -> tuple[Dims, Dims, Dims]:
    """Return the factors of the input ``n (g c) l``, the weight ``(g o) c k`` and the output ``n (g o) l`` of a
    convolution: rows n, groups g with c channels in and o channels out each, sequence l, window k.

    Args:
        x, w: shapes of input and weight.
        backward: whether the op computes the weight's gradient, a sum over n and l; else the output, a sum over c.
    """
    groups = loops.call["groups"]
    n, line = loops.dim("n", x[0], "sum" if backward else FREE), loops.ordered("l", x[2], "sum" if backward else FREE)
    g, o, k = loops.dim("g", groups), loops.dim("o", w[0] // groups), loops.dim("k", w[2], WHOLE)
    c = loops.dim("c", w[1], FREE if backward else "sum")
    return (n, (*g, *c), line), ((*g, *o), c, k), (n, (*g, *o), line)


def _convolve(call: Call) -> Spec:
    """Return the spec of a convolution along a sequence that may be split."""
    loops = Loops(call)
    x, w, y = _dims(loops, *loops.shapes)
    # A partial sum passes through if it is the input, or the weight, but not both.
    return loops.spec([x, w], [y], linear=[{0}, {1}])


def _convolve_weight(call: Call) -> Spec:
    """Return the spec of the gradient of the weight of `_convolve`: a split sequence leaves a partial sum."""
    loops = Loops(call)
    x, w, y = _dims(loops, *loops.shapes[1:], backward=True)
    # Operands: gradient of the output, input, weight. Either of the first two may be a partial sum.
    return loops.spec([y, x, w], [w], linear=[{0}, {1}])


def _geometry(local: Local) -> tuple[object, ...]:
    """Return the last arguments of the local ``aten.convolution``: stride, padding, dilation, transposed, output
    padding, groups. There is no padding, as `_extended` adds the edges of the piece.
    """
    # A split of the groups leaves this rank some of them: its channels in / channels in per group.
    groups = local.operand_layout("x").local_shape[1] // local.operand_layout("weight").local_shape[1]
    return [1], [0], [local.call["dilation"]], False, [0], groups


def _extended(local: Local) -> Emitted:
    """Emit and return the convolution's input, this rank's piece of the sequence (dim 2), with the edges of the
    neighbouring pieces that the window reaches.
    """
    at = local.call.position("x")
    assert at is not None
    return Pieces(local, at, 2).extended(local.operand("x"), local.call["before"], local.call["after"])


def _convolve_local(local: Local) -> Emitted:
    """Emit and return the convolution of this rank's piece and the edges of its neighbours' pieces."""
    return local.builder.call(
        aten.convolution.default, _extended(local), local.operand("weight"), None, *_geometry(local)
    )


def _convolve_weight_local(local: Local) -> Emitted:
    """Emit and return the gradient of the weight from this rank's piece."""
    run, weight = local.builder.call, local.operand("weight")
    grad, mask = local.operand("grad"), [False, True, False]  # of the input, weight and bias only the second
    grads = run(aten.convolution_backward.default, grad, _extended(local), weight, None, *_geometry(local), mask)
    return run(getitem, grads, 1)


_TEXT = "n (g c) l, (g o) c k -> n (g o) l"

TABLE = table(
    Rule("shardc_window.shift", _shift, "... l ... -> ... l ...    l: in order    linear", _shift_local),
    Rule("shardc_window.edge", _edge, "... l ... -> ... m ...    l: sum; m: whole    linear", _edge_local),
    Rule("shardc_window.cumsum", _cumsum, "... l ... -> ... l ...    l: in order    linear", _cumsum_local),
    Rule(
        "shardc_window.convolve",
        _convolve,
        f"{_TEXT}    c: sum; k: whole; l: in order    linear in x, weight",
        _convolve_local,
    ),
    Rule(
        "shardc_window.convolve_weight",
        _convolve_weight,
        "n (g o) l, n (g c) l, (g o) c k -> (g o) c k    n: sum; l: sum, in order; k: whole    linear in grad, x",
        _convolve_weight_local,
    ),
    opaque=True,
    strides=ANY,
)
