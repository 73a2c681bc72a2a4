"""Rules for embeddings, and for lookups and writes by index. If the indexed dim is split, each rank handles the indices
that point into its shard.

Lookups: an entry that another rank holds reads as zero, so the result is a partial sum. Writes: a rank writes only the
entries that it holds. If the op adds, the index may be split too (the result is a partial sum); if the op replaces,
every rank needs the complete index.

Factors have the same names in all these rules: ``v`` is the indexed dim of the tensor, ``k`` is over the index, ``d``
(or ``d0``, ``d1``, ...) are the other dims of the tensor. `Indexed` has those of indexing by several tensors,
``x[i, :, j]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardc.ir.layout import Layout
from shardc.rules.notation import FREE, WHOLE, Loops, broadcast_factors
from shardc.rules.positions import align, in_range, locate, once_per_sum, past_end, split, to_local_indices, zero_unless
from shardc.rules.rule import ANY, CONTIGUOUS, Call, Emitted, Local, Localize, Rule, rules_for, table
from shardc.rules.spec import Dims, Factors, Spec

aten = torch.ops.aten


# --- embedding


def _embedding(call: Call) -> Spec:
    """Return the spec of an embedding lookup: a split of the rows of the table leaves a partial sum."""
    loops = Loops(call)
    weight, index = loops.shapes
    rows, row = loops.dims("i", index), loops.dim("d", weight[1])
    return loops.spec([(loops.indexed("v", weight[0], "sum"), row), rows], [(*rows, row)], linear=[{0}])


def _embedding_local(local: Local) -> Emitted:
    """Emit and return a lookup in this rank's rows of the table; entries of other ranks read as zero."""
    index, mask = locate(local, local.operands[0], 0, local.operand("indices"))
    if mask is None:
        return local.same(indices=index)
    rows = local.builder.call(aten.embedding.default, local.operand("weight"), index)
    return zero_unless(local, align(local, mask, 1), rows)


def _embedding_backward(call: Call) -> Spec:
    """Return the spec of the gradient of a table: a split of the index leaves a partial sum. With
    ``scale_grad_by_freq`` neither index nor rows may be split.
    """
    loops = Loops(call)
    grad, index = loops.shapes
    # Scaling by frequency counts how often each index occurs, so every rank needs all of them.
    counts = call["scale_grad_by_freq"]
    rows, row = loops.dims("i", index, WHOLE if counts else "sum"), loops.dim("d", grad[-1])
    vocabulary = loops.dim("v", call["num_weights"], WHOLE if counts else FREE)
    return loops.spec([(*rows, row), rows], [(vocabulary, row)], linear=[{0}])


def _embedding_backward_local(local: Local) -> Emitted:
    """Emit and return the gradient of this rank's rows of the table."""
    layout = local.results[0]
    if not split(layout, 0):
        return local.same()
    call, indices, padding = local.builder.call, local.operand("indices"), local.call["padding_idx"]
    index, mask = to_local_indices(local, layout, 0, indices)
    if padding >= 0:
        mask = call(aten.logical_and.default, mask, call(aten.ne.Scalar, indices, padding))
    grad = zero_unless(local, align(local, mask, 1), local.operand("grad_output"))
    return call(aten.embedding_dense_backward.default, grad, index, layout.local_shape[0], -1, False)


def _embedding_bag(call: Call) -> Spec:
    """Return the spec of ``embedding_bag``: rows are reduced bag by bag, so only the embedding dim can be split."""
    loops = Loops(call)
    row = loops.dim("d", loops.shapes[0][1])
    operands: list[Dims] = [(loops.dim("v", loops.shapes[0][0], WHOLE), row)]
    operands += [loops.dims(f"x{at}.", shape, WHOLE) for at, shape in enumerate(loops.shapes[1:])]
    bags = loops.dim("bags", loops.result_shapes[0][0], WHOLE)
    rest = [loops.dims(f"y{at}.", shape, WHOLE) for at, shape in enumerate(loops.result_shapes[1:-1])]
    # In mode "max" the last result is the index of the largest row, per element.
    largest = (bags, row) if call["mode"] == _MAX else loops.dims("largest", loops.result_shapes[-1], WHOLE)
    replicated = [1, 2] if call["mode"] == _MAX else [1, 2, 3]
    return loops.spec(operands, [(bags, row), *rest, largest], replicated=replicated)


