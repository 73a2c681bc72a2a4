"""Indexing: a split dim that is indexed is looked up where it lies, and what other ranks hold counts as zero."""

from __future__ import annotations

from typing import Any

import torch

from shardc.rules.loops import FREE, WHOLE, Loops
from shardc.rules.positions import owned, split, zero_unless
from shardc.rules.rule import Call, Local, Rule, table
from shardc.rules.spec import Dims, Factors, Spec

aten = torch.ops.aten


# --- embedding


def _embedding(call: Call) -> Spec:
    loops = Loops(call)
    weight, index = loops.shapes
    rows, row = loops.dims("i", index), loops.dim("d", weight[1])
    return loops.spec([(loops.dim("v", weight[0], "sum"), row), rows], [(*rows, row)], linear=[{0}])


def _embedding_local(local: Local) -> Any:
    if not split(local.operands[0], 0):
        return local.same()
    index, mask = owned(local, local.operands[0], 0, local.operand("indices"))
    rows = local.builder.call(aten.embedding.default, local.operand("weight"), index)
    return zero_unless(local, local.builder.call(aten.unsqueeze.default, mask, -1), rows)


def _embedding_backward(call: Call) -> Spec:
    loops = Loops(call)
    grad, index = loops.shapes
    # Scaling by frequency needs to see every index.
    over = WHOLE if call["scale_grad_by_freq"] else "sum"
    rows, row = loops.dims("i", index, over), loops.dim("d", grad[-1])
    vocabulary = loops.dim("v", call["num_weights"], WHOLE if call["scale_grad_by_freq"] else FREE)
    return loops.spec([(*rows, row), rows], [(vocabulary, row)], linear=[{0}])


def _embedding_backward_local(local: Local) -> Any:
    layout = local.results[0]
    if not split(layout, 0):
        return local.same()
    call, indices, padding = local.builder.call, local.operand("indices"), local.call["padding_idx"]
    index, mask = owned(local, layout, 0, indices)
    if padding >= 0:
        mask = call(aten.logical_and.default, mask, call(aten.ne.Scalar, indices, padding))
    grad = zero_unless(local, call(aten.unsqueeze.default, mask, -1), local.operand("grad_output"))
    return call(aten.embedding_dense_backward.default, grad, index, layout.local_shape[0], -1, False)


# --- gather and scatter along one dim


def _along(call: Call, looked_up: str, over: str) -> tuple[Loops, list[Dims]]:
    """The dims of operands that are indexed together along ``dim``: there ``v`` in the first and ``k`` in the others.

    The other dims are shared where all operands have them of one size, else whole.
    """
    loops = Loops(call)
    dim = _dim(call)
    out: list[list[Factors]] = [[] for _ in loops.shapes]
    for i, sizes in enumerate(zip(*loops.shapes, strict=True)):
        for at, size in enumerate(sizes):
            if i == dim and at < 2:
                out[at].append(loops.dim("vk"[at], size, (looked_up, over)[at]))
            elif i == dim and size == sizes[1]:
                out[at].append(out[1][i])
            elif i != dim and len(set(sizes)) == 1:
                out[at].append(loops.dim(f"d{i}", size))
            else:
                out[at].append(loops.dim(f"d{i}.{at}", size, WHOLE))
    return loops, [tuple(dims) for dims in out]


def _dim(call: Call) -> int:
    return call["dim"] % max(len(call.operands[0].shape), 1)


def _gather(call: Call) -> Spec:
    loops, (x, index) = _along(call, "sum", FREE)
    return loops.spec([x, index], [index], linear=[{0}])


def _gather_local(local: Local) -> Any:
    dim = _dim(local.call)
    if not split(local.operands[0], dim):
        return local.same()
    index, mask = owned(local, local.operands[0], dim, local.operand("index"))
    return zero_unless(local, mask, local.same(index=index))


def _scatter(call: Call) -> Spec:
    """Each rank writes the entries whose target it holds, so it needs every entry of ``dim``."""
    loops, operands = _along(call, FREE, WHOLE)
    linear = [{0, 2}] if len(operands) == 3 else [{0}] if call["value"] == 0 else []
    return loops.spec(operands, operands[:1], linear=linear)


def _scatter_local(local: Local) -> Any:
    dim = _dim(local.call)
    if not split(local.results[0], dim):
        return local.same()
    call, layout = local.builder.call, local.results[0]
    index, mask = owned(local, layout, dim, local.operand("index"))
    # What other ranks hold is written past the end, and the end is cut off.
    size = layout.local_shape[dim]
    past = [edge for i in reversed(range(layout.ndim)) for edge in (0, int(i == dim))]
    index = call(aten.where.self, mask, index, call(aten.full_like.default, index, size))
    written = local.same(self=call(aten.constant_pad_nd.default, local.operand("self"), past, 0), index=index)
    return call(aten.slice.Tensor, written, dim, 0, size)


TABLE = table(
    Rule("aten.embedding", _embedding, "v d, ... -> ... d    v: sum    linear in weight", _embedding_local),
    Rule(
        "aten.embedding_dense_backward",
        _embedding_backward,
        "... d, ... -> v d    ...: sum    linear in grad_output",
        _embedding_backward_local,
    ),
    Rule("aten.gather", _gather, "v ..., k ... -> k ...    v: sum    linear in self", _gather_local),
    Rule(
        "aten.scatter", _scatter, "v ..., k ..., k ... -> v ...    k: whole    linear in self and src", _scatter_local
    ),
)
