"""Data movement: views, transposes, slices and joins. Their factors follow from the shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from math import gcd
from typing import Any

import torch

from shardc.ir.layout import Layout
from shardc.rules.loops import WHOLE, Loops
from shardc.rules.rule import Call, Local, Rule, sized, table
from shardc.rules.spec import Dims, Spec

aten = torch.ops.aten


# --- the same elements under another shape


def _view(call: Call) -> Spec:
    loops = Loops(call)
    before, after = loops.regroup(loops.shapes[0], loops.made[0])
    return loops.spec([before], [after], moves=True)


def _reshape_local(local: Local) -> Any:
    # A shard may have other strides than the whole tensor had, so a view may need a copy.
    return local.builder.call(aten.reshape.default, local.args[0], list(local.results[0].local_shape))


def _squeezed(local: Local) -> Any:
    """Drops the dims that are 1 in the global shape: a shard may be of size 1 in others too."""
    shape = local.call.operands[0].shape
    asked = range(len(shape)) if local.call.name.endswith("default") else _as_dims(local.call["dim"], len(shape))
    return local.builder.call(aten.squeeze.dims, local.args[0], [d for d in asked if shape[d] == 1])


def _as_dims(dims: int | Sequence[int], ndim: int) -> list[int]:
    return [d % ndim for d in ((dims,) if isinstance(dims, int) else dims)] if ndim else []


# --- dims in another order


def _reordered(order: Callable[[Call, int], Sequence[int]]) -> Callable[[Call], Spec]:
    """The spec of an op whose result dim ``i`` is operand dim ``order(call, ndim)[i]``."""

    def spec(call: Call) -> Spec:
        loops = Loops(call)
        before = loops.dims("d", loops.shapes[0])
        return loops.spec([before], [tuple(before[i] for i in order(call, len(before)))], moves=True)

    return spec


def _swapped(ndim: int, one: int, other: int) -> list[int]:
    order = list(range(ndim))
    if ndim:
        order[one], order[other] = order[other], order[one]
    return order


def _permutation(call: Call, ndim: int) -> Sequence[int]:
    return [d % ndim for d in call["dims"]]


# --- some elements of a dim


def _taken(call: Call, dim: int, starts: Sequence[int]) -> Spec:
    """Results that are consecutive runs of ``dim``, beginning at ``starts``: cut into blocks that all edges respect."""
    loops = Loops(call)
    shape = loops.shapes[0]
    block = reduce(gcd, [*starts, *(made[dim] for made in loops.made)], shape[dim])

    def dims(name: str, size: int) -> Dims:
        return tuple(
            loops.blocks(name, size, block) if i == dim else loops.dim(f"d{i}", n) for i, n in enumerate(shape)
        )

    return loops.spec(
        [dims("x", shape[dim])], [dims(f"y{i}", made[dim]) for i, made in enumerate(loops.made)], moves=True
    )


def _slice_bounds(call: Call) -> tuple[int, int, int, int]:
    """(dim, start, end, step) with every default and negative index resolved."""
    shape = call.operands[0].shape
    dim = call["dim"] % len(shape)
    size = shape[dim]
    start, end = (0 if call["start"] is None else call["start"]), (size if call["end"] is None else call["end"])
    start, end = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
    return dim, start, max(start, end), call["step"]


def _slice(call: Call) -> Spec:
    dim, start, _, step = _slice_bounds(call)
    if step == 1:
        return _taken(call, dim, [start])
    # Every step-th element: whole steps are a factor where they fill the dim, the place within a step is whole.
    loops = Loops(call)
    shape, taken = loops.shapes[0], loops.made[0][dim]
    fills = start < step and taken * step == shape[dim]
    before = (
        (*loops.dim("steps", taken), *loops.dim("step", step, WHOLE)) if fills else loops.dim("x", shape[dim], WHOLE)
    )
    after = loops.dim("steps", taken) if fills else loops.dim("y", taken, WHOLE)
    kept = loops.dims("d", [1 if i == dim else n for i, n in enumerate(shape)])
    return loops.spec([(*kept[:dim], before, *kept[dim + 1 :])], [(*kept[:dim], after, *kept[dim + 1 :])], moves=True)


def _slice_local(local: Local) -> Any:
    dim, start, end, step = _slice_bounds(local.call)
    if step != 1:
        whole = local.operands[0].local_shape[dim] == local.operands[0].shape[dim]
        return local.same(start=start, end=end if whole else local.operands[0].local_shape[dim])
    begin = _to_local(local.operands[0], dim, start)
    return local.same(start=begin, end=begin + local.results[0].local_shape[dim])


def _to_local(layout: Layout, dim: int, edge: int) -> int:
    """Where an edge between blocks lies in the local dim."""
    return edge * layout.local_shape[dim] // layout.shape[dim]


def _split(call: Call) -> Spec:
    dim = call["dim"] % len(call.operands[0].shape)
    sizes = [v.shape[dim] for v in call.results if v is not None]
    return _taken(call, dim, list(accumulate(sizes))[:-1])


def _split_local(local: Local) -> Any:
    dim = local.call["dim"] % len(local.call.operands[0].shape)
    sizes = [layout.local_shape[dim] for layout in local.results]
    return local.builder.call(aten.split_with_sizes.default, local.args[0], sizes, dim)


def _select(call: Call) -> Spec:
    loops = Loops(call)
    dim = call["dim"] % len(loops.shapes[0])
    before = tuple(loops.dim(f"d{i}", n, WHOLE if i == dim else "") for i, n in enumerate(loops.shapes[0]))
    kept = tuple(f for i, f in enumerate(before) if i != dim)
    return loops.spec([before], [kept for _ in loops.made], moves=True)


# --- joined, grown, moved within a dim


def _cat(call: Call) -> Spec:
    loops = Loops(call)
    shape = loops.made[0]
    dim = call["dim"] % len(shape)
    # A one-dim tensor without elements may stand among tensors of any rank.
    block = reduce(gcd, [one[dim] for one in loops.shapes if len(one) == len(shape)])
    rest = [loops.dim(f"d{i}", n) if i != dim else () for i, n in enumerate(shape)]

    def dims(name: str, size: int) -> Dims:
        return tuple(loops.blocks(name, size, block) if i == dim else factors for i, factors in enumerate(rest))

    operands = [
        dims(f"x{i}", one[dim]) if len(one) == len(shape) else loops.dims(f"x{i}.", one, WHOLE)
        for i, one in enumerate(loops.shapes)
    ]
    return loops.spec(operands, [dims("y", shape[dim])], linear=[range(len(operands))])


def _expand(call: Call) -> Spec:
    loops = Loops(call)
    shape = loops.made[0]
    return loops.spec([loops.broadcast(loops.shapes[0], shape)], [loops.broadcast(shape, shape)], moves=True)


def _pads(call: Call) -> list[tuple[int, int]]:
    """(before, after) of every dim; the op's ``pad`` lists them from the last dim."""
    ndim, pad = len(call.operands[0].shape), call["pad"]
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