_MAX = 2


# --- gather and scatter: the index has as many dims as the tensor


def _gather_factors(call: Call, looked_up: str, over: str) -> tuple[Loops, list[Dims]]:
    """Return (`Loops`, factors of each operand's dims) of a gather or scatter along argument ``dim``. ``looked_up`` and
    ``over``: kinds of the factors of the tensor's indexed dim and of the index along it.

    These are ``v`` of the tensor (operand 0), and ``k`` of the index and the source. The other dims share a factor if
    all operands have the same size there; if not they are whole.
    """
    loops = Loops(call)
    if len({len(shape) for shape in loops.shapes}) > 1:
        # torch accepts an empty index of any rank, and a zero-dim index for a single entry.
        return loops, [loops.dims(f"x{at}.", shape, WHOLE) for at, shape in enumerate(loops.shapes)]
    dim = call.dim
    out: list[list[Factors]] = [[] for _ in loops.shapes]
    for i, sizes in enumerate(zip(*loops.shapes, strict=True)):
        for at, size in enumerate(sizes):
            if i == dim and at == 0:
                out[at].append(loops.indexed("v", size, looked_up))
            elif i == dim and at == 1:
                # A source larger than its index cannot be split with it: their shards would not correspond.
                out[at].append(loops.dim("k", size, over if set(sizes[1:]) == {size} else WHOLE))
            elif i == dim and size == sizes[1]:
                out[at].append(out[1][i])
            elif i != dim and len(set(sizes)) == 1:
                out[at].append(loops.dim(f"d{i}", size))
            else:
                out[at].append(loops.dim(f"d{i}.{at}", size, WHOLE))
    return loops, [tuple(dims) for dims in out]


def _gather(call: Call) -> Spec:
    """Return the spec of ``gather``: a split of the dim looked up leaves a partial sum."""
    loops, (x, index) = _gather_factors(call, looked_up="sum", over=FREE)
    return loops.spec([x, index], [index], linear=[{0}])


def _lookup_local(local: Local) -> Emitted:
    """Emit and return a gather or index_select of the entries in this rank's shard, with zero for entries of other
    ranks.
    """
    dim, (x, of_index) = local.call.dim, local.call.operands
    index, mask = locate(local, local.operands[0], dim, local.operand("index"))
    if mask is None:
        return local.same(index=index)
    # An index of one dim (`index_select`): its mask applies along the indexed dim.
    if len(of_index.shape) != len(x.shape):
        mask = align(local, mask, len(local.results[0].shape) - dim - len(of_index.shape))
    return zero_unless(local, mask, local.same(index=index))


def _scatter(call: Call) -> Spec:
    """Return the spec of writes that replace: a rank writes the entries that it holds, so all ranks need the index."""
    loops, operands = _gather_factors(call, looked_up=FREE, over=WHOLE)
    linear: list[set[int]] = []
    if call.name == "aten.scatter.src":
        linear = [{0, 2}]
    elif call.name == "aten.scatter.value" and call["value"] == 0:
        linear = [{0}]
    return loops.spec(operands, operands[:1], linear=linear)


def _scatter_add(call: Call) -> Spec:
    """Return the spec of writes that add: entries may be split over ranks, and the result is then a partial sum."""
    loops, operands = _gather_factors(call, looked_up=FREE, over="sum")
    tensor, source = 0, 2  # the op is linear in both together
    return loops.spec(operands, operands[:1], linear=[{tensor, source}])


# --- index_select, index_add, ...: a one-dim index, each entry of which selects a slice of the tensor


