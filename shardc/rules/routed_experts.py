"""Rules for routed experts: tokens and experts may be split separately, or both over one axis (expert parallelism).

Over an axis that splits both, rows are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from operator import getitem

import torch

from shardc.custom_ops import expert_ops
from shardc.custom_ops.expert_functions import body_of
from shardc.ir.comm import SEND_ROWS, WAIT
from shardc.ir.layout import strides
from shardc.ir.mesh import split_part
from shardc.rules.notation import WHOLE, Loops
from shardc.rules.positions import coordinate
from shardc.rules.rule import CONTIGUOUS, Call, Emitted, Local, Rule, table
from shardc.rules.spec import Dims, Routed, Spec

aten = torch.ops.aten
_TOKENS, _EXPERTS = "t", "e"


def _tokens(loops: Loops, at: int, name: str) -> Dims:
    size, width = loops.shapes[at]
    return loops.dim(_TOKENS, size, "sum"), loops.dim(name, width, WHOLE)


def _params(loops: Loops, first: int) -> list[Dims]:
    return [
        (loops.dim(_EXPERTS, shape[0], "sum"), *loops.dims(f"p{at}.", shape[1:], WHOLE))
        for at, shape in enumerate(loops.shapes[first:])
    ]


def _routed(call: Call, spec: Spec, choices: int, width: int) -> Spec:
    """Return ``spec`` with its `Routed`, which allows an axis to split tokens and experts together.

    Ranks then exchange ``choices`` rows of ``width`` elements for each token.
    """
    sizes = dict(spec.sizes)
    if _TOKENS not in sizes or _EXPERTS not in sizes:
        return spec
    # "bounded" also sends rows to the ranks of their experts; it only limits the buffers that receive them (`_rows`).
    way = "send" if call["way"] == "bounded" else call["way"]
    # "held" is the axis of the plan's ``ep`` entry, or "": it must split the experts, alone or with the tokens.
    forms = (frozenset({_EXPERTS}), frozenset({_TOKENS, _EXPERTS}))
    required = ((call["held"], forms),) if call["held"] else ()
    return replace(spec, routed=Routed(_TOKENS, _EXPERTS, choices * width, way=way, required=required))


def _call(call: Call) -> Spec:
    loops = Loops(call)
    choices, out_width = loops.shapes[1][1], loops.result_shapes[0][1]
    operands = [
        _tokens(loops, 0, "d"),
        _tokens(loops, 1, "k"),
        _tokens(loops, 2, "k"),
        *_params(loops, 3),
    ]
    spec = loops.spec(operands, [(operands[0][0], loops.dim("o", out_width, WHOLE))], linear=[{2}])
    return _routed(call, spec, choices, loops.shapes[0][1] + out_width + 1)


def _gradient(call: Call) -> Spec:
    loops = Loops(call)
    choices = loops.shapes[2][1]
    operands = [_tokens(loops, at, name) for at, name in enumerate("odkk")] + _params(loops, 4)
    spec = loops.spec(operands, [operands[1], *operands[3:]], linear=[{0}])
    return _routed(call, spec, choices, loops.shapes[0][1] + loops.shapes[1][1] + 1)


# --- on one rank


@dataclass(frozen=True)
class _Rows:
    """The rows (token, expert) of one call on one rank, ready for `shardc.custom_ops.expert_ops.RUN`.

    Args:
        order: permutation that sorts the rank's choices (token-major) by destination, int64 [s].
        back: its inverse.
        mine: mask of the choices whose expert this rank's rows can reach, bool [t, k]; None if all can be reached.
        x, take, scale, ends, expected: arguments of `shardc.custom_ops.expert_ops.RUN`.
        sends, receives: rows sent to and received from each rank, int64 [ranks]; None without an exchange.
        came_back: position in ``take`` of each received row, int64 [r].
    """

    order: Emitted
    back: Emitted
    mine: Emitted | None
    x: Emitted
    take: Emitted
    scale: Emitted
    ends: Emitted
    expected: int
    sends: Emitted | None = None
    receives: Emitted | None = None
    came_back: Emitted | None = None


def _keys(local: Local, sent: tuple[str, ...], index: Emitted) -> tuple[Emitted, Emitted, int, int]:
    """Return (sort key of each choice, mask of the reachable ones or None, number of ranks, experts per rank).

    Returns:
        the keys, flat; the mask of reachable choices (None: all); the number of destination ranks; experts per rank.
    """
    call = local.builder.call
    layout = local.operand_layout("params")
    digits, mesh = layout.dims[0], layout.mesh
    flat, total = call(aten.reshape.default, index, [-1]), layout.shape[0]
    parts: list[tuple[str | None, int, Emitted]] = []
    mine = None
    for (radix, axis), stride in zip(digits, strides(digits), strict=True):
        digit = flat if stride == 1 else call(aten.div.Tensor_mode, flat, stride, rounding_mode="floor")
        if radix * stride != total:
            digit = call(aten.remainder.Scalar, digit, radix)
        if axis is None or axis in sent:
            parts.append((axis, radix, digit))
            continue
        is_local = call(aten.eq.Tensor, digit, coordinate(local, axis))
        mine = is_local if mine is None else call(aten.logical_and.default, mine, is_local)
    order = sorted(parts, key=lambda part: (part[0] is None, mesh.order(part[0]) if part[0] else ()))
    key = flat if mine is None and order == parts else None  # the layout of the experts is already sorted by rank
    for _, radix, digit in order if key is None else ():
        key = digit if key is None else call(aten.add.Tensor, call(aten.mul.Tensor, key, radix), digit)
    if key is None:
        key = call(aten.full_like.default, flat, 0)
    ranks, experts_per_rank = prod(mesh.size(axis) for axis in sent), layout.local_shape[0]
    if mine is not None:
        key = call(aten.where.self, mine, key, call(aten.full_like.default, key, ranks * experts_per_rank))
    return key, mine, ranks, experts_per_rank


def _sent(local: Local) -> tuple[str, ...]:
    """Return the axes over which rows are exchanged: those that split tokens and experts both."""
    split = local.operand_layout("params").dim_axes(0)
    mesh = local.operands[0].mesh
    return tuple(sorted((a for a in local.operand_layout("index").dim_axes(0) if a in split), key=mesh.order))


def _rows(local: Local) -> _Rows:
    """Emit the ops that sort this rank's rows by expert and, if axes split tokens and experts both, exchange them."""
    call = local.builder.call
    x, index, weight = (local.operand(name) for name in ("x", "index", "weight"))
    sent = _sent(local)
    mesh = local.operands[0].mesh
    on_ranks = (axis for axis in local.operand_layout("index").dim_axes(0) if split_part(axis)[0] != mesh.time)
    split = sorted(on_ranks, key=mesh.order)
    over = local.builder.group(tuple(split))[1] if split else ""
    first = local.call.position("params") or 0
    dims = sum(len(operand.shape) for operand in local.call.operands[:first])
    experts_in_all = local.true_size(dims, local.call.operands[first].shape[0])
    index = call(expert_ops.NOTED, index, experts_in_all, over)
    key, mine, ranks, experts_per_rank = _keys(local, sent, index)
    tokens, choices = local.builder.shape(index)
    order, back, ends = _unpack(local, call(expert_ops.ORDER, key, ranks * experts_per_rank), 3)
    if mine is not None:
        mine = call(aten.reshape.default, mine, [tokens, choices])
    take = call(aten.div.Tensor_mode, order, choices, rounding_mode="floor")
    scale = call(aten.reshape.default, weight, [-1, 1])
    scale = call(aten.index_select.default, scale, 0, order)
    unsent_axes = [a for a in local.operand_layout("params").dim_axes(0) if a not in sent]
    expected = -(-tokens * choices // prod(mesh.size(axis) for axis in unsent_axes))
    if not sent:
        return _Rows(order, back, mine, x, take, scale, ends, expected)
    size, group = local.builder.group(sent)
    send_counts = call(expert_ops.COUNTS, ends)
    receive_counts = call(
        torch.ops._c10d_functional.all_to_all_single.default,
        send_counts,
        [experts_per_rank] * size,
        [experts_per_rank] * size,
        group,
    )
    receive_counts = call(WAIT, receive_counts)
    sends, receives = (
        call(aten.sum.dim_IntList, call(aten.reshape.default, n, [ranks, experts_per_rank]), [1])
        for n in (send_counts, receive_counts)
    )
    rows = ranks * tokens * min(choices, experts_per_rank)
    if (bound := local.call["bound"]) != 0:
        rows = min(rows, ceil(bound * tokens * choices))
        _, everywhere = local.builder.group(mesh.axes)
        received = call(aten.sum.dim_IntList, receive_counts, [0], True)
        most = call(torch.ops._c10d_functional.all_reduce.default, received, "max", everywhere)
        sends = call(expert_ops.WITHIN, sends, call(WAIT, most), rows)
    x = call(aten.index_select.default, x, 0, take)
    x, scale = _send(local, [x, scale], sends, receives, rows, sent)
    take, came_back, ends = _unpack(local, call(expert_ops.ARRIVED, receive_counts, ranks, rows), 3)
    scale = call(aten.index_select.default, scale, 0, take)
    return _Rows(order, back, mine, x, take, scale, ends, expected, sends, receives, came_back)


def _unpack(local: Local, outputs: Emitted, count: int) -> list[Emitted]:
    """Emit the getitems of an op with ``count`` outputs; return these."""
    return [local.builder.call(getitem, outputs, at) for at in range(count)]


def _send(
    local: Local, rows: list[Emitted], sends: Emitted, receives: Emitted, received: int, axes: tuple[str, ...]
) -> list[Emitted]:
    """Emit an all-to-all of rows that are sorted by destination; return the received rows, sorted by source."""
    _, group = local.builder.group(axes)
    out = local.builder.call(SEND_ROWS, rows, sends, receives, received, group)
    return [local.builder.call(WAIT, tensor) for tensor in _unpack(local, out, len(rows))]


def _by_token(local: Local, rows: _Rows, returned: Emitted, added: bool) -> Emitted:
    """Return the rows in token order: if ``added``, summed over a token's choices [t, width]; else one number each [t,
    k].
    """
    call = local.builder.call
    tokens, choices = local.builder.shape(local.operand("index"))
    width = local.builder.shape(returned)[1]
    out = call(aten.index_select.default, returned, 0, rows.back)
    out = call(aten.reshape.default, out, [tokens, choices, width])
    if rows.mine is not None:
        mask = call(aten.unsqueeze.default, rows.mine, 2)
        out = call(aten.where.self, mask, out, call(aten.full_like.default, out, 0))
    return call(aten.sum.dim_IntList, out, [1]) if added else call(aten.reshape.default, out, [tokens, choices])


def _forward(local: Local) -> tuple[_Rows, list[Emitted]]:
    """Emit the routing and the experts of a forward; the backward op of the same call reuses both."""
    body = local.call["body"]
    x, index, weight, params = (local.operand(name) for name in ("x", "index", "weight", "params"))

    def make() -> tuple[_Rows, list[Emitted]]:
        rows = _rows(local)
        outputs = local.builder.call(
            expert_ops.RUN, rows.x, rows.take, rows.scale, rows.ends, list(params), rows.expected, body
        )
        return rows, _unpack(local, outputs, 1 + len(body_of(body).saved))

    return local.builder.once((expert_ops.RUN, x, index, weight, tuple(params), body), make)


def _call_local(local: Local) -> Emitted:
    rows, (result, *_) = _forward(local)
    if rows.sends is None:
        return result
    tokens, choices = local.builder.shape(local.operand("index"))
    (back,) = _send(local, [result], rows.receives, rows.sends, tokens * choices, _sent(local))
    return _by_token(local, rows, back, added=True)


def _gradient_local(local: Local) -> Emitted:
    call = local.builder.call
    rows, (_, *saved) = _forward(local)
    grad, params, body = local.operand("grad"), local.operand("params"), local.call["body"]
    tokens, choices = local.builder.shape(local.operand("index"))
    if rows.sends is not None:
        sent = call(aten.div.Tensor_mode, rows.order, choices, rounding_mode="floor")
        grad = call(aten.index_select.default, grad, 0, sent)
        (grad,) = _send(local, [grad], rows.sends, rows.receives, local.builder.shape(rows.x)[0], _sent(local))
    grads = call(
        expert_ops.RUN_GRADIENT,
        grad,
        rows.x,
        rows.take,
        rows.scale,
        rows.ends,
        list(params),
        saved,
        rows.expected,
        body,
    )
    dx, scale, *rest = _unpack(local, grads, 2 + len(params))
    if rows.sends is None:
        return [dx, call(aten.reshape.default, call(aten.index_select.default, scale, 0, rows.back),
                         [tokens, choices]), *rest]  # fmt: skip
    scale = call(aten.index_select.default, scale, 0, rows.came_back)
    dx, scale = _send(local, [dx, scale], rows.receives, rows.sends, tokens * choices, _sent(local))
    return [_by_token(local, rows, dx, added=True), _by_token(local, rows, scale, added=False), *rest]


TABLE = table(
    Rule(
        "shardc_experts.call",
        _call,
        "t d, t k, t k, e ... -> t o    e: sum; or t and e over one axis, whose rows are sent",
        _call_local,
        opaque=True,
    ),
    Rule(
        "shardc_experts.gradient",
        _gradient,
        "t o, t d, t k, t k, e ... -> t d, t k, e ...    t, e: sum; or t and e over one axis, whose rows are sent",
        _gradient_local,
        opaque=True,
    ),
    strides=CONTIGUOUS,
)
