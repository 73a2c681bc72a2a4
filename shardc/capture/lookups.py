"""Rewrites lookups that read all places of a dim in order (by ``arange``) as ops on that dim, without an index for it.

``x[b, i]`` with ``b = arange(x.shape[0])[:, None]`` reads entries of each row in the order of the rows. As a lookup it
leaves a pending sum where rows are split; written as a dim it does not. If ``i`` is another one for each row, as in
``logits[arange(rows), target]``, the lookup is a ``gather`` of each row. Gradients add in the same way. Functions that
`flex_attention` takes read like this, too (``bias[head]``, ``document[batch, query]``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import _trace_wrapped_higher_order_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from shardc.capture.decompositions import insert_call, inverse

aten = torch.ops.aten
SCATTER = getattr(_trace_wrapped_higher_order_op, "zeros_and_scatter")._opoverload  # noqa: B009
_READS = (aten.index.Tensor, aten._unsafe_index.Tensor)
_WRITES = (aten.index_put.default, aten._unsafe_index_put.default)
_ARANGE = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_VIEWS = (
    aten.view.default, aten.unsqueeze.default, aten.expand.default, aten.alias.default, aten.detach.default,
    aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.squeeze.dim,
)  # fmt: skip


def lookups_by_place(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Rewrites lookups in a table, and the writes that are their gradients, in which an index is ``arange(n)`` for a
    dim of size n. The new ops do not index this dim: they have it as a dim of their operands.
    """
    for node in graph.nodes:
        if node.target in (*_READS, *_WRITES, SCATTER):
            with mode, torch.no_grad(), graph.inserting_before(node):
                lookup = _Lookup(graph, node)
                new = lookup.insert_read() if node.target in _READS else lookup.insert_write()
            if new is not None:
                node.replace_all_uses_with(new)
    graph.eliminate_dead_code()


@dataclass(frozen=True)
class _Index:
    """The index tensor of one dim of a lookup's table, and whether it reads that dim in order.

    Args:
        node: the index tensor.
        dims: dims of the broadcast indices over which it may vary.
        place: the dim of the broadcast indices along which it is ``arange``; None if it is not an ``arange``.
    """

    node: fx.Node
    dims: frozenset[int]
    place: int | None


