"""Rules for slices, splits, concatenation and padding along a dim.

A dim is cut into equal blocks such that every edge of a slice is a block edge; the position in a block may be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd

import torch

from shardc.ir.layout import Layout
from shardc.rules.notation import FREE, WHOLE, Loops, mixed
from shardc.rules.positions import split, to_local_index, zero_unless
from shardc.rules.rule import ANY, Call, Emitted, Local, Rule, rules_for, table
from shardc.rules.spec import Dims, Spec

aten = torch.ops.aten


# --- slice, split, select


def _ranges(call: Call, dim: int, starts: Sequence[int]) -> Spec:
    """Return the spec of an op whose results are consecutive ranges of ``dim`` of its operand. ``starts``: where the
    ranges begin (0 may be left out). The op only moves elements, so any pending reduction passes through.
    """
    loops = Loops(call)
    shape = loops.shapes[0]
    sizes = [out[dim] for out in loops.result_shapes]
    # Every range consists of entire blocks of this size. Operand and results share the position in a block: a split of
    # it leaves each rank the same part of every block. The number of blocks differs, and must not be split. With an
    # empty range, the dim must not be split at all.
    block = gcd(shape[dim], *starts, *sizes) if all(sizes) else 0
    results = [_in_blocks(loops, out, dim, block, f"y{i}") for i, out in enumerate(loops.result_shapes)]
    return loops.spec([_in_blocks(loops, shape, dim, block, "x")], results, moves=True)


def _in_blocks(loops: Loops, shape: Sequence[int], dim: int, block: int, name: str) -> Dims:
    """Declare and return the factors of a tensor of ``shape`` whose dim ``dim`` consists of blocks of ``block``
    elements (`Loops.blocks`). Such tensors of a call share all factors but the number of blocks, which is named after
    ``name``.
    """
    return loops.dims("d", shape, but={dim: loops.blocks(name, shape[dim], block)})


def _slice_bounds(call: Call) -> tuple[int, int, int, int]:
    """Return (dim, start, end, step) with defaults and negative indices resolved."""
    dim = call.dim
    size = call.operands[0].shape[dim]
    start, end = (0 if call["start"] is None else call["start"]), (size if call["end"] is None else call["end"])
    # From the end if negative, then cut to the dim, as in Python.
    start, end = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
    return dim, start, max(start, end), call["step"]


def _slice(call: Call) -> Spec:
    """Return the spec of a slice of one dim. With a step, the dim may be split if it consists of whole steps, and each
    has one element of the slice.
    """
    dim, start, _, step = _slice_bounds(call)
    if step == 1:
        return _ranges(call, dim, [start])
    loops = Loops(call)
    size, count = loops.shapes[0][dim], loops.result_shapes[0][dim]
    # Factors of all dims but this one, which has others before and after.
    others = loops.dims("d", [1 if i == dim else n for i, n in enumerate(loops.shapes[0])])
    before, after = loops.dim("x", size, WHOLE), loops.dim("y", count, WHOLE)
    # The dim viewed as (steps, step): the steps may be split, the position within a step must not be.
    if start < step and count * step == size:
        after = loops.dim("steps", count)
        before = after + loops.dim("step", step, WHOLE)
    x, y = ((*others[:dim], factors, *others[dim + 1 :]) for factors in (before, after))
    return loops.spec([x], [y], moves=True)


def _slice_local(local: Local) -> Emitted:
    """Emit and return a slice with its bounds in local indices."""
    dim, start, end, step = _slice_bounds(local.call)
    layout = local.operands[0]
    if step != 1:  # a split dim consists of whole steps, so every rank starts at the same place in a step
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
    sizes = [v.shape[call.dim] for v in call.results if v is not None]
    return _ranges(call, call.dim, starts=list(accumulate(sizes))[:-1])


def _split_local(local: Local) -> Emitted:
    """Emit a split with local sizes; return its results."""
    # By sizes, whichever op it is: ``chunk`` and ``split`` would cut a shard at other places.
    sizes = [layout.local_shape[local.call.dim] for layout in local.results]
    return local.builder.call(aten.split_with_sizes.default, local.args[0], sizes, local.call.dim)


def _unstacked(call: Call, kind: str) -> tuple[Loops, Dims, Dims]:
    """Return (`Loops`, factors of operand 0's dims, the same without the call's ``dim``), for ops that remove or index
    this dim. Its factor is named ``n`` and has kind ``kind`` (see `Loops`).
    """
    loops, dim = Loops(call), call.dim
    x = loops.dims("d", loops.shapes[0], but={dim: loops.indexed("n", loops.shapes[0][dim], kind)})
    return loops, x, (*x[:dim], *x[dim + 1 :])


def _select(call: Call) -> Spec:
    """Return the spec of ``select``: a split of its dim leaves a partial sum, to which ranks without the element add
    zeros.
    """
    loops, x, rest = _unstacked(call, "sum")
    return loops.spec([x], [rest], moves=True)


def _selected(local: Local) -> tuple[int, Emitted | None]:
    """Return (local index of the element that the call's argument ``index`` selects, mask that is true on the rank that
    holds it). The mask is None if all ranks hold the element.
    """
    call, layout = local.call, local.operands[0]
    # A negative index must not count from the end of the local dim, which may be padded.
    index = int(call["index"]) % call.operands[0].shape[call.dim]
    return to_local_index(local, layout, call.dim, index) if split(layout, call.dim) else (index, None)


def _select_local(local: Local) -> Emitted:
    """Emit ``select`` (one index of a dim) on every rank; ranks that do not hold that element return zero."""
    index, mask = _selected(local)
    element = local.same(index=index)
    return element if mask is None else zero_unless(local, mask, element)


def _unbind(call: Call) -> Spec:
    """Return the spec of ``unbind``, whose dim must not be split: each of its elements is a result."""
    loops, x, rest = _unstacked(call, WHOLE)
    return loops.spec([x], [rest for _ in loops.result_shapes], moves=True)


# --- slice_scatter, select_scatter


def _slice_scatter(call: Call) -> Spec:
    """Return the spec of ``slice_scatter``. The dim consists of equal blocks, and the slice of some of them; each rank
    may have the same part of every block. If the step is not 1, the dim must not be split.
    """
    dim, start, _, step = _slice_bounds(call)
    loops = Loops(call)
    shape, src = loops.shapes
    block = gcd(start, src[dim], shape[dim]) if step == 1 else 0  # 0: the dim must not be split
    x = _in_blocks(loops, shape, dim, block, "x")
    # A partial sum passes through if both operands are one.
    return loops.spec([x, _in_blocks(loops, src, dim, block, "y")], [x], linear=[{0, 1}])


def _slice_scatter_local(local: Local) -> Emitted:
    """Emit and return a ``slice_scatter`` with its bounds in local indices."""
    dim, start, _, step = _slice_bounds(local.call)
    if step != 1:  # the dim is not split
        return local.same()
    begin = _to_local(local.operands[0], dim, start)
    return local.same(start=begin, end=begin + local.operands[1].local_shape[dim])


def _select_scatter(call: Call) -> Spec:
    """Return the spec of ``select_scatter``, which writes one index of a dim. That dim may be split, too."""
    loops, x, rest = _unstacked(call, FREE)
    # A partial sum passes through if both operands are one.
    return loops.spec([x, rest], [x], linear=[{0, 1}])


def _select_scatter_local(local: Local) -> Emitted:
    """Emit and return a ``select_scatter``, in which only the rank that holds the index writes."""
    index, mask = _selected(local)
    written = local.same(index=index)
    return written if mask is None else local.builder.call(aten.where.self, mask, written, local.operand("self"))


# --- cat, pad, stack


def _cat(call: Call) -> Spec:
    """Return the spec of ``cat``. Its dim consists of equal blocks in all operands; each rank may have the same part of
    every block.
    """
    loops = Loops(call)
    shape = loops.result_shapes[0]
    dim = call["dim"] % len(shape)
    # torch.cat accepts an empty one-dim tensor among tensors of any rank.
    block = gcd(*(x[dim] for x in loops.shapes if len(x) == len(shape)))

    def factors(name: str, x: Sequence[int]) -> Dims:
        if len(x) != len(shape):
            return loops.dims(f"{name}.", x, WHOLE)
        # A dim without elements has no blocks.
        return _in_blocks(loops, x, dim, block if x[dim] else 0, name)

    operands = [factors(f"x{i}", x) for i, x in enumerate(loops.shapes)]
    # A partial sum passes through if all operands are one.
    return loops.spec(operands, [factors("y", shape)], linear=[range(len(operands))])


def _pads(call: Call) -> list[tuple[int, int]]:
    """Return (elements before, elements after) for each dim; the op's ``pad`` lists them from the last dim."""
    ndim, pad = len(call.operands[0].shape), call["pad"]
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