def _slices(call: Call, looked_up: str, over: str) -> tuple[Loops, Dims, Dims, Dims]:
    """Return (`Loops`, factors of the tensor's dims, of the index, of the slices) for an op that selects slices by a
    one-dim index along argument ``dim``. Slices have the tensor's dims, with the index's factor in place of the indexed
    dim's.

    Example: for ``index_select(x, 1, index)`` with ``x`` [8, 10, 4] and ``index`` [3] these are (d0, v, d2), (k,) and
    (d0, k, d2): the result has shape [8, 3, 4].

    Args:
        looked_up: kind of ``v``, the indexed dim of the tensor.
        over: kind of ``k``, the index.
    """
    loops = Loops(call)
    dim = call.dim
    shape = loops.shapes[0]
    x = loops.dims("d", shape, but={dim: loops.indexed("v", shape[dim], looked_up)} if shape else None)
    index = loops.dims("k", loops.shapes[1], over)
    if not shape:  # torch indexes a zero-dim tensor as if it had one dim
        return loops, x, index, ()
    selected: Dims = index or ((),)  # a zero-dim index selects one slice
    return loops, x, index, (*x[:dim], *selected, *x[dim + 1 :])


def _index_select(call: Call) -> Spec:
    """Return the spec of ``index_select``: a split of the dim looked up leaves a partial sum."""
    loops, x, index, slices = _slices(call, "sum", FREE)
    return loops.spec([x, index], [slices], linear=[{0}])


def _index_write(call: Call, over: str) -> Spec:
    """Return the spec of a write by index of whole slices, such as ``index_copy``. ``over``: the kind of the factor of
    the index.
    """
    loops, x, index, slices = _slices(call, FREE, over)
    if len(loops.shapes) == 2:
        return loops.spec([x, index], [x], linear=[{0}] if call["value"] == 0 else ())
    # index_fill takes a zero-dim tensor that fills every slice.
    return loops.spec([x, index, slices if loops.shapes[2] else ()], [x], linear=[{0, 2}])


def _write_local(local: Local) -> Emitted:
    """Emit a write by index that replaces elements (no sum), and return its result. Indices into other ranks' shards
    write to an extra element at the end, which is then cut off.
    """
    layout, dim = local.results[0], local.call.dim
    wraps = local.call.target.overloadpacket is aten.index_fill
    index, mask = locate(local, layout, dim, local.operand("index"), wraps)
    if mask is None:
        return local.same(index=index)
    padded, index = past_end(local, local.operand("self"), layout, dim, index, mask)
    written = local.same(self=padded, index=index)
    return local.builder.call(aten.slice.Tensor, written, dim, 0, layout.local_shape[dim])


def _add_local(source: str) -> Localize:
    """Return the localize function of ops that add entries of their argument ``source`` to a tensor, by index. Each
    rank adds the entries whose places are in its shard, and zeros in place of the other entries.
    """

    def localize(local: Local) -> Emitted:
        dim, added = local.call.dim, local.operand(source)
        checked = in_range(local, local.results[0], dim, local.operand("index"))
        total = once_per_sum(local, local.operand("self"))
        if not split(local.results[0], dim):
            return local.same(self=total, index=checked)
        index, mask = to_local_indices(local, local.results[0], dim, checked)
        source_shape, index_shape = local.call.operands[2].shape, local.call.operands[1].shape
        if len(source_shape) != len(index_shape):
            mask = align(local, mask, len(source_shape) - dim - 1)
        for i, (size, used) in enumerate(zip(source_shape, index_shape, strict=False)):
            # The source may be larger than the index (`_gather_factors` keeps both whole then): use its begin.
            if len(source_shape) == len(index_shape) and size != used:
                added = local.builder.call(aten.slice.Tensor, added, i, 0, used)
        return local.same(self=total, index=index, **{source: zero_unless(local, mask, added)})

    return localize


# --- searchsorted and bucketize


