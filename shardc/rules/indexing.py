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
    """Return the spec of an embedding lookup, of a table ``v d`` and an index ``i...``: a split of the rows ``v`` of
    the table leaves a partial sum, as each rank has zeros for the rows of other ranks.
    """
    loops = Loops(call)
    weight, index = loops.shapes
    ids, row = loops.dims("i", index), loops.dim("d", weight[1])
    of_table = (loops.indexed("v", weight[0], kind="sum"), row)
    table_position = 0  # the lookup is linear in the table: if that is a partial sum, so is the result
    return loops.spec([of_table, ids], [(*ids, row)], linear=[{table_position}])


def _embedding_local(local: Local) -> Emitted:
    """Emit and return a lookup in this rank's rows of the table; entries of other ranks read as zero."""
    table_layout = local.operands[0]
    # Indices in this rank's rows, and which entries these are (for others the index is 0).
    index, mask = locate(local, table_layout, 0, local.operand("indices"))
    if mask is None:  # the rows are not split
        return local.same(indices=index)
    # Without the other arguments (`padding_idx`, ...): they matter to the gradient alone.
    rows = local.builder.call(aten.embedding.default, local.operand("weight"), index)
    return zero_unless(local, align(local, mask, 1), rows)  # a row has one dim more than its index


def _embedding_backward(call: Call) -> Spec:
    """Return the spec of the gradient of a table: rows ``i... d`` of the incoming gradient are added at an index
    ``i...`` to a table ``v d``, so that a split of the index leaves a partial sum. With ``scale_grad_by_freq`` neither
    index nor rows may be split.
    """
    loops = Loops(call)
    grad, index = loops.shapes
    # Scaling by frequency counts how often each index occurs, so every rank needs all of them.
    counts = call["scale_grad_by_freq"]
    ids, row = loops.dims("i", index, kind=WHOLE if counts else "sum"), loops.dim("d", grad[-1])
    vocabulary = loops.dim("v", call["num_weights"], kind=WHOLE if counts else FREE)
    grad_position = 0  # linear in the incoming gradient: if that is a partial sum, so is the result
    return loops.spec([(*ids, row), ids], [(vocabulary, row)], linear=[{grad_position}])


def _embedding_backward_local(local: Local) -> Emitted:
    """Emit and return the gradient of this rank's rows of the table. An entry whose row another rank holds adds zero to
    the local row 0.
    """
    layout = local.results[0]
    if not split(layout, 0):  # this rank has all rows
        return local.same()
    call, indices, padding = local.builder.call, local.operand("indices"), local.call["padding_idx"]
    index, mask = to_local_indices(local, layout, 0, indices)  # the mask is true where this rank holds the row
    # The padding index is a global one (-1 for none), so its entries are masked here in place of by the op.
    if padding >= 0:
        mask = call(aten.logical_and.default, mask, call(aten.ne.Scalar, indices, padding))
    grad = zero_unless(local, align(local, mask, 1), local.operand("grad_output"))
    no_padding, scale_by_frequency = -1, False  # with scaling the rows are never split
    rows = layout.local_shape[0]
    return call(aten.embedding_dense_backward.default, grad, index, rows, no_padding, scale_by_frequency)


def _embedding_bag(call: Call) -> Spec:
    """Return the spec of ``embedding_bag``: rows are reduced bag by bag, so only the embedding dim ``d`` can be
    split.
    """
    loops = Loops(call)
    row = loops.dim("d", loops.shapes[0][1])
    operands: list[Dims] = [(loops.dim("v", loops.shapes[0][0], WHOLE), row)]
    operands += [loops.dims(f"x{at}.", shape, WHOLE) for at, shape in enumerate(loops.shapes[1:])]
    # Results: the bags, two that follow from the indices alone, and the index of the largest row (in mode "max" only,
    # per element of a bag).
    bags = loops.dim("bags", loops.result_shapes[0][0], WHOLE)
    of_indices = [loops.dims(f"y{at}.", shape, WHOLE) for at, shape in enumerate(loops.result_shapes[1:-1])]
    largest = (bags, row) if call["mode"] == _MAX else loops.dims("largest", loops.result_shapes[-1], WHOLE)
    replicated = [1, 2] if call["mode"] == _MAX else [1, 2, 3]  # positions of results that no split of d changes
    return loops.spec(operands, [(bags, row), *of_indices, largest], replicated=replicated)


_MAX = 2  # torch's number for the mode "max"


