"""Rules for indexing by several tensors at once: ``x[i, :, j]``. If an indexed dim is split, each rank looks up the
rows it holds.
"""

from __future__ import annotations

from typing import Any

import torch

from shardc.ir.layout import Layout
from shardc.rules.loops import FREE, Loops
from shardc.rules.notation import WHOLE
from shardc.rules.positions import align, in_range, once_per_sum, owned, past_end, split, zero_unless
from shardc.rules.rule import ANY, Call, Local, rules_for, table
from shardc.rules.spec import Dims, Spec

aten = torch.ops.aten


class Indexed:
    """The factors of an indexed tensor, of its index tensors and of the result.

    Example: ``x[i, :, j]`` with ``x`` of shape [v0, d1, v2] and ``i``, ``j`` of shape [b0]. The result is [b0, d1]; had
    the indexed dims been adjacent, the dims of the indices would stay in their place.

    Args:
        looked_up: kind of the indexed factors ``v``.
        over: kind of the factors ``b`` of the shape that the indices broadcast to.
    """

    def __init__(self, call: Call, looked_up: str, over: str) -> None:
        self.loops = loops = Loops(call)
        shape = loops.shapes[0]
        at = indexed_dims(call)
        indices = [call["indices"][dim].shape for dim in at]
        index_shape = torch.broadcast_shapes(*indices)
        entries = loops.dims("b", index_shape, over)
        indexed_factors = {i: loops.indexed(f"v{i}", shape[i], looked_up) for i in at}
        self.x = loops.dims("d", shape, but=indexed_factors)
        self.indices: list[Dims] = [_right(entries, shape) for shape in indices]
        # NumPy's rule: adjacent index tensors leave their dims in place, others move them to the front.
        self.before = at[0] if at and at[-1] - at[0] == len(at) - 1 else 0
        rest = [factors for i, factors in enumerate(self.x) if i not in at]
        self.picked: Dims = (*rest[: self.before], *entries, *rest[self.before :])
        self.after = len(rest) - self.before


def _right(dims: Dims, shape: tuple[int, ...]) -> Dims:
    """Return the factors of an operand of ``shape`` that broadcasts to ``dims``, aligned at the right."""
    return tuple(() if n == 1 else factors for n, factors in zip(shape, dims[len(dims) - len(shape) :], strict=True))


def indexed_dims(call: Call) -> list[int]:
    """Return the dims that the call indexes (those whose entry in ``indices`` is not None)."""
    return [dim for dim, index in enumerate(call["indices"]) if index is not None]


def _masks(call: Call) -> bool:
    return any(call["indices"][dim].dtype in (torch.bool, torch.uint8) for dim in indexed_dims(call))


def _all_whole(call: Call) -> Spec:
    """Return a spec that splits nothing: the number of elements that a boolean mask selects depends on the data."""
    loops = Loops(call)
    operands = [loops.dims(f"x{i}.", shape, WHOLE) for i, shape in enumerate(loops.shapes)]
    return loops.spec(operands, [loops.dims("y", loops.result_shapes[0], WHOLE)])


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
    """Return the local indices, the split dims among those indexed, and the mask of entries on this rank."""
    call = local.builder.call
    indices, mask = list(local.operand("indices")), None
    dims = [dim for dim in indexed_dims(local.call) if split(layout, dim)]
    for dim in indexed_dims(local.call):
        indices[dim] = in_range(local, layout, dim, indices[dim], wraps=True)
        if dim not in dims:
            continue
        indices[dim], is_local = owned(local, layout, dim, indices[dim])
        mask = is_local if mask is None else call(aten.logical_and.default, mask, is_local)
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
        return local.same(self=once_per_sum(local, x), indices=indices)
    if local.call["accumulate"]:
        after = Indexed(local.call, FREE, FREE).after
        values = zero_unless(local, align(local, mask, after), local.operand("values"))
        return local.same(self=once_per_sum(local, x), indices=indices, values=values)
    x, indices[dims[0]] = past_end(local, x, layout, dims[0], indices[dims[0]], mask)
    written = local.same(self=x, indices=indices)
    return local.builder.call(aten.slice.Tensor, written, dims[0], 0, layout.local_shape[dims[0]])


TABLE = table(
    rules_for("index.Tensor _unsafe_index.Tensor", _index, "v d, k -> k d    v: sum    linear in self", _index_local),
    rules_for(
        "index_put _unsafe_index_put",
        _index_put,
        "v d, k, k d -> v d    k: sum where accumulating, else whole    linear in self and values",
        _index_put_local,
    ),
    strides=ANY,
)