class _Lookup:
    """One lookup in a table (``table[indices]``) or write to it. Knows which dims of the table the indices read in
    order: 0, 1, 2 and so on.

    Attributes:
        plain: whether every index is a tensor of integers.
        index_shape: of the indices, broadcast against each other.
        table_shape: of the table.
        along: whether another index varies along a dim of an ``arange`` too: it selects another entry in each row, as
            ``gather`` does.
        ordered, others, tail: the table's dims that are read in order, those with another index, those without one;
            `table_order` has all of them.
        places: for each dim in ``ordered``, the dim of the broadcast indices along which it is read.
        rest: the other dims of the broadcast indices.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node
        # SCATTER(sizes, indices, values) adds values to zeros of these sizes; the other ops take (table, indices, ...).
        scatters = node.target is SCATTER
        self.table_shape = tuple(map(int, node.args[0])) if scatters else tuple(node.args[0].meta["val"].shape)
        nodes: Sequence[Any] = node.args[1]
        self.ordered: list[int] = []  # the table's dims that are read in order; none if an index is a mask or missing
        self.plain = bool(nodes) and all(
            isinstance(x, fx.Node) and x.meta["val"].dtype not in (torch.bool, torch.uint8) for x in nodes
        )
        if not self.plain:
            return
        self.index_shape = torch.broadcast_shapes(*(x.meta["val"].shape for x in nodes))
        self.indices = [self._index(x, size) for x, size in zip(nodes, self.table_shape, strict=False)]
        all_places = [x.place for x in self.indices]
        # Of several indices along one dim of the result, only the first reads its dim in order.
        by_place = [x.place is not None and all_places.index(x.place) == at for at, x in enumerate(self.indices)]
        others = [x for x, in_order in zip(self.indices, by_place, strict=True) if not in_order]
        # Whether each row reads another entry (``logits[arange(rows), target]``): a ``gather``, not an ``index``.
        self.along = any(x.dims.intersection(all_places) for x in others)
        if self.along and len(others) > 1:  # `gather` takes one index only
            # Then a dim counts as read in order only if no other index varies over it.
            by_place = [
                in_order and not any(x.place in other.dims for other in self.indices if other is not x)
                for x, in_order in zip(self.indices, by_place, strict=True)
            ]
            self.along = False
        # The table's dim -> the dim of the broadcast indices along which it is read in order.
        by_dim = {dim: x.place for dim, x in enumerate(self.indices) if x.place is not None and by_place[dim]}
        self.ordered = sorted(by_dim, key=by_dim.__getitem__)
        self.places = [by_dim[dim] for dim in self.ordered]
        self.others = [dim for dim in range(len(self.indices)) if dim not in by_dim]  # with another index
        self.tail = list(range(len(self.indices), len(self.table_shape)))  # without an index
        self.table_order = [*self.ordered, *self.others, *self.tail]
        self.rest = [dim for dim in range(len(self.index_shape)) if dim not in self.places]  # of the broadcast indices

    def insert_read(self) -> fx.Node | None:
        """Inserts ops that replace the lookup; returns the node of the result. None, and no ops, if no dim of the table
        is read in order, or if an index is missing or is a mask.
        """
        if not self.ordered:
            return None
        # The table with the dims that are read in order first: the others are indexed for each of their places.
        x = self._call(aten.permute.default, self.node.args[0], self.table_order)
        if self.along:  # each place reads entries of its own
            return self._in_order(self._call(aten.gather.default, x, len(self.ordered), self._entries()))
        if self.others:
            x = self._call(aten.index.Tensor, x, [*[None] * len(self.ordered), *self._squeezed(self.rest)])
        return self._call(aten.expand.default, self._to_result_dims(x), self.node.meta["val"].shape)

    def insert_write(self) -> fx.Node | None:
        """Inserts ops that replace this write to a table; returns the node of the table after the write. None, and no
        ops, if the write stays as it is.
        """
        scatters = self.node.target is SCATTER
        table: Any = None if scatters else self.node.args[0]
        values: Any = self.node.args[2]
        adds = scatters or self.node.args[3:4] == (True,)  # ``accumulate``
        # Shape of the values: the broadcast indices, then the dims without an index.
        values_shape = (*self.index_shape, *self.table_shape[len(self.indices) :]) if self.ordered else None
        if values_shape is None or (scatters and values.meta["val"].shape != values_shape):
            # SCATTER, an op of flex_attention's gradients, is replaced in any case.
            return self._scatter(self.table_shape, self.node.args[1], values) if scatters else None
        # Along a dim that no index varies over, all values go to one entry.
        varies = frozenset().union(*(x.dims for x in self.indices))
        fixed = [dim for dim in range(len(self.index_shape)) if dim not in varies]
        if fixed and not adds:
            return None  # several values are written to one entry, and the last one stays
        values = self._call(aten.expand.default, values, values_shape)
        if table is not None and adds and table.target is aten.full.default and table.args[1] == 0:
            table = None  # zeros, which are made in the order of dims in which they are needed
        if table is not None:
            table = self._call(aten.permute.default, table, self.table_order)
        written = self._scatter_rows(values, table, adds) if self.along else self._put(values, table, adds, fixed)
        return self._call(aten.permute.default, written, inverse(self.table_order))

    def _scatter_rows(self, values: fx.Node, table: fx.Node | None, adds: bool) -> fx.Node:
        """Insert the write by a ``scatter`` along the table's only dim in ``others``: each row (place of the dims in
        ``ordered``) has indices of its own. Return the table after it, with its dims in `table_order`.

        Args:
            values: what is written, with the dims of the broadcast indices, then ``tail``.
            table: the table before, with its dims in `table_order`; None for zeros.
            adds: whether values are added to the table, rather than replace its entries.
        """
        # A scatter takes values with the dims of its index (see `_entries`): read in order, ``rest`` as one, ``tail``.
        tail = range(len(self.index_shape), values.meta["val"].ndim)
        values = self._call(aten.permute.default, values, [*self.places, *self.rest, *tail])
        index = self._entries()
        if len(self.rest) != 1:
            values = self._call(aten.view.default, values, index.meta["val"].shape)
        table = self._zeros([self.table_shape[dim] for dim in self.table_order], values) if table is None else table
        target = aten.scatter_add.default if adds else aten.scatter.src
        other = len(self.ordered)  # where `table_order` has the dim with the other index
        return self._call(target, table, other, index, values)

    def _put(self, values: fx.Node, table: fx.Node | None, adds: bool, fixed: Sequence[int]) -> fx.Node:
        """Insert the write by an ``index_put``; if all indices are in order, the values are the new table or are added
        to it. Return the table after the write, with its dims in `table_order`; arguments are those of `_scatter_rows`.

        Args:
            fixed: dims of the broadcast indices that no index varies over: all values along them go to one entry.
        """
        dims = [dim for dim in range(values.meta["val"].ndim) if dim not in fixed]
        if fixed:
            summed = self._call(aten.sum.dim_IntList, values, fixed, True)
            values = self._call(aten.squeeze.dims, summed, fixed)
        rest = [dim for dim in self.rest if dim not in fixed]
        # Values in the table's order of dims: read in order, other indices, without an index.
        wanted = [*self.places, *rest, *(dim for dim in dims if dim >= len(self.index_shape))]
        values = self._call(aten.permute.default, values, [dims.index(dim) for dim in wanted])
        if self.others:  # else every entry is written once, in order
            indices = [*[None] * len(self.ordered), *self._squeezed(rest)]
            table = self._zeros([self.table_shape[dim] for dim in self.table_order], values) if table is None else table
            return self._call(aten.index_put.default, table, indices, values, adds)
        return values if table is None or not adds else self._call(aten.add.Tensor, table, values)

    def _entries(self) -> fx.Node:
        """Insert ops that compute the index of a ``gather`` along the table's only dim in ``others``; return the last
        node. The index has the dims that are read in order, then ``rest`` as one dim, then ``tail``.
        """
        (other,) = self.others
        index, size = self.indices[other].node, self.table_shape[other]
        if index.meta["val"].dtype != torch.int64:
            index = self._call(aten._to_copy.default, index, dtype=torch.int64)
        from_end = self._call(aten.lt.Scalar, index, 0)  # `gather` takes no negative index
        index = self._call(aten.where.self, from_end, self._call(aten.add.Tensor, index, size), index)
        index = self._call(aten.expand.default, index, self.index_shape)
        index = self._call(aten.permute.default, index, [*self.places, *self.rest])
        # `gather` indexes one dim: all of ``rest`` as one.
        sizes = [*index.meta["val"].shape[: len(self.ordered)], math.prod(self.index_shape[dim] for dim in self.rest)]
        if len(self.rest) != 1:
            index = self._call(aten.reshape.default, index, sizes)
        for _ in self.tail:
            index = self._call(aten.unsqueeze.default, index, index.meta["val"].ndim)
        return self._call(aten.expand.default, index, [*sizes, *(self.table_shape[dim] for dim in self.tail)])

    def _in_order(self, x: fx.Node) -> fx.Node:
        """Insert ops that bring ``x``, the result of a ``gather`` by `_entries`, to the dims of the lookup's result;
        return the last node.

        Args:
            x: its dims are those that are read in order, then ``rest`` as one dim, then ``tail``.
        """
        if len(self.rest) != 1:
            sizes, after = x.meta["val"].shape[: len(self.ordered)], x.meta["val"].shape[len(self.ordered) + 1 :]
            x = self._call(aten.view.default, x, [*sizes, *(self.index_shape[dim] for dim in self.rest), *after])
        dims = [*self.places, *self.rest]
        return self._call(aten.permute.default, x, inverse([*dims, *range(len(dims), len(dims) + len(self.tail))]))

    def _to_result_dims(self, x: fx.Node) -> fx.Node:
        """Insert ops that bring ``x`` to the dims of the lookup's result; return the last node. Dims over which ``x``
        does not vary have size 1.

        Args:
            x: its dims are those that are read in order, then ``rest`` if there are other indices, then ``tail``.
        """
        present_dims = [*self.places, *(self.rest if self.others else ())]  # of the broadcast indices
        order = sorted(range(len(present_dims)), key=present_dims.__getitem__)
        tail = range(len(present_dims), x.meta["val"].ndim)
        x = self._call(aten.permute.default, x, [*order, *tail])
        for dim in range(len(self.index_shape)):
            if dim not in present_dims:
                x = self._call(aten.unsqueeze.default, x, dim)
        return x

    def _squeezed(self, rest: Sequence[int]) -> list[fx.Node]:
        """Insert ops that reduce the index tensors of the table's dims ``others`` to the dims ``rest`` of the broadcast
        indices; they do not vary over the other dims. Return the nodes of the reduced index tensors.
        """
        out = []
        for dim in self.others:
            x = self.indices[dim].node
            missing = len(self.index_shape) - x.meta["val"].ndim  # leading dims, by which broadcasting extends it
            for at in reversed(range(missing, len(self.index_shape))):
                if at not in rest:
                    x = self._call(aten.select.int, x, at - missing, 0)
            for at in [at for at in rest if at < missing]:
                x = self._call(aten.unsqueeze.default, x, rest.index(at))
            out.append(x)
        return out

    def _scatter(self, sizes: Sequence[int], indices: Any, values: fx.Node) -> fx.Node:
        """Insert zeros of shape ``sizes`` and a write that adds ``values`` to them at ``indices``; return the result's
        node.
        """
        return self._call(aten.index_put.default, self._zeros(sizes, values), list(indices), values, True)

    def _zeros(self, sizes: Sequence[int], like: fx.Node) -> fx.Node:
        """Insert a tensor of zeros of shape ``sizes``, with the dtype and device of ``like``; return its node."""
        value = like.meta["val"]
        return self._call(aten.full.default, list(sizes), 0, dtype=value.dtype, device=value.device)

    def _index(self, node: fx.Node, size: int) -> _Index:
        """Describe the index tensor ``node`` of a table's dim of ``size`` elements, as an `_Index`.

        If it is a view of a base tensor, the strides of that view say along which dims it varies.
        """
        chain, base = [], node  # the views between ``base`` and ``node``, the last first
        while base.op == "call_function" and base.target in _VIEWS:
            chain.append(base)
            base = base.args[0]
        try:  # a tensor of the base's shape without data: a view of it says by strides over what it varies
            strided: Tensor | None = torch.empty(base.meta["val"].shape, device="meta")
            for view in reversed(chain):
                target: Callable[..., Tensor] = view.target
                strided = target(strided, *view.args[1:], **view.kwargs) if view.target not in _COPYING else None
        except (RuntimeError, TypeError):
            strided = None
        missing = len(self.index_shape) - node.meta["val"].ndim
        sizes, strides = node.meta["val"].shape, strided.stride() if strided is not None else node.meta["val"].stride()
        varies = [
            dim for dim, n in enumerate(sizes) if n > 1 and (strides[dim] != 0 or strided is None)
        ]  # fmt: skip
        arange = base.meta["val"].numel() == size and (self._is_range(base) or self._holds_range(base))
        # In order: an ``arange`` of the dim's size that varies along one dim, with the stride 1 of the base.
        place = varies[0] if arange and len(varies) == 1 and sizes[varies[0]] == size else None
        if place is not None and (strided is None or strides[place] != 1):
            place = None
        return _Index(node, frozenset(missing + dim for dim in varies), None if place is None else missing + place)

    @staticmethod
    def _is_range(node: fx.Node) -> bool:
        """Return whether ``node`` is an ``arange`` that counts 0, 1, 2 and so on."""
        start = 0 if node.target is aten.arange.default or node.target not in _ARANGE else node.args[0]
        steps = node.args[2:3] if node.target is aten.arange.start_step else ()
        return node.target in _ARANGE and start == 0 and steps in ((), (1,))

    def _holds_range(self, node: fx.Node) -> bool:
        """Return whether ``node`` is a constant tensor with the numbers 0, 1, 2 and so on, as made from a Python
        ``range``.
        """
        value = getattr(self.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if type(value) is not Tensor or value.is_meta or value.ndim != 1:
            return False
        with _disable_current_modes():
            return value.tolist() == list(range(len(value)))

    def _call(self, target: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
        """Insert a call of ``target``, by `insert_call`, and return its node. For a call that would change nothing,
        return the operand.
        """
        if target is aten.permute.default and list(args[1]) == list(range(len(args[1]))):
            return args[0]
        if target is aten.expand.default and tuple(args[1]) == tuple(args[0].meta["val"].shape):
            return args[0]
        return insert_call(self.graph, self.node, target, *args, **kwargs)


_COPYING = (aten.reshape.default, aten._unsafe_view.default)