# --- gather and scatter: the index has as many dims as the tensor


def _gather_factors(call: Call, looked_up: str, over: str) -> tuple[Loops, list[Dims]]:
    """Return (`Loops`, factors of each operand's dims) of a gather or scatter along argument ``dim``. The operands are
    the tensor, the index and, of a scatter of a tensor, the source.

    Along ``dim`` the tensor has the factor ``v``, the index and the source have ``k``. The other dims share a factor if
    all operands have the same size there; if not they are whole.

    Example: ``gather(x, 1, index)`` with ``x`` [8, 10] and ``index`` [8, 3] has the operands (d0, v) and (d0, k).

    Args:
        looked_up: kind of ``v``: "sum" if the op reads the tensor (a split leaves a partial sum), `FREE` if it writes
            to it (each rank has its shard of the result).
        over: kind of ``k``, in the same way, or `WHOLE` if it must not be split.
    """
    loops = Loops(call)
    if len({len(shape) for shape in loops.shapes}) > 1:
        # torch accepts an empty index of any rank, and a zero-dim index for a single entry.
        return loops, [loops.dims(f"x{at}.", shape, WHOLE) for at, shape in enumerate(loops.shapes)]
    dim = call.dim
    tensor, index = 0, 1  # positions of the operands
    out: list[list[Factors]] = [[] for _ in loops.shapes]
    for i, sizes in enumerate(zip(*loops.shapes, strict=True)):  # dim by dim, the sizes that the operands have there
        for at, size in enumerate(sizes):
            if i == dim and at == tensor:
                out[at].append(loops.indexed("v", size, kind=looked_up))
            elif i == dim and at == index:
                # A source larger than its index cannot be split with it: their shards would not correspond.
                out[at].append(loops.dim("k", size, kind=over if set(sizes[index:]) == {size} else WHOLE))
            elif i == dim and size == sizes[index]:  # the source, entry by entry as the index
                out[at].append(out[index][i])
            elif i != dim and len(set(sizes)) == 1:
                out[at].append(loops.dim(f"d{i}", size))
            else:
                out[at].append(loops.dim(f"d{i}.{at}", size, WHOLE))
    return loops, [tuple(dims) for dims in out]


def _gather(call: Call) -> Spec:
    """Return the spec of ``gather``: a split of the dim looked up leaves a partial sum. The result has the dims of the
    index.
    """
    loops, (x, index) = _gather_factors(call, looked_up="sum", over=FREE)
    tensor_position = 0  # linear in the tensor that is read: if that is a partial sum, so is the result
    return loops.spec([x, index], [index], linear=[{tensor_position}])


def _lookup_local(local: Local) -> Emitted:
    """Emit and return a gather or index_select of the entries in this rank's shard, with zero for entries of other
    ranks.
    """
    dim, (x, of_index) = local.call.dim, local.call.operands
    tensor_layout = local.operands[0]
    # Indices in this rank's shard, and which entries these are (for others the index is 0).
    index, mask = locate(local, tensor_layout, dim, local.operand("index"))
    if mask is None:  # the dim looked up is not split
        return local.same(index=index)
    # An index of one dim (`index_select`): its mask applies along the indexed dim, so dims are appended for those
    # behind it. An index of `gather` has the dims of the result already.
    if len(of_index.shape) != len(x.shape):
        mask = align(local, mask, len(local.results[0].shape) - dim - len(of_index.shape))
    return zero_unless(local, mask, local.same(index=index))


def _scatter(call: Call) -> Spec:
    """Return the spec of writes that replace (``scatter``, ``scatter_reduce``): a rank writes the entries that it
    holds, so all ranks need the index.
    """
    loops, operands = _gather_factors(call, looked_up=FREE, over=WHOLE)
    tensor, source = 0, 2  # positions of the operands; the index is at 1
    # A partial sum passes if what is written is one as well, or zero: another number would be added once per rank.
    # A `scatter_reduce` passes none.
    linear: list[set[int]] = []
    if call.name == "aten.scatter.src":
        linear = [{tensor, source}]
    elif call.name == "aten.scatter.value" and call["value"] == 0:
        linear = [{tensor}]
    return loops.spec(operands, results=[operands[tensor]], linear=linear)


def _scatter_add(call: Call) -> Spec:
    """Return the spec of writes that add: entries may be split over ranks, and the result is then a partial sum."""
    loops, operands = _gather_factors(call, looked_up=FREE, over="sum")
    tensor, source = 0, 2  # the op is linear in both together: it passes a partial sum if both are one
    return loops.spec(operands, results=[operands[tensor]], linear=[{tensor, source}])