def _pad(call: Call) -> Spec:
    loops = Loops(call)
    before, after = [], []
    for i, (size, made, (left, right)) in enumerate(zip(loops.shapes[0], loops.made[0], _pads(call), strict=True)):
        block = gcd(size, left, right)
        before.append(loops.blocks(f"x{i}", size, block, f"d{i}"))
        after.append(loops.blocks(f"y{i}", made, block, f"d{i}"))
    zero = not call["value"]
    return loops.spec([tuple(before)], [tuple(after)], linear=[{0}] if zero else ())


def _pad_local(local: Local) -> Any:
    layout = local.operands[0]
    pads = [[_to_local(layout, i, edge) for edge in pair] for i, pair in enumerate(_pads(local.call))]
    return local.same(pad=[edge for pair in pads[::-1] for edge in pair])


def _mixed(dims_of: Callable[[Call, int], Sequence[int]]) -> Callable[[Call], Spec]:
    """The spec of a linear op that mixes or resizes the dims ``dims_of(call, ndim)`` and leaves the others alone."""

    def spec(call: Call) -> Spec:
        loops = Loops(call)
        mixed = {d % len(loops.shapes[0]) for d in dims_of(call, len(loops.shapes[0]))}

        def dims(name: str, sizes: Sequence[int]) -> Dims:
            return tuple(
                loops.dim(f"{name}{i}", n, WHOLE) if i in mixed else loops.dim(f"d{i}", n) for i, n in enumerate(sizes)
            )

        return loops.spec([dims("x", loops.shapes[0])], [dims("y", loops.made[0])], linear=[{0}])

    return spec


def _repeat(call: Call) -> Spec:
    """Each dim is (times whole)(size free)."""
    loops = Loops(call)
    shape, made = loops.shapes[0], loops.made[0]
    lead = len(made) - len(shape)
    before = loops.dims("d", [1] * lead + list(shape))[lead:]
    after = tuple(
        (*loops.dim(f"times{i}", times), *(before[i - lead] if i >= lead else ()))
        for i, times in enumerate(call["repeats"])
    )
    return loops.spec([before], [after], moves=True)


def _repeat_local(local: Local) -> Any:
    shape = [1] * (len(local.results[0].shape) - len(local.operands[0].shape)) + list(local.operands[0].local_shape)
    return local.same(repeats=[made // size for made, size in zip(local.results[0].local_shape, shape, strict=True)])


TABLE = table(
    *(
        Rule(f"aten.{op}", _view, "factors shared by both shapes", _reshape_local)
        for op in ("view.default", "reshape", "_unsafe_view")
    ),
    Rule("aten.squeeze", _view, "dims of size 1 go", _squeezed),
    Rule("aten.unsqueeze", _view, "... -> ... 1"),
    Rule("aten.t", _reordered(lambda _, ndim: range(ndim)[::-1]), "a b -> b a"),
    Rule(
        "aten.transpose",
        _reordered(lambda call, ndim: _swapped(ndim, call["dim0"], call["dim1"])),
        "... a ... b -> ... b ... a",
    ),
    Rule("aten.permute", _reordered(_permutation), "dims in another order"),
    Rule("aten.expand", _expand, "1 ... -> n ...", sized()),
    Rule("aten.slice", _slice, "(m r) -> (n r)    m n: whole", _slice_local),
    *(
        Rule(f"aten.{op}", _split, "(m r) -> (n r), ...    m n: whole", _split_local)
        for op in ("split", "split_with_sizes", "chunk")
    ),
    Rule("aten.select", _select, "n ... -> ...    n: whole"),
    Rule("aten.unbind", _select, "n ... -> ..., ...    n: whole"),
    Rule("aten.cat", _cat, "(m r), (n r), ... -> (k r)    m n k: whole    linear in all"),
    Rule("aten.constant_pad_nd", _pad, "(m r) -> (n r)    m n: whole    linear where the value is 0", _pad_local),
    Rule("aten.repeat", _repeat, "n -> (times n)", _repeat_local),
    Rule("aten.flip", _mixed(lambda call, _: call["dims"]), "flipped dims: whole    linear"),
    Rule("aten.roll", _mixed(lambda call, ndim: call["dims"] or range(ndim)), "rolled dims: whole    linear"),
)