def _sorted(call: Call) -> Spec:
    """Return the spec of a search in sorted boundaries. Their last dim must not be split; the dims before it may be,
    together with those of the values that are searched.
    """
    loops = Loops(call)
    shapes = dict(zip(loops.names, loops.shapes, strict=True))
    boundaries = shapes["boundaries"] if "boundaries" in shapes else shapes["sorted_sequence"]
    shared = len(boundaries) - 1

    def dims(name: str, shape: Sequence[int]) -> Dims:
        prefix = "n" if name != "self" else "d"
        return tuple(
            loops.dim(f"d{i}" if i < shared else f"{prefix}{i}", size, FREE if i < shared or prefix == "d" else WHOLE)
            for i, size in enumerate(shape)
        )

    return loops.spec(
        [dims(n, s) for n, s in zip(loops.names, loops.shapes, strict=True)], [dims("self", loops.result_shapes[0])]
    )


# --- isin


def _isin(call: Call) -> Spec:
    """Return the spec of ``isin``: test elements may be split, which leaves a partial "max" ("min" if inverted)."""
    loops, kind = Loops(call), "min" if call["invert"] else "max"
    elements = loops.dims("d", loops.result_shapes[0])
    tests = [
        loops.dims("t", shape, kind) for name, shape in zip(loops.names, loops.shapes, strict=True) if name[0] == "t"
    ]
    return loops.spec([elements, *tests] if "elements" in loops.names else tests, [elements])


_ADDS = "v ..., k ..., k ... -> v ...    k: sum    linear in both"
_REPLACES = "v ..., k ..., k ... -> v ...    k: whole    linear in both"

_ALONG_DIMS = table(
    Rule("aten.embedding", _embedding, "v d, ... -> ... d    v: sum    linear in weight", _embedding_local),
    Rule(
        "aten.embedding_dense_backward",
        _embedding_backward,
        "... d, ... -> v d    ...: sum    linear in grad_output",
        _embedding_backward_local,
    ),
    Rule("aten.gather", _gather, "v ..., k ... -> k ...    v: sum    linear in self", _lookup_local),
    Rule("aten.index_select", _index_select, "v ..., k -> k ...    v: sum    linear in self", _lookup_local),
    Rule("aten.scatter", _scatter, _REPLACES, _write_local),
    Rule("aten.scatter_reduce", _scatter, "v ..., k ..., k ... -> v ...    k: whole", _write_local),
    Rule("aten.scatter_add", _scatter_add, _ADDS, _add_local("src")),
    Rule("aten.index_add", lambda call: _index_write(call, "sum"), _ADDS, _add_local("source")),
    Rule("aten.index_copy", lambda call: _index_write(call, WHOLE), _REPLACES, _write_local),
    Rule("aten.index_fill", lambda call: _index_write(call, WHOLE), _REPLACES, _write_local),
    Rule("aten.bucketize", _sorted, "..., n -> ...    n: whole"),
    Rule("aten.searchsorted", _sorted, "... n, ... m -> ... m    n: whole"),
    strides=ANY,
) | table(
    Rule("aten._embedding_bag", _embedding_bag, "v d, ... -> bags d    v bags: whole"),
    Rule("aten.isin", _isin, "..., t -> ...    t: max, or min where inverted"),
    strides=CONTIGUOUS,
)