# --- index_select, index_add, ...: a one-dim index, each entry of which selects a slice of the tensor


def _slices(call: Call, looked_up: str, over: str) -> tuple[Loops, Dims, Dims, Dims]:
    """Return (`Loops`, factors of the tensor's dims, of the index, of the slices) for an op that selects slices by a
    one-dim index along argument ``dim``. Slices have the tensor's dims, with the index's factor in place of the indexed
    dim's.

    Example: for ``index_select(x, 1, index)`` with ``x`` [8, 10, 4] and ``index`` [3] these are (d0, v, d2), (k,) and
    (d0, k, d2): the result has shape [8, 3, 4].

    Args:
        looked_up: kind of ``v``, the indexed dim of the tensor: "sum" if the op reads the tensor (a split leaves a
            partial sum), `FREE` if it writes to it (each rank has its shard of the result).
        over: kind of ``k``, the index, in the same way, or `WHOLE` if it must not be split.
    """
    loops = Loops(call)
    dim = call.dim
    shape = loops.shapes[0]
    # Factors d0, d1, ... of the dims, and v of the indexed one.
    x = loops.dims("d", shape, but={dim: loops.indexed("v", shape[dim], kind=looked_up)} if shape else None)
    index = loops.dims("k", loops.shapes[1], kind=over)
    if not shape:  # torch indexes a zero-dim tensor as if it had one dim
        return loops, x, index, ()
    selected: Dims = index or ((),)  # a zero-dim index selects one slice
    return loops, x, index, (*x[:dim], *selected, *x[dim + 1 :])


def _index_select(call: Call) -> Spec:
    """Return the spec of ``index_select``: a split of the dim looked up leaves a partial sum."""
    loops, x, index, slices = _slices(call, looked_up="sum", over=FREE)
    tensor_position = 0  # linear in the tensor that is read: if that is a partial sum, so is the result
    return loops.spec([x, index], [slices], linear=[{tensor_position}])


def _index_write(call: Call, over: str) -> Spec:
    """Return the spec of a write by index of whole slices: ``index_add``, ``index_copy``, ``index_fill``. ``over``: the
    kind of the factor of the index: "sum" for writes that add, `WHOLE` for writes that replace, since a rank then
    needs the complete index for the entries that it holds.
    """
    loops, x, index, slices = _slices(call, looked_up=FREE, over=over)
    tensor, source = 0, 2  # positions of the operands; the index is at 1
    if len(loops.shapes) == 2:
        # `index_fill` with a number. Into a partial sum it may write zeros only: others would count once per rank.
        return loops.spec([x, index], [x], linear=[{tensor}] if call["value"] == 0 else ())
    # `index_fill` also takes a zero-dim tensor, without factors, that fills every slice.
    written = slices if loops.shapes[source] else ()
    return loops.spec([x, index, written], [x], linear=[{tensor, source}])


def _write_local(local: Local) -> Emitted:
    """Emit a write by index that replaces elements (no sum), and return its result. Indices into other ranks' shards
    write to an extra element at the end, which is then cut off.
    """
    layout, dim = local.results[0], local.call.dim
    accepts_negative = local.call.target.overloadpacket is aten.index_fill  # as places from the end
    index, mask = locate(local, layout, dim, local.operand("index"), wraps=accepts_negative)
    if mask is None:  # the indexed dim is not split
        return local.same(index=index)
    # A mask as for lookups would not do: an entry of another rank must leave what it points at as it is.
    padded, index = past_end(local, local.operand("self"), layout, dim, index, mask)
    written = local.same(self=padded, index=index)
    return local.builder.call(aten.slice.Tensor, written, dim, 0, layout.local_shape[dim])


