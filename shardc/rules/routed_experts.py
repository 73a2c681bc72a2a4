"""Rules for routed experts: tokens and experts may be split separately, or both over one axis (expert parallelism).

Over an axis that splits both, rows are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from math import ceil, prod
from operator import getitem

import torch

from shardc.custom_ops import expert_ops
from shardc.custom_ops.expert_functions import body_of
from shardc.ir.comm import SEND_ROWS, WAIT
from shardc.ir.mesh import split_part
from shardc.rules.notation import WHOLE, Loops
from shardc.rules.positions import coordinate, digits_of
from shardc.rules.rule import CONTIGUOUS, Call, Emitted, Local, Rule, table
from shardc.rules.spec import Dims, Routed, Spec

aten = torch.ops.aten
_ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
_TOKENS, _EXPERTS = "t", "e"


def _tokens(loops: Loops, at: int, name: str) -> Dims:
    """Declare and return the factors of operand number ``at``, [tokens, width]. ``name`` is the factor of the width,
    which must not be split.
    """
    size, width = loops.shapes[at]
    # "sum": where tokens are split, results without tokens (gradients of the experts' parameters) are partial sums.
    return loops.dim(_TOKENS, size, "sum"), loops.dim(name, width, WHOLE)


def _params(loops: Loops, first: int) -> list[Dims]:
    """Declare and return the factors of the experts' parameters, [experts, ...]: the operands from ``first`` on. Only
    the dim of the experts may be split.
    """
    # "sum": where experts are split, each rank has the outputs of its experts only, terms of a sum.
    return [
        (loops.dim(_EXPERTS, shape[0], "sum"), *loops.dims(f"p{at}.", shape[1:], WHOLE))
        for at, shape in enumerate(loops.shapes[first:])
    ]


def _routed(call: Call, spec: Spec, choices: int, width: int) -> Spec:
    """Return ``spec`` with a `Routed` added, so that one axis may split tokens and experts together (expert
    parallelism). Ranks then exchange ``choices`` rows for each token, of ``width`` elements there and back together.
    """
    sizes = dict(spec.sizes)
    if _TOKENS not in sizes or _EXPERTS not in sizes:  # a dim of size 1 has no factor
        return spec
    # "bounded" sends rows, too, but in blocks with room for ``bound`` times the rows of an even load; empty places are
    # sent as well (`_bounded_exchanges`).
    way, filled = ("send", call["bound"]) if call["way"] == "bounded" else (call["way"], 1.0)
    # "held" is the axis of the plan's ``ep`` entry, or "": it must split the experts, alone or with the tokens.
    forms = (frozenset({_EXPERTS}), frozenset({_TOKENS, _EXPERTS}))
    required = ((call["held"], forms),) if call["held"] else ()
    elements = ceil(choices * width * filled)  # sent per token
    return replace(spec, routed=Routed(_TOKENS, _EXPERTS, elements, way=way, required=required))


def _call(call: Call) -> Spec:
    """Return the spec of routed experts: tokens [t, d], chosen experts and their weights [t, k], and parameters [e,
    ...] give [t, o].
    """
    loops = Loops(call)
    choices, out_width = loops.shapes[1][1], loops.result_shapes[0][1]
    operands = [
        _tokens(loops, 0, "d"),
        _tokens(loops, 1, "k"),
        _tokens(loops, 2, "k"),
        *_params(loops, 3),
    ]
    # Linear in operand 2, the routing weights: if they are a partial sum, so is the result.
    spec = loops.spec(operands, [(operands[0][0], loops.dim("o", out_width, WHOLE))], linear=[{2}])
    # A row goes there with its weight, and its result comes back.
    return _routed(call, spec, choices, width=loops.shapes[0][1] + out_width + 1)


def _gradient(call: Call) -> Spec:
    """Return the spec of the backward of routed experts: from the gradient of their result and their operands (tokens,
    chosen experts, weights, parameters) to the gradients of tokens, weights and parameters.
    """
    loops = Loops(call)
    choices = loops.shapes[2][1]
    # Widths: ``o`` of the gradient, ``d`` of the tokens, ``k`` of the chosen experts and of the weights.
    operands = [_tokens(loops, at, name) for at, name in enumerate("odkk")] + _params(loops, 4)
    # Linear in operand 0, the gradient of the result.
    spec = loops.spec(operands, [operands[1], *operands[3:]], linear=[{0}])
    # A gradient's row goes there; the gradients of its token and of its weight come back.
    return _routed(call, spec, choices, width=loops.shapes[0][1] + loops.shapes[1][1] + 1)


# --- on one rank


@dataclass(frozen=True)
class _Choices:
    """The choices of one rank, or of one chunk of its tokens: the pairs (token, expert) that the router chose, and the
    order that sorts them by the rank that holds the expert.

    Args:
        tokens, choices: number of tokens, and of experts for each of them.
        x: the tokens [t, d].
        scale: routing weight of each choice, flat [s, 1]: s = tokens * choices.
        order: permutation that sorts the choices (token-major) by destination, int64 [s].
        back: inverse of ``order``.
        ends: end of the choices for each expert of each rank in that order, int64 [ranks e].
        mine: mask of the choices whose expert this rank's rows can reach, bool [t, k]; None if all can be reached.
        ranks, experts: number of ranks that rows go to, and of experts on each.
    """

    tokens: int
    choices: int
    x: Emitted
    scale: Emitted
    order: Emitted
    back: Emitted
    ends: Emitted
    mine: Emitted | None
    ranks: int
    experts: int

    @property
    def most(self) -> int:
        """Return an upper bound of the number of rows that this rank can send to one other rank."""
        return self.tokens * min(self.choices, self.experts)


@dataclass(frozen=True)
class _Exchange:
    """An exchange of rows between ranks. `go` sends each chosen token to the rank of its expert, and `back` sends the
    experts' results back.

    Args:
        local: the call.
        of: the choices whose rows are sent.
        rows: rows of the buffer that receives them.
        take: choice in each row that is sent, int64 [r].
        home: row in which each choice comes back, int64 [s].
        sends, receives: rows sent to and received from each rank, int64 [ranks]; None if all are sent in blocks.
        fullest: rows of the fullest block of all ranks and chunks, as `shardc.custom_ops.expert_ops.WITHIN` takes it;
            None without blocks.
    """

    local: Local
    of: _Choices
    rows: int
    take: Emitted
    home: Emitted
    sends: Emitted | None = None
    receives: Emitted | None = None
    fullest: Emitted | None = None

    @property
    def block(self) -> int:
        """Return the rows of a block: the buffer has one block for each rank, if rows are sent in blocks."""
        return self.rows // self.of.ranks

    def go(self, tensors: list[Emitted]) -> list[Emitted]:
        """Emit the all-to-all that sends rows to the ranks of their experts. The rows of ``tensors`` are sorted by
        destination; return the received rows, sorted by the rank that sent them.
        """
        return self._exchange(tensors, self.sends, self.receives, self.rows)

    def back(self, tensors: list[Emitted]) -> list[Emitted]:
        """Emit the all-to-all in the opposite direction of `go`: it returns rows (the experts' results for them) to the
        ranks that sent them. Return the rows that come back to this rank.
        """
        return self._exchange(tensors, self.receives, self.sends, self.of.tokens * self.of.choices)

    def _exchange(
        self, tensors: list[Emitted], sends: Emitted | None, receives: Emitted | None, rows: int
    ) -> list[Emitted]:
        """Emit an exchange of the rows of ``tensors`` and the wait for it; return the received rows.

        Args:
            sends, receives: number of rows to and from each rank; None for blocks of equal size.
            rows: rows of the buffer that receives them, unless in blocks.
        """
        if sends is None:
            # There is one block for each rank, of equal size in both directions.
            return [_exchanged(self.local, x, self.block) for x in tensors]
        call, (_, group) = self.local.builder.call, self.local.builder.group(_sent_axes(self.local))
        # All tensors in one op, so that small rows share messages.
        out = call(SEND_ROWS, tensors, sends, receives, rows, group)
        return [call(WAIT, x) for x in _unpack(self.local, out, len(tensors))]


@dataclass(frozen=True)
class _Rows:
    """The rows that one rank's experts compute, for a chunk of tokens: one row per pair (token, expert).

    Args:
        of: the choices that the rows belong to.
        x: the received rows or, without an exchange, all tokens.
        take: row of ``x`` of each choice, sorted by expert; some behind the last expert's may be no choices.
        scale: routing weight of each choice, in the order of ``take``.
        ends: end of each expert's choices in ``take``.
        expected: number of choices for this rank's experts with an even load.
        places: position in ``take`` of each received row or, without an exchange, of each choice, int64.
        sent: the exchange that brought them; None without an exchange.
    """

    of: _Choices
    x: Emitted
    take: Emitted
    scale: Emitted
    ends: Emitted
    expected: int
    places: Emitted
    sent: _Exchange | None = None


def _sort_keys(local: Local, sent: tuple[str, ...], index: Emitted) -> tuple[Emitted, Emitted, int, int]:
    """Emit the keys by which choices (token, expert) are sorted: first the rank that holds the expert, then the expert
    on that rank. Return (keys, mask of the reachable choices or None if all are, number of destination ranks, experts
    per rank).

    A choice is reachable if its expert is on a rank to which this rank's rows can be sent. Others are sorted last.

    Args:
        sent: the axes over which rows are exchanged.
        index: expert of each choice.
    """
    call = local.builder.call
    layout = local.operand_layout("params")
    mesh, expert = layout.mesh, call(aten.reshape.default, index, [-1])
    # An expert's number has a digit for each axis that splits the experts, and local digits (axis None): which of its
    # rank's experts it is. Over an axis that is not in `sent`, only experts at this rank's coordinate are reachable.
    digits: list[tuple[str | None, int, Emitted]] = []
    reachable = None
    for axis, radix, digit in digits_of(local, layout, 0, expert):
        if axis is None or axis in sent:
            digits.append((axis, radix, digit))
            continue
        is_here = call(aten.eq.Tensor, digit, coordinate(local, axis))
        reachable = is_here if reachable is None else call(aten.logical_and.default, reachable, is_here)
    # The digits of the rank first, in the order in which a group numbers its ranks; then those of the expert.
    by_rank = sorted(digits, key=lambda digit: (digit[0] is None, mesh.order(digit[0]) if digit[0] else ()))
    if reachable is None and by_rank == digits:  # experts are numbered rank by rank already
        key = expert
    else:
        key = _from_digits(local, [(radix, digit) for _, radix, digit in by_rank], expert)
    ranks, experts_per_rank = prod(mesh.size(axis) for axis in sent), layout.local_shape[0]
    if reachable is not None:  # the others get a key larger than all, to be sorted last
        last = call(aten.full_like.default, key, ranks * experts_per_rank)
        key = call(aten.where.self, reachable, key, last)
    return key, reachable, ranks, experts_per_rank


def _from_digits(local: Local, digits: Sequence[tuple[int, Emitted]], like: Emitted) -> Emitted:
    """Emit and return the numbers that have these ``digits``, (radix, value) of each, the major one first. Without
    digits they are zeros of the shape of ``like``.
    """
    call, number = local.builder.call, None
    for radix, digit in digits:
        number = digit if number is None else call(aten.add.Tensor, call(aten.mul.Tensor, number, radix), digit)
    return call(aten.full_like.default, like, 0) if number is None else number


def _sent_axes(local: Local) -> tuple[str, ...]:
    """Return the axes over which rows are exchanged: those that split tokens and experts both."""
    split = local.operand_layout("params").dim_axes(0)
    mesh = local.operands[0].mesh
    return tuple(sorted((a for a in local.operand_layout("index").dim_axes(0) if a in split), key=mesh.order))


def _exchanged(local: Local, x: Emitted, rows: int) -> Emitted:
    """Emit an all-to-all of ``x``, with a block of ``rows`` rows for each rank that rows are exchanged with, and wait
    for it; return the blocks that arrive.
    """
    call, (ranks, group) = local.builder.call, local.builder.group(_sent_axes(local))
    sizes = [rows] * ranks
    return call(WAIT, call(_ALL_TO_ALL, x, sizes, sizes, group))


def _all_ranks(local: Local) -> tuple[tuple[str, ...], int]:
    """Return (all axes of the mesh that have ranks, number of ranks)."""
    mesh = local.operands[0].mesh
    # The microbatches on the axis `Mesh.time` follow one another on each rank.
    axes = tuple(axis for axis in mesh.axes if axis != mesh.time)
    return axes, prod(mesh.size(axis) for axis in axes)


def _recorded_choices(local: Local) -> Emitted:
    """Emit an op that records how many choices of this rank go to each expert (for `shardc.expert_tokens`). Return its
    result: the choices, with those of padded tokens spread over all experts.
    """
    mesh = local.operands[0].mesh
    # The group of the ranks that have other tokens, whose numbers are to be added. Microbatches follow one another on a
    # rank: there is no group of them.
    on_ranks = (axis for axis in local.operand_layout("index").dim_axes(0) if split_part(axis)[0] != mesh.time)
    split = sorted(on_ranks, key=mesh.order)
    over = local.builder.group(tuple(split))[1] if split else ""
    # `Local.true_size` numbers dims through all operands; dim 0 of the first parameter has the experts.
    first = local.call.position("params") or 0
    dims_before = sum(len(operand.shape) for operand in local.call.operands[:first])
    experts_in_all = local.true_size(dims_before, local.call.operands[first].shape[0])
    return local.builder.call(expert_ops.NOTED, local.operand("index"), experts_in_all, over)


def _choices(local: Local, x: Emitted, index: Emitted, weight: Emitted) -> _Choices:
    """Emit the ops that sort the choices of some tokens by the ranks of their experts; return them as `_Choices`.

    Args:
        x: the tokens [t, d].
        index, weight: number and routing weight of each chosen expert [t, k].
    """
    call = local.builder.call
    key, reachable, ranks, experts = _sort_keys(local, _sent_axes(local), index)
    tokens, choices = local.builder.shape(index)
    order, back, ends = _unpack(local, call(expert_ops.ORDER, key, ranks * experts), 3)
    if reachable is not None:
        reachable = call(aten.reshape.default, reachable, [tokens, choices])
    scale = call(aten.reshape.default, weight, [-1, 1])
    return _Choices(tokens, choices, x, scale, order, back, ends, reachable, ranks, experts)


def _exact_exchange(local: Local, of: _Choices) -> tuple[_Exchange, Emitted]:
    """Emit the exchange of row counts between ranks. Return (the `_Exchange` that sends exactly the counted rows,
    number of rows that come from each rank for each expert).
    """
    call = local.builder.call
    counts = call(expert_ops.COUNTS, of.ends)  # of each expert of each rank: [ranks * experts]
    came = _exchanged(local, counts, of.experts)
    sends, receives = (
        call(aten.sum.dim_IntList, call(aten.reshape.default, n, [of.ranks, of.experts]), [1]) for n in (counts, came)
    )
    # The buffer's size is fixed when the graph is built, so it has room for the most that all ranks can send.
    buffer = of.ranks * of.most
    # Choices are sent as they are sorted, and their results come back to the same rows.
    return _Exchange(local, of, buffer, take=of.order, home=of.back, sends=sends, receives=receives), came


def _bounded_exchanges(local: Local, every: list[_Choices]) -> list[tuple[_Exchange, Emitted]]:
    """Emit exchanges in which each rank sends each other rank a block of fixed size, so that the host need not wait for
    the row counts. Return, for each chunk, (the exchange, number of rows that come from each rank for each expert).

    Args:
        every: the choices of each chunk of tokens.
    """
    call, (axes, ranks) = local.builder.call, _all_ranks(local)
    _, group = local.builder.group(axes)
    out, fullest = [], None
    # Rows of a block: ``bound`` times those of an even load, but no more than can go to one rank. The same for all
    # chunks, so that the fullest block of all tells whether any rows had no room.
    block = max(min(of.most, ceil(local.call["bound"] * of.tokens * of.choices / of.ranks)) for of in every)
    for of in every:
        blocks = call(expert_ops.BLOCKS, of.order, of.back, of.ends, of.ranks, block)
        # Choice in each row, row of each choice, rows for each expert of each rank, choices for the busiest rank.
        take, home, counts, most = _unpack(local, blocks, 4)
        fullest = most if fullest is None else call(aten.maximum.default, fullest, most)
        out.append((_Exchange(local, of, of.ranks * block, take, home), counts))
    # The fullest block and the rank that has it as one number, so that one maximum over ranks finds both.
    number = call(aten.add.Tensor, call(aten.mul.Tensor, fullest, ranks), local.builder.coordinate(axes))
    number = call(WAIT, call(torch.ops._c10d_functional.all_reduce.default, number, "max", group))
    return [(replace(sent, fullest=number), _exchanged(local, counts, sent.of.experts)) for sent, counts in out]


def _rows_by_chunk(local: Local) -> Iterator[_Rows]:
    """Emit the ops that sort this rank's rows by expert. If some axis splits both tokens and experts, also emit the
    exchange of rows between ranks. Yield the `_Rows` of each chunk of tokens.

    The exchanges of all chunks are emitted before the first is yielded, so that those of later chunks can overlap with
    the experts of earlier ones.
    """
    call = local.builder.call
    x, index, weight = local.operand("x"), _recorded_choices(local), local.operand("weight")
    # Ranks that split the experts alone have the same tokens, and each computes a share of the rows.
    mesh, unsent = local.operands[0].mesh, set(local.operand_layout("params").dim_axes(0)).difference(_sent_axes(local))
    sharers = prod(mesh.size(axis) for axis in unsent)
    # Below, choices are numbered token by token: number // choices per token is the token.
    if not _sent_axes(local):  # only the experts are split, or neither
        of = _choices(local, x, index, weight)
        take = call(aten.div.Tensor_mode, of.order, of.choices, rounding_mode="floor")
        scale = call(aten.index_select.default, of.scale, 0, of.order)
        yield _Rows(of, x, take, scale, of.ends, expected=-(-of.tokens * of.choices // sharers), places=of.back)
        return
    # (x, index, weight) of each chunk.
    chunks = zip(*(_chunks(local, tensor) for tensor in (x, index, weight)), strict=True)
    choices = [_choices(local, *chunk) for chunk in chunks]
    bounded = local.call["bound"] != 0
    exchanges = _bounded_exchanges(local, choices) if bounded else [_exact_exchange(local, of) for of in choices]
    arriving = []
    # ``came``: number of rows that come from each rank for each expert.
    for sent, came in exchanges:
        token = call(aten.div.Tensor_mode, sent.take, sent.of.choices, rounding_mode="floor")
        rows = call(aten.index_select.default, sent.of.x, 0, token)
        scale = call(aten.index_select.default, sent.of.scale, 0, sent.take)
        arriving.append((sent, came, sent.go([rows, scale])))
    for sent, came, (received, scale) in arriving:
        of = sent.of
        # Rows arrive sorted by rank; here they are sorted by expert.
        arrived = call(expert_ops.ARRIVED, came, of.ranks, sent.rows, bounded)
        take, places, ends = _unpack(local, arrived, 3)
        scale = call(aten.index_select.default, scale, 0, take)
        # With even loads, as many rows come as this rank sends.
        yield _Rows(of, received, take, scale, ends, -(-of.tokens * of.choices // sharers), places, sent)


def _chunks(local: Local, x: Emitted) -> list[Emitted]:
    """Cut ``x``, whose dim 0 is this rank's tokens, into chunks of tokens; return them. Without an exchange of rows
    ``x`` is the only chunk.
    """
    tokens = local.builder.shape(x)[0]
    count = min(local.call["chunks"], tokens)
    if not _sent_axes(local) or count == 1:
        return [x]
    ends = [tokens * at // count for at in range(count + 1)]
    return [local.builder.call(aten.slice.Tensor, x, 0, start, end) for start, end in pairwise(ends)]


def _unpack(local: Local, outputs: Emitted, count: int) -> list[Emitted]:
    """Emit a getitem for each of the ``count`` results of an op; return the getitem nodes."""
    return [local.builder.call(getitem, outputs, at) for at in range(count)]


def _by_token(local: Local, sent: _Exchange, returned: Emitted, summed: bool) -> Emitted:
    """Return ``returned``, the rows that `_Exchange.back` returned (one per choice of an expert for a token), in the
    order of tokens. ``summed``: the rows of a token's choices are summed, [t, width]; else each row is one number, [t,
    k].
    """
    call, of = local.builder.call, sent.of
    width = local.builder.shape(returned)[1]
    out = call(aten.index_select.default, returned, 0, sent.home)
    out = call(aten.reshape.default, out, [of.tokens, of.choices, width])
    # Choices that are not ``mine`` are computed by ranks with the same tokens and other experts: no rows came back.
    if of.mine is not None:
        mask = call(aten.unsqueeze.default, of.mine, 2)
        out = call(aten.where.self, mask, out, call(aten.full_like.default, out, 0))
    return call(aten.sum.dim_IntList, out, [1]) if summed else call(aten.reshape.default, out, [of.tokens, of.choices])


def _forward(local: Local) -> tuple[list[_Rows], list[list[Emitted]]]:
    """Emit the routing and the experts of a forward; return (rows of each chunk, results of each chunk). The results
    are those of `shardc.custom_ops.expert_ops.RUN`: one row for each row of `_Rows.x`, and what the experts save.

    The backward op calls this too. If its operands are those of the forward op, it gets the same nodes.
    """
    body = local.call["body"]
    x, index, weight, params = (local.operand(name) for name in ("x", "index", "weight", "params"))

    def make() -> tuple[list[_Rows], list[list[Emitted]]]:
        every_rows, outputs = [], []
        for rows in _rows_by_chunk(local):
            computed = local.builder.call(
                expert_ops.RUN, rows.x, rows.take, rows.scale, rows.ends, list(params), rows.expected,
                _host_may_wait(rows), body,
            )  # fmt: skip
            every_rows.append(rows)
            outputs.append(_unpack(local, computed, 1 + len(body_of(body).saved)))
        return every_rows, outputs

    # Emitted once for the same operands (nodes of the graph) and the same function of an expert, which ``body`` names.
    return local.builder.once((expert_ops.RUN, x, index, weight, tuple(params), body), make)


def _host_may_wait(rows: _Rows) -> bool:
    """Return whether the experts' kernel may let the host wait for the number of ``rows``. It may not if they came in
    blocks of fixed size, which are there to avoid such waits.
    """
    in_blocks = rows.sent is not None and rows.sent.sends is None
    return not in_blocks


def _call_local(local: Local) -> Emitted:
    """Emit routed experts on one rank; return their outputs, [tokens, width]. If the experts computed rows of other
    ranks, too, an exchange brings the results back, which are then summed for each token.
    """
    every_rows, outputs = _forward(local)
    results = [result for result, *_ in outputs]  # without what the experts save
    exchanges = [rows.sent for rows in every_rows if rows.sent is not None]
    if not exchanges:  # the tokens were not cut into chunks, and the result has a row for each of them
        return results[0]
    returned = [sent.back([result])[0] for sent, result in zip(exchanges, results, strict=True)]
    out = _joined(local, [_by_token(local, sent, x, summed=True) for sent, x in zip(exchanges, returned, strict=True)])
    first = exchanges[0]  # blocks, and the fullest of them, are the same for all chunks
    if first.fullest is None:  # not in blocks: all rows had room
        return out
    # Rows that had no room in their block are missing. Multiply by 1 if there are none, else by NaN, so that the output
    # is not wrong unnoticed.
    _, ranks = _all_ranks(local)
    dtype = body_of(local.call["body"]).result.dtype
    one_or_nan = local.builder.call(expert_ops.WITHIN, first.fullest, first.block, ranks, dtype)
    return local.builder.call(aten.mul.Tensor, out, one_or_nan)


def _joined(local: Local, parts: list[Emitted]) -> Emitted:
    """Emit and return the concatenation of ``parts``, the results for each chunk of tokens."""
    return parts[0] if len(parts) == 1 else local.builder.call(aten.cat.default, parts)


def _gradient_local(local: Local) -> Emitted:
    """Emit the backward on one rank; return the gradients of tokens, weights and the experts' parameters."""
    call = local.builder.call
    every_rows, outputs = _forward(local)
    params = list(local.operand("params"))
    # Gradients of the rows, one tensor per chunk. All are sent before the first is used, so that the exchange of a
    # later chunk can overlap with the experts of an earlier one.
    grads = []
    for rows, grad in zip(every_rows, _chunks(local, local.operand("grad")), strict=True):
        if rows.sent is None:
            grads.append(grad)
            continue
        # Choices are numbered token by token: this is the token of each row.
        token = call(aten.div.Tensor_mode, rows.sent.take, rows.of.choices, rounding_mode="floor")
        grads += rows.sent.go([call(aten.index_select.default, grad, 0, token)])
    # Of each chunk: (exchange, rows that it returns), and its term of the gradients of the parameters.
    chunks, terms = [], []
    for rows, (_, *saved), grad in zip(every_rows, outputs, grads, strict=True):
        computed = call(
            expert_ops.RUN_GRADIENT, grad, rows.x, rows.take, rows.scale, rows.ends, params, saved, rows.expected,
            _host_may_wait(rows), local.call["body"],
        )  # fmt: skip
        dx, dscale, *of_params = _unpack(local, computed, 2 + len(params))
        terms.append(of_params)
        # From the order of experts to that in which the rows came (without an exchange: of the choices).
        dscale = call(aten.index_select.default, dscale, 0, rows.places)
        if rows.sent is None:  # the only chunk
            of = rows.of
            return [dx, call(aten.reshape.default, dscale, [of.tokens, of.choices]), *of_params]
        chunks.append((rows.sent, rows.sent.back([dx, dscale])))
    of_params = [reduce(partial(call, aten.add.Tensor), parts) for parts in zip(*terms, strict=True)]
    # Gradients of a token's rows are summed; each choice has a gradient of its weight.
    results = [
        _joined(local, [_by_token(local, sent, back[at], summed) for sent, back in chunks])
        for at, summed in enumerate((True, False))
    ]
    return [*results, *of_params]


TABLE = table(
    Rule(
        "shardc_experts.call",
        _call,
        "t d, t k, t k, e ... -> t o    e: sum; or t and e over one axis, whose rows are sent",
        _call_local,
    ),
    Rule(
        "shardc_experts.gradient",
        _gradient,
        "t o, t d, t k, t k, e ... -> t d, t k, e ...    t, e: sum; or t and e over one axis, whose rows are sent",
        _gradient_local,
    ),
    opaque=True,
    strides=CONTIGUOUS,
)