class Indexed:
    """The factors (loops that an axis may split) of each dim of an indexed tensor, of its index tensors and of the
    result.

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
        self.indices: list[Dims] = [broadcast_factors(entries, shape) for shape in indices]
        # NumPy's rule: adjacent index tensors leave their dims in place, others move them to the front.
        self.before = at[0] if at and at[-1] - at[0] == len(at) - 1 else 0
        rest = [factors for i, factors in enumerate(self.x) if i not in at]
        self.picked: Dims = (*rest[: self.before], *entries, *rest[self.before :])
        self.after = len(rest) - self.before


def indexed_dims(call: Call) -> list[int]:
    """Return the dims that the call indexes (those whose entry in ``indices`` is not None)."""
    return [dim for dim, index in enumerate(call["indices"]) if index is not None]


def _masks(call: Call) -> bool:
    """Return whether an index is a boolean mask, for which the number of results depends on data."""
    return any(call["indices"][dim].dtype in (torch.bool, torch.uint8) for dim in indexed_dims(call))


def _all_whole(call: Call) -> Spec:
    """Return a spec that splits nothing: the number of elements that a boolean mask selects depends on the data."""
    loops = Loops(call)
    operands = [loops.dims(f"x{i}.", shape, WHOLE) for i, shape in enumerate(loops.shapes)]
    return loops.spec(operands, [loops.dims("y", loops.result_shapes[0], WHOLE)])


def _index(call: Call) -> Spec:
    """Return the spec of indexing by tensors, ``x[i, :, j]``."""
    if _masks(call):
        return _all_whole(call)
    dims = Indexed(call, "sum", FREE)
    return dims.loops.spec([dims.x, *dims.indices], [dims.picked], linear=[{0}])


def _index_put(call: Call) -> Spec:
    """Return the spec of a write by tensors of indices, ``x[i, :, j] = y``."""
    if _masks(call):
        return _all_whole(call)
    dims = Indexed(call, FREE, "sum" if call["accumulate"] else WHOLE)
    values = len(dims.indices) + 1
    operands = [dims.x, *dims.indices, broadcast_factors(dims.picked, dims.loops.shapes[values])]
    return dims.loops.spec(operands, [dims.x], linear=[{0, values}])


# --- on shards


def _locate_all(local: Local, layout: Layout) -> tuple[list[Emitted], list[int], Emitted]:
    """Return (index tensors, split dims, mask). The index tensors are in local indices along the split dims, which are
    the indexed dims that ``layout`` splits. The mask is true at the entries that this rank holds; None if no indexed
    dim is split.
    """
    call = local.builder.call
    indices, mask = list(local.operand("indices")), None
    dims = [dim for dim in indexed_dims(local.call) if split(layout, dim)]
    for dim in indexed_dims(local.call):
        indices[dim], is_local = locate(local, layout, dim, indices[dim], wraps=True)
        if is_local is not None:
            mask = is_local if mask is None else call(aten.logical_and.default, mask, is_local)
    return indices, dims, mask


def _index_local(local: Local) -> Emitted:
    """Emit and return indexing by tensors on a shard; entries of other ranks read as zero."""
    indices, dims, mask = _locate_all(local, local.operands[0])
    if not dims:
        return local.same(indices=indices)
    after = Indexed(local.call, FREE, FREE).after
    return zero_unless(local, align(local, mask, after), local.same(indices=indices))


def _index_put_local(local: Local) -> Emitted:
    """Emit a write by tensors of indices to this rank's entries, and return its result."""
    layout = local.results[0]
    x = local.operand("self")
    indices, dims, mask = _locate_all(local, layout)
    if not dims:
        return local.same(self=once_per_sum(local, x), indices=indices)
    if local.call["accumulate"]:
        # The mask covers the dims of the index, which each value's own ``after`` dims follow.
        after = Indexed(local.call, FREE, FREE).after
        values = zero_unless(local, align(local, mask, after), local.operand("values"))
        return local.same(self=once_per_sum(local, x), indices=indices, values=values)
    x, indices[dims[0]] = past_end(local, x, layout, dims[0], indices[dims[0]], mask)
    written = local.same(self=x, indices=indices)
    return local.builder.call(aten.slice.Tensor, written, dims[0], 0, layout.local_shape[dims[0]])


_BY_TENSORS = table(
    rules_for("index.Tensor _unsafe_index.Tensor", _index, "v d, k -> k d    v: sum    linear in self", _index_local),
    rules_for(
        "index_put _unsafe_index_put",
        _index_put,
        "v d, k, k d -> v d    k: sum where accumulating, else whole    linear in self and values",
        _index_put_local,
    ),
    strides=ANY,
)

TABLE = _ALONG_DIMS | _BY_TENSORS