def _add_local(source: str) -> Localize:
    """Return the localize function of ops that add entries of their argument named ``source`` to a tensor, by index
    (``scatter_add``, ``index_add``). Each rank adds the entries whose places are in its shard, and zeros in place of
    the other entries.
    """

    def localize(local: Local) -> Emitted:
        """Emit the op on this rank's shard of the tensor, and return its result."""
        dim, added = local.call.dim, local.operand(source)
        checked = in_range(local, local.results[0], dim, local.operand("index"))
        # If entries are split over ranks, the results are summed: only one rank may start from the tensor itself.
        total = once_per_sum(local, local.operand("self"))
        if not split(local.results[0], dim):
            return local.same(self=total, index=checked)
        index, mask = to_local_indices(local, local.results[0], dim, checked)
        index_value, source_value = local.call.operands[1:3]  # behind the tensor; of global shapes
        source_shape, index_shape = source_value.shape, index_value.shape
        if len(source_shape) != len(index_shape):  # `index_add`: each entry of its index is for a slice of the source
            mask = align(local, mask, len(source_shape) - dim - 1)
        for i, (size, used) in enumerate(zip(source_shape, index_shape, strict=False)):
            # The source may be larger than the index (`_gather_factors` keeps both whole then): use its begin.
            if len(source_shape) == len(index_shape) and size != used:
                added = local.builder.call(aten.slice.Tensor, added, i, 0, used)
        return local.same(self=total, index=index, **{source: zero_unless(local, mask, added)})

    return localize


# --- searchsorted and bucketize


def _sorted(call: Call) -> Spec:
    """Return the spec of a search for values in sorted boundaries: ``bucketize``, ``searchsorted``. The last dim of the
    boundaries must not be split; the dims before it may be, together with those of the values.
    """
    loops = Loops(call)
    shapes = dict(zip(loops.names, loops.shapes, strict=True))
    boundaries = shapes["boundaries"] if "boundaries" in shapes else shapes["sorted_sequence"]
    shared = len(boundaries) - 1

    def dims(name: str, shape: Sequence[int]) -> Dims:
        """Return the factors of the dims of the argument ``name``, of ``shape``."""
        # The values are the argument "self". Boundaries, and a sorter of their shape, share all dims but the last.
        return tuple(
            loops.dim(f"d{i}", size) if i < shared or name == "self" else loops.dim(f"n{i}", size, WHOLE)
            for i, size in enumerate(shape)
        )

    operands = [dims(name, shape) for name, shape in shapes.items()]
    return loops.spec(operands, results=[dims("self", loops.result_shapes[0])])


# --- isin


