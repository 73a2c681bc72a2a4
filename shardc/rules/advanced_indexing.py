"""Indexing by several tensors at once: ``x[i, :, j]``. Indexed dims are served by the ranks that hold them."""

from __future__ import annotations

from typing import Any

import torch

from shardc.ir.layout import Layout
from shardc.rules.loops import FREE, Loops
from shardc.rules.notation import WHOLE
from shardc.rules.positions import align, in_range, once, owned, past_end, split, zero_unless
from shardc.rules.rule import ANY, Call, Local, each, table
from shardc.rules.spec import Dims, Spec

aten = torch.ops.aten


class Indexed:
    """The dims of an indexed tensor, of its indices and of what they pick out.

    Args:
        looked_up: kind of the indexed dims ``v``.
        over: kind of the dims ``b`` that the indices broadcast to.
    """

    def __init__(self, call: Call, looked_up: str, over: str) -> None:
        self.loops = loops = Loops(call)
        shape = loops.shapes[0]
        at = indexed_dims(call)
        indices = [call["indices"][dim].shape for dim in at]
        together = torch.broadcast_shapes(*indices)
        entries = loops.dims("b", together, over)
        found = {i: loops.indexed(f"v{i}", shape[i], looked_up) for i in at}
        self.x = loops.dims("d", shape, but=found)
        self.indices: list[Dims] = [_right(entries, one) for one in indices]
        # Indices that stand side by side leave their dims in place; others put them first.
        self.before = at[0] if at and at[-1] - at[0] == len(at) - 1 else 0
        rest = [factors for i, factors in enumerate(self.x) if i not in at]
        self.picked: Dims = (*rest[: self.before], *entries, *rest[self.before :])
        self.after = len(rest) - self.before


def _right(dims: Dims, shape: tuple[int, ...]) -> Dims:
    """``dims`` as an operand of ``shape`` that broadcasts to them has them."""
    return tuple(() if n == 1 else factors for n, factors in zip(shape, dims[len(dims) - len(shape) :], strict=True))


def indexed_dims(call: Call) -> list[int]:
    return [dim for dim, index in enumerate(call["indices"]) if index is not None]


def _masks(call: Call) -> bool:
    return any(call["indices"][dim].dtype in (torch.bool, torch.uint8) for dim in indexed_dims(call))


def _all_whole(call: Call) -> Spec:
    """A mask picks a number of elements that depends on the data."""
    loops = Loops(call)
    operands = [loops.dims(f"x{i}.", shape, WHOLE) for i, shape in enumerate(loops.shapes)]
    return loops.spec(operands, [loops.dims("y", loops.made[0], WHOLE)])


def _index(call: Call) -> Spec:
    if _masks(call):
        return _all_whole(call)
    to = Indexed(call, "sum", FREE)
    return to.loops.spec([to.x, *to.indices], [to.picked], linear=[{0}])


def _index_put(call: Call) -> Spec:
    if _masks(call):
        return _all_whole(call)
    to = Indexed(call, FREE, "sum" if call["accumulate"] else WHOLE)
    values = len(to.indices) + 1
    operands = [to.x, *to.indices, _right(to.picked, to.loops.shapes[values])]
    return to.loops.spec(operands, [to.x], linear=[{0, values}])


# --- on shards


def _find(local: Local, layout: Layout) -> tuple[list[Any], list[int], Any]:
    """The local indices, the dims that are split among those indexed, and the mask of the entries held here."""
    call = local.builder.call
    indices, mask = list(local.operand("indices")), None
    dims = [dim for dim in indexed_dims(local.call) if split(layout, dim)]
    for dim in indexed_dims(local.call):
        indices[dim] = in_range(local, layout, dim, indices[dim], wraps=True)
        if dim not in dims:
            continue
        indices[dim], here = owned(local, layout, dim, indices[dim])
        mask = here if mask is None else call(aten.logical_and.default, mask, here)
    return indices, dims, mask


def _index_local(local: Local) -> Any:
    indices, dims, mask = _find(local, local.operands[0])
    if not dims:
        return local.same(indices=indices)
    after = Indexed(local.call, FREE, FREE).after
    return zero_unless(local, align(local, mask, after), local.same(indices=indices))


def _index_put_local(local: Local) -> Any:
    layout = local.results[0]
    x = local.operand("self")
    indices, dims, mask = _find(local, layout)
    if not dims:
        return local.same(self=once(local, x), indices=indices)
    if local.call["accumulate"]:
        after = Indexed(local.call, FREE, FREE).after
        values = zero_unless(local, align(local, mask, after), local.operand("values"))
        return local.same(self=once(local, x), indices=indices, values=values)
    x, indices[dims[0]] = past_end(local, x, layout, dims[0], indices[dims[0]], mask)
    written = local.same(self=x, indices=indices)
    return local.builder.call(aten.slice.Tensor, written, dims[0], 0, layout.local_shape[dims[0]])


TABLE = table(
    each("index.Tensor _unsafe_index.Tensor", _index, "v d, k -> k d    v: sum    linear in self", _index_local),
    each(
        "index_put _unsafe_index_put",
        _index_put,
        "v d, k, k d -> v d    k: sum where accumulating, else whole    linear in self and values",
        _index_put_local,
    ),
    strides=ANY,
)