def _pad(call: Call) -> Spec:
    """Return the spec of ``constant_pad_nd``. A dim and its padding consist of equal blocks, as large as possible; each
    rank may have the same part of every block.
    """
    loops = Loops(call)
    before, after = [], []
    for i, (size, size_after, (left, right)) in enumerate(
        zip(loops.shapes[0], loops.result_shapes[0], _pads(call), strict=True)
    ):
        block = gcd(size, left, right) if size else 0
        before.append(loops.blocks(f"x{i}", size, block, f"d{i}"))
        after.append(loops.blocks(f"y{i}", size_after, block, f"d{i}"))
    zero = not call["value"]  # other values in the terms of all ranks would add up
    return loops.spec([tuple(before)], [tuple(after)], linear=[{0}] if zero else ())


def _pad_local(local: Local) -> Emitted:
    """Emit and return a pad with the numbers of elements to add to the shard."""
    layout = local.operands[0]
    pads = [[_to_local(layout, i, count) for count in pair] for i, pair in enumerate(_pads(local.call))]
    return local.same(pad=[count for pair in pads[::-1] for count in pair])  # from the last dim


def _stack(call: Call) -> Spec:
    """Return the spec of ``stack``: the new dim must not be split."""
    loops = Loops(call)
    shape = loops.result_shapes[0]
    dim = call["dim"] % len(shape)
    result = loops.dims("d", shape, but={dim: loops.dim(f"d{dim}", shape[dim], WHOLE)})
    operand = (*result[:dim], *result[dim + 1 :])
    # A partial sum passes through if all operands are one.
    return loops.spec([operand for _ in loops.shapes], [result], linear=[range(len(loops.shapes))])


# --- flip, roll, tril


def _rolled(call: Call) -> Sequence[int]:
    """Return the dims that ``roll`` rolls: all dims if its ``dims`` is empty (it then rolls the flattened tensor)."""
    return call["dims"] or range(len(call.operands[0].shape))


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
    Rule("aten.flip", mixed(lambda call: call["dims"], linear=True, moves=True), "flipped dims: whole    linear"),
    Rule("aten.roll", mixed(_rolled, linear=True, moves=True), "rolled dims: whole    linear"),
    rules_for("tril triu", mixed(lambda call: (-2, -1), linear=True), "... a b -> ... a b    a b: whole    linear"),
    strides=ANY,
)
