"""Windows: replaces shifts and convolutions that keep the size of their dim with ops that let the dim be split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from operator import getitem
from typing import Any

import torch
from torch import fx

from shardc.custom_ops import window_ops
from shardc.ir import graph as ir
from shardc.ir.comm_volume import arguments_of
from shardc.ir.op_traits import TRANSPOSES
from shardc.ir.rewriter import GraphRewriter, Inserter, erase_dead_code
from shardc.passes.layout.canonicalize import permutation

aten = torch.ops.aten

_COPIES = (aten.clone.default, aten.detach.default, aten.alias.default, aten.copy.default)
_FULL, _ZEROS = (aten.full.default, aten.new_full.default), (aten.zeros.default, aten.new_zeros.default)
_SAME_ZEROS = (aten.slice.Tensor, aten.expand.default, aten.clone.default, aten.view.default)


@dataclass(frozen=True)
class Windows:
    """Replaces shifts, and convolutions of one dim that keep its size, by ops of ``shardc_window``.

        %p = constant_pad_nd(%x, [3, 0])
        %y = convolution(%p, %w)              ->  %y = shardc_window::convolve(%x, %w, 3, 0, ...)

        %s = slice(%x, 1, 0, -1)
        %y = cat([%zeros, %s], 1)             ->  %y = shardc_window::shift(%x, 1, 1)

    It also replaces the gradients of these convolutions, rolls, running sums (also from the end: of a ``flip``,
    ``cumsum`` and a ``flip``) and slices of few elements. The slices and padding that make up a shift have sizes other
    than the sequence's, which the sequence's axes may not divide.

    *Requires:* a captured graph. *Ensures:* values are as before. Without ``enabled`` the graph is returned as it is.

    Args:
        enabled: whether the plan may split another dim of activations than the first.
    """

    enabled: bool
    name = "windows"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if not self.enabled:
            return gm
        # In turns: a convolution is rewritten before the padding and slices around it, by which it is recognised.
        for targets in REWRITES:
            for node in reversed(list(gm.graph.nodes)):  # a value before its operands, to find the longest chains
                if (
                    node.op == "call_function"
                    and node.target in targets
                    and (ir.is_tensor(node) or node.target is _BACK)  # the latter has several results
                ):
                    targets[node.target](GraphRewriter(gm.graph), node)
        erase_dead_code(gm.graph)
        return gm


@dataclass(frozen=True)
class Reading:
    """A value in terms of another, ``source``: along one dim, element i is element ``i - by`` of ``source``, or zero.

    Args:
        source: the other value, or the value itself.
        dim: the dim of ``source`` along which it is read.
        order: permutation: for each dim of the value, the dim of ``source``.
        by: by how many elements the value is shifted towards its end.
        begin, end: the value's elements outside this range are zero.
        size: number of elements of the value along the dim.
    """

    source: fx.Node
    dim: int
    order: tuple[int, ...]
    by: int
    begin: int
    end: int
    size: int

    @property
    def length(self) -> int:
        """Returns the number of elements of ``source`` along the dim."""
        return ir.value(self.source).shape[self.dim]

    @property
    def reads_all(self) -> bool:
        """Returns whether this value is all of ``source`` with zeros around it."""
        return (self.begin, self.end) == (self.by, self.by + self.length)

    @property
    def shifts(self) -> bool:
        """Returns whether the value is ``source``, shifted by ``by``."""
        # The elements that a shift leaves; others, which came in at one end, are zero.
        ends = max(0, min(self.by, self.size)), min(self.size, max(0, self.size + self.by))
        return self.size == self.length and (self.begin, max(self.begin, self.end)) == (ends[0], max(ends))

    def placed(self, at: Inserter, x: fx.Node) -> fx.Node:
        """Returns ``x``, permuted from the order of dims of ``source`` to the order of dims of this value. ``at``
        inserts the permute.
        """
        return x if list(self.order) == sorted(self.order) else at.call(aten.permute.default, x, list(self.order))


def readings(node: fx.Node, dim: int) -> Iterator[Reading]:
    """Yields readings of ``node`` along ``dim``, which say where each element comes from: first in terms of ``node``
    itself, then of its operand, then of the operand's operand, and so on.

    It stops at the first op that is not a slice, a padding with zeros, a transpose or a copy.
    """
    size = ir.value(node).shape[dim]
    rank = len(ir.value(node).shape)
    # The first reading: the value itself, not permuted, not shifted, without zeros.
    now = Reading(node, dim, order=tuple(range(rank)), by=0, begin=0, end=size, size=size)
    while True:
        yield now
        source = now.source
        if source.op != "call_function":
            return
        if source.target in TRANSPOSES:
            moved = permutation(source)
            order, at = tuple(moved[d] for d in now.order), moved[now.dim]
            now = replace(now, source=source.args[0], order=order, dim=at)
        elif source.target in _COPIES:
            operand: Any = source.args[source.target is aten.copy.default]  # copy(destination, source)
            if not isinstance(operand, fx.Node) or ir.value(operand) != ir.value(source):
                return
            now = replace(now, source=operand)
        elif (piece := sliced(source)) is not None and piece[0] == now.dim:
            # Element i of the slice is element i + begin of its operand.
            _, begin, _ = piece
            now = replace(now, source=source.args[0], by=now.by - begin)
        elif (inner := zeros_around(source)) is not None and inner[1] == now.dim:
            # Element i of the padded value is element i - before of its operand; outside of the operand it is zero.
            operand, _, before = inner
            by = now.by + before
            end = min(now.end, by + ir.value(operand).shape[now.dim])
            now = replace(now, source=operand, by=by, begin=max(now.begin, by), end=end)
        else:
            return


def furthest(fitting: Sequence[Reading]) -> Reading:
    """Returns the first reading in ``fitting`` (nearest to the value) with the shift and the range of the last one. The
    ops between the sources of the two only permute or copy, so a rewrite can start from the nearer source and keep
    them.
    """
    last = fitting[-1]
    same = (last.by, last.begin, last.end, last.length)
    return next(reading for reading in fitting if (reading.by, reading.begin, reading.end, reading.length) == same)


def sliced(node: fx.Node) -> tuple[int, int, int] | None:
    """Returns (dim, begin, end) of a slice without steps; None for other ops."""
    if node.target is not aten.slice.Tensor:
        return None
    arguments = arguments_of(node)
    dim = arguments.get("dim", 0) % len(ir.value(node).shape)
    if arguments.get("step", 1) != 1:
        return None
    # Python resolves a start that is None, negative or beyond the end.
    begin, *_ = slice(arguments.get("start"), None).indices(ir.value(node.args[0]).shape[dim])
    return dim, begin, begin + ir.value(node).shape[dim]


def zeros_around(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Recognises a value with zeros around it along one dim: returns (value, dim, number of zeros before it); None if
    ``node`` is something else. It may be a padding, a ``cat`` with zeros, or a ``slice_scatter`` into zeros (the
    gradient of a slice).
    """
    arguments = arguments_of(node) if hasattr(node.target, "_schema") else {}
    rank = len(ir.value(node).shape) if ir.is_tensor(node) else 0
    if node.target is aten.constant_pad_nd.default and not arguments.get("value", 0):
        # ``pad`` has (before, after) of each dim, the last dim first.
        padded = [at // 2 for at, width in enumerate(arguments["pad"]) if width]
        if len(set(padded)) != 1 or min(arguments["pad"]) < 0:
            return None
        return node.args[0], rank - 1 - padded[0], arguments["pad"][2 * padded[0]]
    if node.target is aten.cat.default:
        parts, dim = arguments["tensors"], arguments.get("dim", 0) % max(rank, 1)
        values = [at for at, part in enumerate(parts) if not is_zero(part)]
        if len(values) != 1 or any(len(ir.value(part).shape) != rank for part in parts):
            return None
        (at,) = values
        before = sum(ir.value(part).shape[dim] for part in parts[:at])
        return (parts[at], dim, before) if ir.value(parts[at]).dtype == ir.value(node).dtype else None
    if node.target is aten.slice_scatter.default and is_zero(node.args[0]) and arguments.get("step", 1) == 1:
        dim = arguments.get("dim", 0) % rank
        begin, *_ = slice(arguments.get("start"), None).indices(ir.value(node).shape[dim])
        return (node.args[1], dim, begin) if ir.value(node.args[1]).dtype == ir.value(node).dtype else None
    return None


def is_zero(node: fx.Node) -> bool:
    """Returns whether ``node`` is a tensor of zeros, or a slice, view or copy of one."""
    while node.op == "call_function" and node.target in _SAME_ZEROS:
        node = node.args[0]
    if node.op != "call_function":
        return False
    value = arguments_of(node).get("fill_value", 1) if node.target in _FULL else 1
    return node.target in _ZEROS or isinstance(value, (int, float)) and value == 0


# --- rewrites


def _shift(rewriter: GraphRewriter, node: fx.Node) -> bool:
    """Replaces ``node`` if it is a shift of an earlier value along a dim, or equal to one; returns whether it was
    replaced.
    """
    piece, inner = sliced(node), zeros_around(node)  # a shift ends with a slice or with a padding by zeros
    dim = piece[0] if piece is not None else inner[1] if inner is not None else None
    if dim is None:
        return False
    fitting = [reading for reading in readings(node, dim) if reading.shifts and reading.source is not node]
    if not fitting:
        return False
    reading, at = furthest(fitting), rewriter.before(node, like=node)
    x = reading.source
    if reading.by:  # else the value equals the source
        x = at.call(window_ops.SHIFT, x, None, reading.dim, reading.by)
    rewriter.replace(node, reading.placed(at, x))
    return True


def _cat(rewriter: GraphRewriter, node: fx.Node) -> None:
    """Replaces a ``cat`` of a slice and a few other elements with a shift, in which the other elements come in at one
    end.
    """
    if _shift(rewriter, node) or len(node.args[0]) != 2:
        return
    shape, (first, second) = ir.value(node).shape, node.args[0]
    if any(len(ir.value(part).shape) != len(shape) for part in (first, second)):  # an empty tensor of one dim
        return
    dim = (*node.args[1:], 0)[0] % len(shape)
    size = shape[dim]
    # Either operand may be the slice (``part``) and the other one the elements that come in (``fill``).
    for part, fill in ((second, first), (first, second)):
        count = ir.value(fill).shape[dim]
        by = count if fill is first else -count
        of_part = [reading for reading in readings(part, dim) if reading.length == size]
        begin = 0 if fill is first else count  # of the slice
        # The slice must be what a shift leaves of a value: all but the elements that it moves out at the other end.
        fitting = [x for x in of_part if (x.by, x.begin, x.end) == (-begin, 0, size - count)]
        if not fitting or not count or not worth_sending(count, size) or ir.value(fill).dtype != ir.value(node).dtype:
            continue
        reading, at = furthest(fitting), rewriter.before(node, like=node)
        rewriter.replace(node, at.call(window_ops.SHIFT, reading.placed(at, reading.source), fill, dim, by))
        return


def _roll(rewriter: GraphRewriter, node: fx.Node) -> None:
    """Replaces a roll by a few elements along one dim with a shift that takes these elements in at the other end."""
    arguments = arguments_of(node)
    if len(arguments.get("dims", ())) != 1:
        return
    rank, (by,), x = len(ir.value(node).shape), arguments["shifts"], node.args[0]
    dim, at = arguments["dims"][0] % rank, rewriter.before(node, like=node)
    size = ir.value(node).shape[dim]
    # The shorter way round: by -1 instead of by size - 1.
    by = (by + size // 2) % max(size, 1) - size // 2
    if by and worth_sending(abs(by), size):
        ends = (size - by, size) if by > 0 else (0, -by)  # the elements that a shift moves out
        rewriter.replace(node, at.call(window_ops.SHIFT, x, at.call(window_ops.EDGE, x, dim, *ends), dim, by))


def worth_sending(count: int, size: int) -> bool:
    """Returns whether ``count`` is so small a part of the ``size`` elements of a dim that sending these elements is
    better than gathering the dim.
    """
    return _FEW * count <= size


def _slice(rewriter: GraphRewriter, node: fx.Node) -> None:
    """Replaces a slice by a shift, or by the earlier value that it equals (`_shift`). Any other slice of few elements
    is replaced by the op ``edge`` of ``shardc_window``: ranks that split the dim are sent just these elements.

    A slice of the last dim stays if one factor divides its begin, its size and the size of the dim: an axis can then
    split both by this factor.
    """
    piece = None if _shift(rewriter, node) else sliced(node)
    if piece is None:
        return
    dim, begin, end = piece
    shape = ir.value(node.args[0]).shape
    blocks = gcd(begin, end - begin, shape[dim])  # by which an axis may split both
    if begin < end and worth_sending(end - begin, shape[dim]) and (blocks == 1 or dim < len(shape) - 1):
        at = rewriter.before(node, like=node)
        rewriter.replace(node, at.call(window_ops.EDGE, node.args[0], *piece))


def _cumsum(rewriter: GraphRewriter, node: fx.Node) -> None:
    """Replaces a floating-point running sum by the op ``cumsum`` of ``shardc_window``, whose dim can be split.
    Sums that change the dtype stay, as that op does not.
    """
    arguments, value = arguments_of(node), ir.value(node)
    if value.shape and value.dtype.is_floating_point and ir.value(node.args[0]).dtype == value.dtype:
        at, dim = rewriter.before(node, like=node), arguments["dim"] % len(value.shape)
        rewriter.replace(node, at.call(window_ops.CUMSUM, node.args[0], dim, False))


def _flip(rewriter: GraphRewriter, node: fx.Node) -> None:
    """Replaces the flip of a running sum of a flip with a running sum from the end."""
    sums: Any = node.args[0]
    if sums.target is not aten.cumsum.default or sums.args[0].target is not aten.flip.default:
        return
    x, rank = sums.args[0].args[0], len(ir.value(node).shape)
    dims = [[d % rank for d in flip.args[1]] for flip in (node, sums.args[0])]
    # Both flips and the sum must be along the same single dim.
    if dims != [[sums.args[1] % rank]] * 2 or ir.value(x).dtype != ir.value(sums).dtype:
        return
    rewriter.replace(node, rewriter.before(node, like=node).call(window_ops.CUMSUM, x, dims[0][0], True))


def _window(node: fx.Node, x: fx.Node, weight: fx.Node) -> tuple[Reading, tuple[int, ...]] | None:
    """Analyses a convolution: if it is over one dim and keeps its size, returns (its input ``x`` as a `Reading`,
    (elements that its window reaches before, after, dilation, groups)); else None.
    """
    arguments = arguments_of(node)
    # x [rows, channels in, size]; weight [channels out, channels in / groups, taps].
    if len(ir.value(weight).shape) != 3 or len(ir.value(x).shape) != 3 or arguments.get("bias") is not None:
        return None
    (padding,), (dilation,), (stride,) = arguments["padding"], arguments["dilation"], arguments["stride"]
    reach = dilation * (ir.value(weight).shape[2] - 1)  # neighbours that an element reads, on both sides together
    if arguments["transposed"] or stride != 1 or not reach:
        return None
    fitting = [
        # The whole value is read, with as many zeros around it as the window reaches.
        reading for reading in readings(x, 2)
        if reading.reads_all and reading.by >= 0 and reading.by + reading.length <= reading.size
        and reading.size + 2 * padding - reading.length == reach
    ]  # fmt: skip
    if not fitting:
        return None
    reading = furthest(fitting)
    # Zeros in front: those that the convolution pads, and those of a pad op before it.
    before = padding + reading.by
    return reading, (before, reach - before, dilation, arguments["groups"])


def _convolution(rewriter: GraphRewriter, node: fx.Node) -> None:
    """Replaces a convolution with the op ``convolve`` of ``shardc_window`` if it keeps the size of its dim."""
    x, weight = node.args[:2]
    if (form := _window(node, x, weight)) is not None:
        reading, window = form
        at = rewriter.before(node, like=node)
        new = at.call(window_ops.CONVOLVE, reading.placed(at, reading.source), weight, *window)
        rewriter.replace(node, new)


def _convolution_backward(rewriter: GraphRewriter, node: fx.Node) -> None:
    """Replaces the gradients (of input and weight) of a convolution with ops of ``shardc_window`` if the convolution
    keeps the size of its dim.

    Only if all users of the input's gradient cut off its padding.
    """
    grad, x, weight = node.args[:3]
    assert isinstance(weight, fx.Node)
    if (form := _window(node, x, weight)) is None:  # the same arguments as the convolution's
        return
    reading, window = form
    before, after, dilation, groups = window
    # The getitems of result 0 (gradient of x) and of result 1 (gradient of the weight).
    results: dict[int, list[fx.Node]] = {0: [], 1: []}
    for user in node.users:
        if user.target is not getitem or user.args[1] not in results:
            return
        results[user.args[1]].append(user)
    inside = reading.by, reading.by + reading.length
    if not all(_only_sliced(user, 2, *inside) for user in results[0]):
        return
    for user in results[1]:
        at = rewriter.before(user, like=user)
        source = reading.placed(at, reading.source)
        rewriter.replace(user, at.call(window_ops.CONVOLVE_WEIGHT, grad, source, weight, *window))
    for user in results[0]:
        at = rewriter.before(user, like=user)
        # The input's gradient is a convolution, too: of ``grad``, with the window mirrored (after, before).
        reversed_weight = _reversed_weight(at, weight, groups)
        new = at.call(window_ops.CONVOLVE, grad, reversed_weight, after, before, dilation, groups)
        # Zeros that the users cut off again.
        if (more := reading.size - inside[1]) or reading.by:
            new = at.call(aten.constant_pad_nd.default, new, [reading.by, more])
        rewriter.replace(user, new)


def _reversed_weight(at: Inserter, weight: fx.Node, groups: int) -> fx.Node:
    """Inserts ``weight`` of a convolution with its taps in reverse order, and input and output channels of each group
    exchanged: [groups * o, i, taps] becomes [groups * i, o, taps].
    """
    out, channels, taps = ir.value(weight).shape  # ``out``: of all groups; ``channels``: input channels of one group
    by_group = at.call(aten.view.default, weight, [groups, out // groups, channels, taps])
    exchanged = at.call(aten.transpose.int, by_group, 1, 2)
    joined = at.call(aten.reshape.default, exchanged, [groups * channels, out // groups, taps])
    return at.call(aten.flip.default, joined, [2])


def _only_sliced(node: fx.Node, dim: int, begin: int, end: int) -> bool:
    """Returns whether all users of ``node`` slice it from ``begin`` to ``end`` along ``dim``, at once or behind
    transposes and copies. True for any users if this is the whole dim.
    """
    if (begin, end) == (0, ir.value(node).shape[dim]):
        return True

    def slices(user: fx.Node) -> bool:
        if user.target in TRANSPOSES:
            return _only_sliced(user, permutation(user).index(dim), begin, end)
        if user.target is aten.clone.default:
            return _only_sliced(user, dim, begin, end)
        return sliced(user) == (dim, begin, end)

    return all(map(slices, node.users))


_FEW = 8  # times that a dim must be as long as what is sent of it
_BACK = aten.convolution_backward.default
Rewrite = Callable[[GraphRewriter, fx.Node], object]
# The order matters: neither a convolution's padding nor the gradient of that may be rewritten before the convolution,
# nor a running sum before the flip of it.
REWRITES: tuple[dict[Any, Rewrite], ...] = (
    {aten.convolution.default: _convolution, _BACK: _convolution_backward},
    {aten.flip.default: _flip},
    {
        aten.cumsum.default: _cumsum,
        aten.roll.default: _roll,
        aten.cat.default: _cat,
        aten.slice.Tensor: _slice,
        **dict.fromkeys((aten.constant_pad_nd.default, aten.slice_scatter.default), _shift),
    },
)
