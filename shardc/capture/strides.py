"""Replaces ``as_strided`` and its forms by ops on elements: permutations, views and indexing.

``as_strided`` reads the storage of a tensor by the strides that it had in the trace; a shard has other strides. So the
op becomes a selection of elements of the tensor that owns the storage: a permutation if it reads each element once,
else an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.capture_errors import line_of
from shardc.errors import CaptureError
from shardc.ir.comm_volume import arguments_of
from shardc.ir.op_traits import aliases

aten = torch.ops.aten

_READS = (aten.as_strided.default, aten.as_strided_copy.default)
_WRITES = (aten.as_strided_scatter.default,)


def fake_like(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return, in the active fake mode, ``x`` on ``device`` with its strides and offset; floats in ``dtype``."""
    dtype = dtype if dtype is not None and x.is_floating_point() else x.dtype
    fake = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
    if x.storage_offset():
        size = x.storage_offset() + fake.untyped_storage().nbytes() // dtype.itemsize
        memory = torch.empty(size, dtype=dtype, device=device).untyped_storage()
        fake.set_(memory, x.storage_offset(), x.shape, x.stride())
    return fake.requires_grad_(x.requires_grad)


def without_strides(graph: fx.Graph, mode: Any) -> None:
    """Replaces ``as_strided`` ops of a traced graph; CaptureError if one reads outside of the tensor's elements."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target in (*_READS, *_WRITES)]
    if not nodes:
        return
    with mode, torch.no_grad():
        memories = [_memory(node.args[0]) for node in nodes]
        now: dict[fx.Node, fx.Node] = {}
        for node, (base, offset) in zip(nodes, memories, strict=True):
            with graph.inserting_before(node):
                elements = _Elements(graph, node, base, now.get(base, base), offset)
                replacement = now[node] = elements.read() if node.target in _READS else elements.written()
            node.replace_all_uses_with(replacement)
    graph.eliminate_dead_code()


class _Elements:
    """The elements that one ``as_strided`` op reads or writes.

    Args:
        node: the op.
        traced, base: the owner of the storage that it reads, as traced and after earlier writes.
        offset: storage offset of the op's tensor, relative to the owner's first element.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node, traced: fx.Node, base: fx.Node, offset: int) -> None:
        self.graph, self.node, self.base = graph, node, base
        arguments = arguments_of(node)
        self.tensor, self.source = arguments["self"], arguments.get("src")
        self.size: list[int] = [int(n) for n in arguments["size"]]
        self.stride: list[int] = [int(n) for n in arguments["stride"]]
        val, storage_offset = traced.meta["val"], arguments.get("storage_offset")
        self.offset = offset if storage_offset is None else int(storage_offset) - val.storage_offset()
        # The base's dims by stride, the largest first.
        self.order = sorted(range(val.ndim), key=lambda dim: (-val.stride(dim), dim))
        last = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        dense = val.permute(self.order).is_contiguous()
        if prod(self.size) and not (dense and 0 <= self.offset and last < val.numel()):
            name, at = node.target.overloadpacket.__name__, self.offset if storage_offset is None else storage_offset
            raise CaptureError(
                f"{name} of sizes {self.size} and strides {self.stride} at {at} reads memory in which the tensor of "
                f"shape {list(val.shape)} has no element of its own",
                source=line_of(node) or None,
                fix="make the tensor contiguous before, or choose its elements by slices, unfold or an index",
            )

    def read(self) -> fx.Node:
        if not prod(self.size):
            return self._call(aten.new_empty.default, self.base, self.size)
        order = self._through_all()
        if order is None:
            return self._call(aten.index.Tensor, self._flat(self.base), [self._positions()])
        flat = self._call(aten.view.default, self._flat(self.base), [self.size[dim] for dim in order])
        return self._permuted(flat, _inverse(order))

    def written(self) -> fx.Node:
        """Return the base with ``src`` written to the elements that the ``as_strided`` op selects."""
        assert self.source is not None
        if not prod(self.size):
            return self.tensor
        order, base = self._through_all(), self.base.meta["val"]
        if order is not None:
            flat = self._call(aten.reshape.default, self._permuted(self.source, order), [-1])
        else:
            flat = self._call(aten.index_put.default, self._flat(self.base), [self._positions()], self.source)
        whole = self._call(aten.view.default, flat, [base.shape[dim] for dim in self.order])
        result = self._permuted(whole, _inverse(self.order))
        assert result.meta["val"].shape == self.tensor.meta["val"].shape, "a view of what is written to"
        return result

    def _through_all(self) -> list[int] | None:
        """Return the op's dims by stride if it reads each element of the base once; else None."""
        order = sorted(range(len(self.size)), key=lambda dim: (self.size[dim] == 1, -self.stride[dim], dim))
        steps = [(self.size[dim], self.stride[dim]) for dim in order if self.size[dim] != 1]
        wanted = [prod(n for n, _ in steps[at + 1 :]) for at in range(len(steps))]
        whole = not self.offset and prod(self.size) == self.base.meta["val"].numel()
        return order if whole and [step for _, step in steps] == wanted else None

    def _positions(self) -> fx.Node:
        """Return an int64 index of the op's sizes: the position of each element in the base's storage."""
        device, positions = self.base.meta["val"].device, None
        for dim, (n, step) in enumerate(zip(self.size, self.stride, strict=True)):
            if n == 1:
                continue
            along = self._call(aten.arange.default, n, dtype=torch.int64, device=device)
            along = self._call(aten.mul.Tensor, along, step)
            along = self._call(aten.view.default, along, [n if at == dim else 1 for at in range(len(self.size))])
            positions = along if positions is None else self._call(aten.add.Tensor, positions, along)
        if positions is None:
            return self._call(aten.full.default, self.size, self.offset, dtype=torch.int64, device=device)
        return positions if not self.offset else self._call(aten.add.Tensor, positions, self.offset)

    def _flat(self, x: fx.Node) -> fx.Node:
        return self._call(aten.reshape.default, self._permuted(x, self.order), [-1])

    def _permuted(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        return x if list(order) == sorted(order) else self._call(aten.permute.default, x, list(order))

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {name: value for name, value in self.node.meta.items() if name != "val"}
        fakes = fx.map_arg((args, kwargs), lambda x: x.meta["val"])
        node.meta["val"] = target(*fakes[0], **fakes[1])
        return node


def _memory(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the owner of the storage of ``node``, and the offset of ``node`` from the owner's first element."""
    chain = [node]
    while _is_view(chain[-1]):
        chain.append(chain[-1].args[0])
    base = chain.pop()
    val = base.meta["val"]
    at: Any = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
    for view in reversed(chain):
        at = view.target(at, *view.args[1:], **view.kwargs)
    return base, at.storage_offset()


def _is_view(node: fx.Node) -> bool:
    """Return whether ``node`` is a view of its first argument."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return _is_view(node.args[0]) if node.target is getitem else aliases(node.target)


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(dim) for dim in range(len(order))]
