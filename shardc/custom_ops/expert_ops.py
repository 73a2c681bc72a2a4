"""Ops of mixtures of experts: each row (token) is computed by the experts that a router chose for it.

A token is routed to ``k`` of ``e`` experts, and its result is the weighted sum of theirs. `call` and `gradient` compute
all experts and tokens at once, at global shapes; their argument ``body`` names the function of one expert (`Body`). On
one rank (`shardc.rules.routed_experts`) rows are sorted by expert, and `run` computes the rank's own experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from shardc._compat import OpOverload
from shardc.custom_ops.expert_functions import body_of
from shardc.custom_ops.grouped import suits
from shardc.custom_ops.op_library import OpLibrary
from shardc.ir.graph import info


@dataclass(frozen=True)
class Load:
    """How many rows the fullest block of one layer of experts had in a run. A layer may send its rows to other ranks in
    blocks of fixed size.

    Args:
        most: rows of the fullest block that a rank sends to another, times ``ranks``, plus the sending rank: int64 [1],
            on the device.
        rows: number of rows that a block has room for.
        ranks: number of ranks of the mesh.
    """

    most: Tensor
    rows: int
    ranks: int


@dataclass
class Noted:
    """Records of the layers of experts that ran (rows per expert, and how full blocks were), in the order in which
    their ops ran.

    Attributes:
        counts: (number of this rank's rows for each expert, int64 [e]; process group of the ranks that have other
            tokens, "" if there are none) of each layer.
        loads: of each layer whose rows are sent in blocks.
    """

    counts: list[tuple[Tensor, str]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


_noted: Noted | None = None


@contextmanager
def noting() -> Iterator[Noted]:
    """Context manager that yields a `Noted`. The layers of experts that run in the block append their records to it."""
    global _noted
    before, _noted = _noted, Noted()
    try:
        yield _noted
    finally:
        _noted = before


def experts_in(graph: fx.Graph, op: OpOverload) -> list[str]:
    """Return the qualified names of the layers of experts in ``graph`` whose ``op`` appends a record to a `Noted`, in
    the order of these records.

    Args:
        op: `NOTED`, for ``counts``, or `WITHIN`, for ``loads``.
    """
    names = (info(node).name.rpartition(".") for node in graph.nodes if node.target is op)
    return [name.rpartition("call")[0].rstrip(".") for name, _, _ in names]


def _note(index: Tensor, experts: int, over: str) -> Tensor:
    """Record how many rows each expert gets by ``index``, for `noting`. Return ``index`` with its entries for no expert
    (padding) replaced by experts in turn.

    Args:
        index: chosen experts, int64 [t, k]; the number ``experts`` stands for no expert.
        experts: number of experts.
        over: the process group of the ranks that have other tokens, "" if all have the same.
    """
    if _noted is not None:
        chosen = index.flatten()
        counts = index.new_zeros(experts + 1).scatter_add(0, chosen, torch.ones_like(chosen))
        _noted.counts.append((counts[:experts], over))
    evenly = torch.arange(index.numel(), device=index.device).remainder(experts).view(index.shape)
    return torch.where(index < experts, index, evenly)


def _order(key: Tensor, count: int) -> list[Tensor]:
    """Sort ``key``. Return [permutation that sorts it; the inverse permutation; for each value from 0 to ``count - 1``,
    where its entries end in sorted order], all int64.
    """
    values, order = key.sort(stable=True)
    ends = torch.searchsorted(values, torch.arange(count, device=key.device), right=True)
    return [order, _inverse(order), ends]


def _inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=order.device))


def _arrived(came: Tensor, ranks: int, rows: int, blocks: bool) -> list[Tensor]:
    """Sort by expert the rows that a rank has received from all ranks. Return [permutation that sorts the rows; the
    inverse permutation; where each expert's rows end in sorted order].

    Rows arrive sorted by rank, then by expert.

    Args:
        came: number of rows from each rank for each expert, int64 [ranks e].
        rows: number of rows in the buffer.
        blocks: whether the buffer has a block of equal size for each rank; else ranks' rows follow each other.

    Returns:
        the order and its inverse, int64 [rows], and the ends, int64 [e].
    """
    experts = came.numel() // ranks
    if blocks:
        at = torch.arange(rows // ranks, device=came.device).repeat(ranks, 1)
        key = torch.searchsorted(came.view(ranks, experts).cumsum(1), at, right=True).flatten()
    else:
        run = torch.searchsorted(came.cumsum(0), torch.arange(rows, device=came.device), right=True)
        key = torch.where(run < came.numel(), run % experts, experts)
    order = key.argsort(stable=True)
    return [order, _inverse(order), came.view(ranks, experts).sum(0).cumsum(0)]


def _blocks(order: Tensor, back: Tensor, ends: Tensor, ranks: int, rows: int) -> list[Tensor]:
    """Place this rank's choices (pairs of a token and an expert) in one block of ``rows`` rows for each rank. Return
    [choice in each row, row of each choice, rows for each expert, choices for the busiest rank].

    Args:
        order: permutation that sorts the choices by rank and expert, those for no rank last, int64 [s].
        back: its inverse.
        ends: end of the choices for each expert of each rank in that order, int64 [ranks e].

    Returns:
        [choice in each row of the blocks, int64 [ranks rows]; row of each choice, int64 [s]; number of rows for each
        expert of each rank, int64 [ranks e]; number of choices for the rank that gets the most, int64 [1]]. Rows that
        no choice fills repeat some choice. Choices that have no room share the last row of their block.
    """
    by_rank = ends.view(ranks, -1)
    first = torch.cat([ends.new_zeros(1), by_rank[:-1, -1]])
    within = by_rank - first.unsqueeze(1)
    at = torch.arange(rows, device=order.device)
    take = order[(first.unsqueeze(1) + at).clamp(max=order.numel() - 1).flatten()]
    place = torch.arange(order.numel(), device=order.device)
    rank = torch.searchsorted(by_rank[:, -1].contiguous(), place, right=True).clamp(max=ranks - 1)
    row = rank * rows + (place - first[rank]).clamp(max=rows - 1)
    counts = within.clamp(max=rows).diff(dim=1, prepend=within.new_zeros(ranks, 1))
    return [take, row[back], counts.flatten(), within[:, -1].amax(0, keepdim=True)]


def _within(most: Tensor, rows: int, ranks: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor [1] of ``dtype``: 1 if the fullest block has room for its rows, else NaN. ``most`` encodes the
    number of these rows (see `Load`), and ``rows`` is the room. Also records a `Load` for `noting`.
    """
    if _noted is not None:
        _noted.loads.append(Load(most, rows, ranks))
    return torch.where(most // ranks <= rows, 1.0, torch.nan).to(dtype)


def _counts(ends: Tensor) -> Tensor:
    """Return the number of rows of each expert, int64 [e], given the end of each expert's rows, int64 [e]."""
    return ends.diff(prepend=ends.new_zeros(1))


def sort(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort the chosen experts, ``index`` [t, k]. Return (permutation that sorts the flat index by expert, where each
    expert's entries end in sorted order [e]), both int64.
    """
    chosen, order = index.flatten().sort(stable=True)
    return order, torch.searchsorted(chosen, torch.arange(experts, device=index.device), right=True)


def _rows_by_expert(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (number of the expert, slice of its rows) for each expert, given the end of each expert's rows, int64
    [e].
    """
    start = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(start, end)
        start = end


def _call(x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: object) -> Tensor:
    """Compute a layer of experts on one device: return for each token the weighted sum of its experts' results, [t,
    o].
    """
    order, ends = sort(index, params[0].shape[0])
    scale = weight.flatten()[order].unsqueeze(1)
    return _run(x, order // index.shape[1], scale, ends, params, order.numel(), True, body)[0]


def _gradient(
    grad: Tensor, x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: object
) -> list[Tensor]:
    """Return the gradients of ``x``, ``weight`` and ``params`` of `_call`, given ``grad``, the gradient of its
    result.
    """
    order, ends = sort(index, params[0].shape[0])
    scale, take = weight.flatten()[order].unsqueeze(1), order // index.shape[1]
    saved = _run(x, take, scale, ends, params, order.numel(), True, body)[1:]
    dx, dscale, *rest = _run_gradient(grad, x, take, scale, ends, params, saved, order.numel(), True, body)
    of_weight = torch.empty_like(dscale).index_copy(0, order, dscale)
    return [dx, of_weight.view(index.shape), *rest]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of ``dtype`` are summed: float32 for 16-bit floats, else ``dtype``."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _live(take: Tensor, ends: Tensor, expected: int, waits: bool) -> tuple[Tensor, Tensor]:
    """Return the rows to compute: (leading entries of ``take``, mask of those that belong to an expert of this rank,
    bool [n, 1]).

    These entries are all of ``take``, unless the host may wait (``waits``) and ``take`` is more than twice as long as
    expected: then the host waits for the number of entries that belong to experts, and the rest is left out.
    """
    rows = int(ends[-1]) if waits and take.shape[0] > 2 * expected else take.shape[0]
    return take[:rows], torch.arange(rows, device=take.device).unsqueeze(1) < ends[-1]


def _run(
    x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], expected: int, waits: bool, body: str
) -> list[Tensor]:
    """Run this rank's experts on their rows. Return a list: for each token the sum of its experts' results, then the
    values that the experts' function saves for backward.

    Args:
        x: tokens [m, d].
        take: row of ``x`` of each choice, sorted by expert, int64 [r].
        scale: routing weight of each choice [r, 1].
        ends: end of each expert's choices in ``take``, int64 [e]; choices after the last belong to no expert.
        params: parameters of this rank's experts, [e, ...] each.
        expected: predicted number of choices for this rank's experts.
        waits: whether the host may wait for the number of rows where products are grouped.
        body: name of the experts' `Body`.

    Returns:
        sums of results [m, o], and each of the body's saved values, [r, ...].
    """
    function = body_of(body)
    saved = [x.new_empty(take.shape[0], *value.shape, dtype=value.dtype) for value in function.saved]
    total = x.new_zeros(x.shape[0], *function.result.shape, dtype=_wide(function.result.dtype))
    if function.grouped_forward is not None and suits(x, params):
        at, live = _live(take, ends, expected, waits)
        n = at.shape[0]
        out, *values = function.grouped_forward(ends.to(torch.int32), n, x[at], scale[:n], *params)
        for place, value in zip(saved, values, strict=True):
            place[:n] = value
        total.index_add_(0, at, torch.where(live, out, 0).to(total.dtype))
        return [total.to(function.result.dtype), *saved]
    for expert, rows in _rows_by_expert(ends):
        if count := rows.stop - rows.start:
            at, keep = take[rows], [value[rows] for value in saved]
            out = function.run_forward(count, x[at], scale[rows], *(p[expert] for p in params), *keep)
            total.index_add_(0, at, out.to(total.dtype))
    return [total.to(function.result.dtype), *saved]


def _run_gradient(
    grad: Tensor, x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], saved: list[Tensor],
    expected: int, waits: bool, body: str,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of ``x``, ``scale`` and ``params`` of `_run`, given ``grad``, the gradient of its first
    result.
    """
    function = body_of(body)
    dx = x.new_zeros(x.shape, dtype=_wide(x.dtype))
    dscale, grads = torch.zeros_like(scale), [torch.empty_like(p) for p in params]
    if function.grouped_backward is not None and suits(x, params):
        at, live = _live(take, ends, expected, waits)
        n = at.shape[0]
        values = (grad[at], x[at], scale[:n], *params, *(value[:n] for value in saved))
        drows, ds, *rest = function.grouped_backward(ends.to(torch.int32), n, *values)
        if drows is not None:
            dx.index_add_(0, at, torch.where(live, drows, 0).to(dx.dtype))
        if ds is not None:
            dscale[:n] = torch.where(live, ds, 0)
        some = _counts(ends) > 0  # a kernel may not write the gradient of an expert without rows
        grads = [torch.zeros_like(p) if dp is None else torch.where(some.view(-1, *[1] * (p.dim() - 1)), dp, 0)
                for p, dp in zip(params, rest, strict=True)]  # fmt: skip
        return [dx.to(x.dtype), dscale, *grads]
    for expert, rows in _rows_by_expert(ends):
        into = [dp[expert] for dp in grads]
        if (count := rows.stop - rows.start) == 0:
            for place in into:
                place.zero_()
            continue
        at, weights, keep = take[rows], [p[expert] for p in params], [value[rows] for value in saved]
        drows, ds, *rest = function.run_backward(count, grad[at], x[at], scale[rows], *weights, *keep, *into)
        if drows is not None:
            dx.index_add_(0, at, drows.to(dx.dtype))
        if ds is not None:
            dscale[rows] = ds
        for place, dp in zip(into, rest, strict=True):
            if dp is None:
                place.zero_()
            elif dp.data_ptr() != place.data_ptr():
                place.copy_(dp)
    return [dx.to(x.dtype), dscale, *grads]


def _fake_order(key: Tensor, count: int) -> list[Tensor]:
    return [torch.empty_like(key), torch.empty_like(key), key.new_empty(count)]


def _fake_blocks(order: Tensor, back: Tensor, ends: Tensor, ranks: int, rows: int) -> list[Tensor]:
    return [order.new_empty(ranks * rows), torch.empty_like(back), torch.empty_like(ends), ends.new_empty(1)]


def _fake_arrived(came: Tensor, ranks: int, rows: int, blocks: bool) -> list[Tensor]:
    return [came.new_empty(rows), came.new_empty(rows), came.new_empty(came.numel() // ranks)]


def _fake_call(x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: object) -> Tensor:
    result = body_of(body).result
    return x.new_empty(x.shape[0], *result.shape, dtype=result.dtype)


def _fake_gradient(
    grad: Tensor, x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: object
) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(weight), *map(torch.empty_like, params)]


def _fake_run(
    x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], expected: int, waits: bool, body: str
) -> list[Tensor]:
    function = body_of(body)
    results = [x.new_empty(x.shape[0], *function.result.shape, dtype=function.result.dtype)]
    return results + [x.new_empty(take.shape[0], *value.shape, dtype=value.dtype) for value in function.saved]


def _fake_run_gradient(
    grad: Tensor, x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], saved: list[Tensor],
    expected: int, waits: bool, body: str,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x), torch.empty_like(scale), *map(torch.empty_like, params)]


# --- the ops

_library = OpLibrary("shardc_experts")
_MANY = "Tensor x, Tensor index, Tensor weight, Tensor[] params, str body, str way, float bound, int chunks, str held"
_SORTED = "Tensor x, Tensor take, Tensor scale, Tensor ends, Tensor[] params"
CALL = _library.define(f"call({_MANY}) -> Tensor", _call, _fake_call)
GRADIENT = _library.define(f"gradient(Tensor grad, {_MANY}) -> Tensor[]", _gradient, _fake_gradient)
RUN = _library.define(f"run({_SORTED}, int expected, bool waits, str body) -> Tensor[]", _run, _fake_run)
RUN_GRADIENT = _library.define(
    f"run_gradient(Tensor grad, {_SORTED}, Tensor[] saved, int expected, bool waits, str body) -> Tensor[]",
    _run_gradient,
    _fake_run_gradient,
)
NOTED = _library.define(
    "noted(Tensor index, int experts, str over) -> Tensor", _note, lambda index, experts, over: torch.empty_like(index)
)
ORDER = _library.define("order(Tensor key, int count) -> Tensor[]", _order, _fake_order)
COUNTS = _library.define("counts(Tensor ends) -> Tensor", _counts, torch.empty_like)
BLOCKS = _library.define(
    "blocks(Tensor order, Tensor back, Tensor ends, int ranks, int rows) -> Tensor[]", _blocks, _fake_blocks
)
WITHIN = _library.define(
    "within(Tensor most, int rows, int ranks, ScalarType dtype) -> Tensor",
    _within,
    lambda most, rows, ranks, dtype: most.new_empty(1, dtype=dtype),
)
ARRIVED = _library.define("arrived(Tensor came, int ranks, int rows, bool blocks) -> Tensor[]", _arrived, _fake_arrived)