def _isin(call: Call) -> Spec:
    """Return the spec of ``isin``: test elements may be split, which leaves a partial "max" ("min" if inverted): an
    element is in the set if any rank has it.
    """
    loops, kind = Loops(call), "min" if call["invert"] else "max"
    elements = loops.dims("d", loops.result_shapes[0])
    # Of elements and test elements, one may be a number, which is no operand.
    operands = zip(loops.names, loops.shapes, strict=True)
    tests = [loops.dims("t", shape, kind) for name, shape in operands if name.startswith("test")]
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
        looked_up: kind of the indexed factors ``v``: "sum" if a split leaves a partial sum, `FREE` if it does not.
        over: kind of the factors ``b`` of the shape that the indices broadcast to, in the same way, or `WHOLE`.

    Attributes:
        x, indices, picked: factors of each dim of the tensor, of each index tensor, and of what is picked (read).
        before, after: numbers of dims of ``picked`` before and after those of the indices.
    """

    def __init__(self, call: Call, looked_up: str, over: str) -> None:
        self.loops = loops = Loops(call)
        shape = loops.shapes[0]
        at = indexed_dims(call)
        index_shapes = [call["indices"][dim].shape for dim in at]
        entries = loops.dims("b", torch.broadcast_shapes(*index_shapes), kind=over)
        indexed_factors = {i: loops.indexed(f"v{i}", shape[i], kind=looked_up) for i in at}
        self.x = loops.dims("d", shape, but=indexed_factors)
        self.indices: list[Dims] = [broadcast_factors(entries, index_shape) for index_shape in index_shapes]
        # NumPy's rule: adjacent index tensors leave their dims in place, others move them to the front.
        adjacent = bool(at) and at[-1] - at[0] == len(at) - 1
        self.before = at[0] if adjacent else 0  # dims of the result before those of the indices
        rest = [factors for i, factors in enumerate(self.x) if i not in at]  # dims that are not indexed stay
        self.picked: Dims = (*rest[: self.before], *entries, *rest[self.before :])  # of the result of a read
        self.after = len(rest) - self.before


def indexed_dims(call: Call) -> list[int]:
    """Return the dims that the call indexes (those whose entry in ``indices`` is not None)."""
    return [dim for dim, index in enumerate(call["indices"]) if index is not None]


def _masks(call: Call) -> bool:
    """Return whether an index is a boolean mask (or a byte tensor, which torch reads as one), for which the number of
    results depends on data.
    """
    return any(call["indices"][dim].dtype in (torch.bool, torch.uint8) for dim in indexed_dims(call))


def _all_whole(call: Call) -> Spec:
    """Return a spec that splits nothing: the number of elements that a boolean mask selects depends on the data."""
    loops = Loops(call)
    operands = [loops.dims(f"x{i}.", shape, WHOLE) for i, shape in enumerate(loops.shapes)]
    return loops.spec(operands, [loops.dims("y", loops.result_shapes[0], WHOLE)])


def _index(call: Call) -> Spec:
    """Return the spec of indexing by tensors, ``x[i, :, j]``. A split of an indexed dim leaves a partial sum, as each
    rank reads zeros for the entries of others; the entries of the indices may be split freely.
    """
    if _masks(call):
        return _all_whole(call)
    dims = Indexed(call, looked_up="sum", over=FREE)
    tensor_position = 0  # linear in the tensor that is read: if that is a partial sum, so is the result
    return dims.loops.spec([dims.x, *dims.indices], [dims.picked], linear=[{tensor_position}])


def _index_put(call: Call) -> Spec:
    """Return the spec of a write by tensors of indices, ``x[i, :, j] = y``. A rank writes to its shard. If the write
    adds, the entries may be split over ranks, which leaves a partial sum; if it replaces, each rank needs all of them.
    """
    if _masks(call):
        return _all_whole(call)
    dims = Indexed(call, looked_up=FREE, over="sum" if call["accumulate"] else WHOLE)
    # Positions of the operands; the indices are in between. The op is linear in both together.
    tensor, values = 0, len(dims.indices) + 1
    operands = [dims.x, *dims.indices, broadcast_factors(dims.picked, dims.loops.shapes[values])]
    return dims.loops.spec(operands, [dims.x], linear=[{tensor, values}])


# --- on shards


def _locate_all(local: Local, layout: Layout) -> tuple[list[Emitted], list[int], Emitted]:
    """Return (index tensors, split dims, mask). The index tensors are in local indices along the split dims, which are
    the indexed dims that ``layout`` splits. The mask is true at the entries that this rank holds; None if no indexed
    dim is split.
    """
    call = local.builder.call
    indices, mask = list(local.operand("indices")), None
    split_dims = [dim for dim in indexed_dims(local.call) if split(layout, dim)]
    for dim in indexed_dims(local.call):
        indices[dim], is_local = locate(local, layout, dim, indices[dim], wraps=True)
        # A rank holds an entry if it holds its index along each split dim.
        if is_local is not None:
            mask = is_local if mask is None else call(aten.logical_and.default, mask, is_local)
    return indices, split_dims, mask


def _index_local(local: Local) -> Emitted:
    """Emit and return indexing by tensors on a shard; entries of other ranks read as zero."""
    tensor_layout = local.operands[0]
    indices, split_dims, mask = _locate_all(local, tensor_layout)
    if not split_dims:  # each rank has all that the indices may point at
        return local.same(indices=indices)
    # The mask covers the dims of the index, which the ``after`` other dims of the result follow.
    after = Indexed(local.call, looked_up=FREE, over=FREE).after  # of any kind: only the order of dims is asked for
    return zero_unless(local, align(local, mask, after), local.same(indices=indices))


def _index_put_local(local: Local) -> Emitted:
    """Emit a write by tensors of indices to this rank's entries, and return its result. Where it adds, entries of other
    ranks add zero; where it replaces, they are written to an extra element at the end, which is then cut off.
    """
    layout = local.results[0]
    x = local.operand("self")
    indices, split_dims, mask = _locate_all(local, layout)
    # `once_per_sum`: if entries are split over ranks, the results are summed, and ``x`` must count once.
    if not split_dims:
        return local.same(self=once_per_sum(local, x), indices=indices)
    if local.call["accumulate"]:
        # The mask covers the dims of the index, which each value's own ``after`` dims follow.
        after = Indexed(local.call, looked_up=FREE, over=FREE).after
        values = zero_unless(local, align(local, mask, after), local.operand("values"))
        return local.same(self=once_per_sum(local, x), indices=indices, values=values)
    # An extra element along one dim is enough for all entries of other ranks.
    dim = split_dims[0]
    x, indices[dim] = past_end(local, x, layout, dim, indices[dim], mask)
    written = local.same(self=x, indices=indices)
    return local.builder.call(aten.slice.Tensor, written, dim, 0, layout.local_shape[dim])


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
