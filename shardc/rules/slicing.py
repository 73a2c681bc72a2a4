"""Rules for slices, splits, concatenation and padding along a dim.

A dim is cut into equal blocks such that every edge of a slice is a block edge; the position in a block may be split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from math import gcd

import torch

from shardc.ir.layout import Layout
from shardc.rules.notation import FREE, WHOLE, Loops, mixed
from shardc.rules.positions import split, to_local_index, zero_unless
from shardc.rules.rule import ANY, Call, Emitted, Local, Rule, SpecOf, rules_for, table
from shardc.rules.spec import Dims, Spec

aten = torch.ops.aten


# --- slice, split, select


def _ranges(call: Call, dim: int, starts: Sequence[int]) -> Spec:
    """Return the spec of an op whose results are consecutive ranges of ``dim`` of its operand. ``starts``: where the
    ranges begin (0 may be left out).
    """
    loops = Loops(call)
    shape = loops.shapes[0]
    sizes = [out[dim] for out in loops.result_shapes]
    # The dim may be split into blocks of this size, since every range consists of whole ones.
    block = reduce(gcd, [*starts, *sizes], shape[dim]) if all(sizes) else 0

    def dims(name: str, size: int) -> Dims:
        return loops.dims("d", shape, but={dim: loops.blocks(name, size, block)})

    return loops.spec(
        [dims("x", shape[dim])], [dims(f"y{i}", out[dim]) for i, out in enumerate(loops.result_shapes)], moves=True
    )


def _slice_bounds(call: Call) -> tuple[int, int, int, int]:
    """Return (dim, start, end, step) with defaults and negative indices resolved."""
    shape = call.operands[0].shape
    dim = call["dim"] % len(shape)
    size = shape[dim]
    start, end = (0 if call["start"] is None else call["start"]), (size if call["end"] is None else call["end"])
    start, end = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
    return dim, start, max(start, end), call["step"]


def _slice(call: Call) -> Spec:
    """Return the spec of a slice of one dim."""
    dim, start, _, step = _slice_bounds(call)
    if step == 1:
        return _ranges(call, dim, [start])
    # x[::step] with the dim viewed as (steps, step): the steps may be split, the position within a step is whole.
    loops = Loops(call)
    size, count = loops.shapes[0][dim], loops.result_shapes[0][dim]
    others = loops.dims("d", [1 if i == dim else n for i, n in enumerate(loops.shapes[0])])
    before, after = loops.dim("x", size, WHOLE), loops.dim("y", count, WHOLE)
    if start < step and count * step == size:
        after = loops.dim("steps", count)
        before = after + loops.dim("step", step, WHOLE)
    x, y = ((*others[:dim], factors, *others[dim + 1 :]) for factors in (before, after))
    return loops.spec([x], [y], moves=True)


def _slice_local(local: Local) -> Emitted:
    """Emit and return a slice with its bounds in local indices."""
    dim, start, end, step = _slice_bounds(local.call)
    layout = local.operands[0]
    if step != 1:
        return local.same(start=start, end=layout.local_shape[dim] if layout.dim_axes(dim) else end)
    begin = _to_local(layout, dim, start)
    return local.same(start=begin, end=begin + local.results[0].local_shape[dim])


def _to_local(layout: Layout, dim: int, edge: int) -> int:
    """Convert ``edge``, a global index along ``dim`` at which every shard is cut in the same proportion, to a local
    index: divided by the number of shards of ``dim``.
    """
    return edge * layout.local_shape[dim] // layout.shape[dim] if layout.dim_axes(dim) else edge


def _split(call: Call) -> Spec:
    """Return the spec of a split of one dim into consecutive ranges."""
    dim = call["dim"] % len(call.operands[0].shape)
    sizes = [v.shape[dim] for v in call.results if v is not None]
    return _ranges(call, dim, list(accumulate(sizes))[:-1])


def _split_local(local: Local) -> Emitted:
    """Emit a split with local sizes; return its results."""
    dim = local.call["dim"] % len(local.call.operands[0].shape)
    sizes = [layout.local_shape[dim] for layout in local.results]
    return local.builder.call(aten.split_with_sizes.default, local.args[0], sizes, dim)


def _unstacked(call: Call, kind: str) -> tuple[Loops, Dims, Dims]:
    """Return (`Loops`, factors of operand 0's dims, the same factors without those of ``dim``). The factor of argument
    ``dim`` is named ``n`` and has kind ``kind``.
    """
    loops = Loops(call)
    dim = call["dim"] % len(loops.shapes[0])
    x = loops.dims("d", loops.shapes[0], but={dim: loops.indexed("n", loops.shapes[0][dim], kind)})
    return loops, x, (*x[:dim], *x[dim + 1 :])


def _select(call: Call) -> Spec:
    """Return the spec of ``select``: a split of its dim leaves a partial sum."""
    loops, x, rest = _unstacked(call, "sum")
    return loops.spec([x], [rest], moves=True)


def _index(call: Call) -> int:
    """Return the selected index as a non-negative number. A negative index must not count from the end of the local
    dim, which may be padded.
    """
    shape = call.operands[0].shape
    index, dim = int(call["index"]), int(call["dim"])
    return index % shape[dim % len(shape)]


def _select_local(local: Local) -> Emitted:
    """Emit ``select`` (one index of a dim) on every rank; ranks that do not hold that element return zero."""
    dim = local.call["dim"] % len(local.call.operands[0].shape)
    if not split(local.operands[0], dim):
        return local.same(index=_index(local.call))
    index, mask = to_local_index(local, local.operands[0], dim, _index(local.call))
    return zero_unless(local, mask, local.same(index=index))


def _unbind(call: Call) -> Spec:
    loops, x, rest = _unstacked(call, WHOLE)
    return loops.spec([x], [rest for _ in loops.result_shapes], moves=True)


# --- slice_scatter, select_scatter


def _slice_scatter(call: Call) -> Spec:
    dim, start, _, step = _slice_bounds(call)
    loops = Loops(call)
    shape, src = loops.shapes
    block = reduce(gcd, [start, src[dim], shape[dim]]) if step == 1 else 0

    def dims(name: str, size: int) -> Dims:
        return loops.dims("d", shape, but={dim: loops.blocks(name, size, block)})

    x = dims("x", shape[dim])
    return loops.spec([x, dims("y", src[dim])], [x], linear=[{0, 1}])


def _slice_scatter_local(local: Local) -> Emitted:
    """Emit and return a ``slice_scatter`` with its bounds in local indices."""
    dim, start, _, step = _slice_bounds(local.call)
    if step != 1:
        return local.same()
    begin = _to_local(local.operands[0], dim, start)
    return local.same(start=begin, end=begin + local.operands[1].local_shape[dim])


def _select_scatter(call: Call) -> Spec:
    loops, x, rest = _unstacked(call, FREE)
    return loops.spec([x, rest], [x], linear=[{0, 1}])


def _select_scatter_local(local: Local) -> Emitted:
    """Emit and return a ``select_scatter``, in which only the rank that holds the index writes."""
    dim = local.call["dim"] % len(local.call.operands[0].shape)
    if not split(local.operands[0], dim):
        return local.same(index=_index(local.call))
    index, mask = to_local_index(local, local.operands[0], dim, _index(local.call))
    return local.builder.call(aten.where.self, mask, local.same(index=index), local.operand("self"))


# --- cat, pad, stack


def _cat(call: Call) -> Spec:
    """Return the spec of ``cat``. Its dim may be split into blocks whose size divides those of all operands."""
    loops = Loops(call)
    shape = loops.result_shapes[0]
    dim = call["dim"] % len(shape)
    # torch.cat accepts an empty one-dim tensor among tensors of any rank.
    block = reduce(gcd, [x[dim] for x in loops.shapes if len(x) == len(shape)])

    def dims(name: str, size: int) -> Dims:
        return loops.dims("d", shape, but={dim: loops.blocks(name, size, block if size else 0)})

    operands = [
        dims(f"x{i}", x[dim]) if len(x) == len(shape) else loops.dims(f"x{i}.", x, WHOLE)
        for i, x in enumerate(loops.shapes)
    ]
    return loops.spec(operands, [dims("y", shape[dim])], linear=[range(len(operands))])


def _pads(call: Call) -> list[tuple[int, int]]:
    """Return (elements before, elements after) for each dim; the op's ``pad`` lists them from the last dim."""
    ndim, pad = len(call.operands[0].shape), call["pad"]
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


def _pad(call: Call) -> Spec:
    loops = Loops(call)
    before, after = [], []
    for i, (size, size_after, (left, right)) in enumerate(
        zip(loops.shapes[0], loops.result_shapes[0], _pads(call), strict=True)
    ):
        block = gcd(size, left, right) if size else 0
        before.append(loops.blocks(f"x{i}", size, block, f"d{i}"))
        after.append(loops.blocks(f"y{i}", size_after, block, f"d{i}"))
    zero = not call["value"]
    return loops.spec([tuple(before)], [tuple(after)], linear=[{0}] if zero else ())


def _pad_local(local: Local) -> Emitted:
    """Emit and return a pad with the numbers of elements to add to the shard."""
    layout = local.operands[0]
    pads = [[_to_local(layout, i, edge) for edge in pair] for i, pair in enumerate(_pads(local.call))]
    return local.same(pad=[edge for pair in pads[::-1] for edge in pair])


def _stack(call: Call) -> Spec:
    loops = Loops(call)
    shape = loops.result_shapes[0]
    dim = call["dim"] % len(shape)
    result = loops.dims("d", shape, but={dim: loops.dim(f"d{dim}", shape[dim], WHOLE)})
    operand = (*result[:dim], *result[dim + 1 :])
    return loops.spec([operand for _ in loops.shapes], [result], linear=[range(len(loops.shapes))])


# --- flip, roll, tril


def _moved(dims_of: Callable[[Call, int], Sequence[int]], *, moves: bool) -> SpecOf:
    """Return the function that gives the spec of an op that moves elements along the dims ``dims_of(call, ndim)``, such
    as ``flip``. These dims must not be split. ``moves`` is as in `Spec`.
    """

    def spec(call: Call) -> Spec:
        return mixed(call, dims_of(call, len(call.operands[0].shape)), linear=[{0}], moves=moves)

    return spec


_BLOCKS = "(m r) -> (n r)    m n: whole"

TABLE = table(
    rules_for("slice.Tensor slice_copy.Tensor", _slice, _BLOCKS, _slice_local),
    rules_for(
        "split split_copy split_with_sizes split_with_sizes_copy chunk",
        _split,
        "(m r) -> (n r), ...    m n: whole",
        _split_local,
    ),
    rules_for("select.int select_copy.int", _select, "n ... -> ...    n: sum", _select_local),
    rules_for("unbind unbind_copy", _unbind, "n ... -> ..., ...    n: whole"),
    Rule(
        "aten.slice_scatter",
        _slice_scatter,
        "(m r), (n r) -> (m r)    m n: whole    linear in both",
        _slice_scatter_local,
    ),
    Rule("aten.select_scatter", _select_scatter, "n ..., ... -> n ...    linear in both", _select_scatter_local),
    Rule("aten.cat", _cat, "(m r), (n r), ... -> (k r)    m n k: whole    linear in all"),
    Rule("aten.stack", _stack, "..., ... -> n ...    n: whole    linear in all"),
    Rule("aten.constant_pad_nd", _pad, f"{_BLOCKS}    linear where the value is 0", _pad_local),
    Rule("aten.flip", _moved(lambda call, _: call["dims"], moves=True), "flipped dims: whole    linear"),
    Rule(
        "aten.roll", _moved(lambda call, ndim: call["dims"] or range(ndim), moves=True), "rolled dims: whole    linear"
    ),
    rules_for(
        "tril triu",
        _moved(lambda _, ndim: (ndim - 2, ndim - 1), moves=False),
        "... a b -> ... a b    a b: whole    linear",
    ),
    strides=ANY,
)
