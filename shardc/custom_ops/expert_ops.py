"""Ops of mixtures of experts: each row (token) is computed by the experts that a router chose for it.

A token is routed to ``k`` of ``e`` experts, and its result is the weighted sum of theirs. `call` and `gradient` compute
all experts and tokens at once, at global shapes; their argument ``body`` names the function of one expert (`Body`). On
one rank (`shardc.rules.routed_experts`) rows are sorted by expert, and `run` computes the rank's own experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from shardc.custom_ops.expert_functions import body_of
from shardc.custom_ops.grouped import suits
from shardc.errors import InputError
from shardc.ir.graph import info

aten = torch.ops.aten
_library = torch.library.Library("shardc_experts", "DEF")

# --- the ops of a graph

_MANY = "Tensor x, Tensor index, Tensor weight, Tensor[] params, str body, str way, float bound, str held"
_library.define(f"call({_MANY}) -> Tensor")
_library.define(f"gradient(Tensor grad, {_MANY}) -> Tensor[]")
_library.define(
    "run(Tensor x, Tensor take, Tensor scale, Tensor ends, Tensor[] params, int expected, str body) -> Tensor[]"
)
_library.define(
    "run_gradient(Tensor grad, Tensor x, Tensor take, Tensor scale, Tensor ends, Tensor[] params, Tensor[] saved, "
    "int expected, str body) -> Tensor[]"
)


_library.define("noted(Tensor index, int experts, str over) -> Tensor")
_library.define("order(Tensor key, int count) -> Tensor[]")
_library.define("counts(Tensor ends) -> Tensor")
_library.define("within(Tensor sends, Tensor most, int rows) -> Tensor")
_library.define("arrived(Tensor came, int ranks, int rows) -> Tensor[]")


Noted = list[tuple[Tensor, str]]
_noted: Noted | None = None


@contextmanager
def noting() -> Iterator[Noted]:
    """Context manager that collects the number of rows for each expert, in each layer of experts that runs in it.

    Yields:
        A list, to which each layer appends (number of this rank's rows for each expert, int64 [e]; process group of the
        ranks that have other tokens, "" if there are none).
    """
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before


def experts_in(graph: fx.Graph) -> list[str]:
    """Return the qualified names of the modules whose routing `noting` collects when ``graph`` runs, in order."""
    names = (info(node).name for node in graph.nodes if node.target is NOTED)
    return [name.rpartition(".noted")[0].rpartition("call")[0].rstrip(".") for name in names]


def _note(index: Tensor, experts: int, over: str) -> Tensor:
    """Record ``index`` for `noting`; return it with entries of no expert (padding) spread over all experts.

    Args:
        index: chosen experts, int64 [t, k]; the number ``experts`` stands for no expert.
        experts: number of experts.
        over: the process group of the ranks that have other tokens, "" if all have the same.
    """
    if _noted is not None:
        chosen = index.flatten()
        counts = index.new_zeros(experts + 1).scatter_add(0, chosen, torch.ones_like(chosen))
        _noted.append((counts[:experts], over))
    evenly = torch.arange(index.numel(), device=index.device).remainder(experts).view(index.shape)
    return torch.where(index < experts, index, evenly)


def _order(key: Tensor, count: int) -> list[Tensor]:
    """Return [order that sorts ``key``, its inverse, end of each key below ``count`` in that order], all int64."""
    values, order = key.sort(stable=True)
    ends = torch.searchsorted(values, torch.arange(count, device=key.device), right=True)
    return [order, _inverse(order), ends]


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=order.device))


def _arrived(came: Tensor, ranks: int, rows: int) -> list[Tensor]:
    """Return [order that sorts received rows by expert, its inverse, end of each expert's rows in that order].

    Rows arrive sorted by rank, then by expert.

    Args:
        came: number of rows from each rank for each expert, int64 [ranks e].
        rows: number of rows in the buffer.

    Returns:
        the order and its inverse, int64 [rows], and the ends, int64 [e].
    """
    experts = came.numel() // ranks
    run = torch.searchsorted(came.cumsum(0), torch.arange(rows, device=came.device), right=True)
    key = torch.where(run < came.numel(), run % experts, experts)
    order = key.argsort(stable=True)
    return [order, _inverse(order), came.view(ranks, experts).sum(0).cumsum(0)]


def _within(sends: Tensor, most: Tensor, rows: int) -> Tensor:
    """Return a copy of ``sends``; InputError on all ranks if ``most``, the busiest rank's rows, exceeds ``rows``."""
    if (come := int(most)) > rows:
        raise InputError(
            f"{come} rows come to one rank, and its capacity leaves room for {rows}",
            fix='raise the capacity of shardc.ep(..., dispatch="bounded"), or use dispatch="send", which has no limit',
        )
    return sends.clone()


def _counts(ends: Tensor) -> Tensor:
    """Return the number of rows of each expert, int64 [e], given the end of each expert's rows, int64 [e]."""
    return ends.diff(prepend=ends.new_zeros(1))


def sort(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return (order that sorts the flat ``index`` [t k] by expert, end of each expert's entries in it [e]), int64."""
    chosen, order = index.flatten().sort(stable=True)
    return order, torch.searchsorted(chosen, torch.arange(experts, device=index.device), right=True)


def _call(x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: object) -> Tensor:
    order, ends = sort(index, params[0].shape[0])
    scale = weight.flatten()[order].unsqueeze(1)
    return _run(x, order // index.shape[1], scale, ends, params, order.numel(), body)[0]


def _gradient(
    grad: Tensor, x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: object
) -> list[Tensor]:
    order, ends = sort(index, params[0].shape[0])
    scale, take = weight.flatten()[order].unsqueeze(1), order // index.shape[1]
    saved = _run(x, take, scale, ends, params, order.numel(), body)[1:]
    dx, dscale, *rest = _run_gradient(grad, x, take, scale, ends, params, saved, order.numel(), body)
    of_weight = torch.empty_like(dscale).index_copy(0, order, dscale)
    return [dx, of_weight.view(index.shape), *rest]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of ``dtype`` are summed: float32 for 16-bit floats, else ``dtype``."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _live(take: Tensor, ends: Tensor, expected: int) -> tuple[Tensor, Tensor]:
    """Return (the first n entries of ``take``, to compute; whether each has an expert of this rank, bool [n, 1]).

    If the buffer is more than twice the expected size, the host waits for the number of rows.
    """
    rows = take.shape[0] if take.shape[0] <= 2 * expected else int(ends[-1])
    return take[:rows], torch.arange(rows, device=take.device).unsqueeze(1) < ends[-1]


def _run(
    x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], expected: int, body: str
) -> list[Tensor]:
    """Run this rank's experts on their rows; return [sums of results by token, *the body's saved values].

    Args:
        x: tokens [m, d].
        take: row of ``x`` of each choice, sorted by expert, int64 [r].
        scale: routing weight of each choice [r, 1].
        ends: end of each expert's choices in ``take``, int64 [e]; choices after the last belong to no expert.
        params: parameters of this rank's experts, [e, ...] each.
        expected: predicted number of choices for this rank's experts.
        body: name of the experts' `Body`.

    Returns:
        sums of results [m, o], and each of the body's saved values, [r, ...].
    """
    function, start = body_of(body), 0
    saved = [x.new_empty(take.shape[0], *value.shape, dtype=value.dtype) for value in function.saved]
    total = x.new_zeros(x.shape[0], *function.result.shape, dtype=_wide(function.result.dtype))
    if function.grouped_forward is not None and suits(x, params):
        at, live = _live(take, ends, expected)
        n = at.shape[0]
        out, *values = function.grouped_forward(ends.to(torch.int32), n, x[at], scale[:n], *params)
        for place, value in zip(saved, values, strict=True):
            place[:n] = value
        total.index_add_(0, at, torch.where(live, out, 0).to(total.dtype))
        return [total.to(function.result.dtype), *saved]
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            at = take[start:end]
            keep = [value[start:end] for value in saved]
            out = function.run_forward(end - start, x[at], scale[start:end], *(p[expert] for p in params), *keep)
            total.index_add_(0, at, out.to(total.dtype))
            start = end
    return [total.to(function.result.dtype), *saved]


def _run_gradient(
    grad: Tensor, x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], saved: list[Tensor],
    expected: int, body: str,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of ``x``, ``scale`` and ``params``, given ``grad``, that of the first result of `_run`."""
    function, start = body_of(body), 0
    dx = x.new_zeros(x.shape, dtype=_wide(x.dtype))
    dscale, grads = torch.zeros_like(scale), [torch.empty_like(p) for p in params]
    if function.grouped_backward is not None and suits(x, params):
        at, live = _live(take, ends, expected)
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
    for expert, end in enumerate(ends.tolist()):
        if end == start:
            for param_grad in grads:
                param_grad[expert].zero_()
            continue
        at, weights = take[start:end], [p[expert] for p in params]
        keep = [value[start:end] for value in saved]
        into = [dp[expert] for dp in grads]
        drows, ds, *rest = function.run_backward(end - start, grad[at], x[at], scale[start:end], *weights, *keep, *into)
        if drows is not None:
            dx.index_add_(0, at, drows.to(dx.dtype))
        if ds is not None:
            dscale[start:end] = ds
        for place, dp in zip(into, rest, strict=True):
            if dp is None:
                place.zero_()
            elif dp.data_ptr() != place.data_ptr():
                place.copy_(dp)
        start = end
    return [dx.to(x.dtype), dscale, *grads]


def _fake_order(key: Tensor, count: int) -> list[Tensor]:
    return [torch.empty_like(key), torch.empty_like(key), key.new_empty(count)]


def _fake_arrived(came: Tensor, ranks: int, rows: int) -> list[Tensor]:
    return [came.new_empty(rows), came.new_empty(rows), came.new_empty(came.numel() // ranks)]


def _fake_call(x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: object) -> Tensor:
    result = body_of(body).result
    return x.new_empty(x.shape[0], *result.shape, dtype=result.dtype)


def _fake_gradient(
    grad: Tensor, x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: object
) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(weight), *map(torch.empty_like, params)]


def _fake_run(
    x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], expected: int, body: str
) -> list[Tensor]:
    function = body_of(body)
    results = [x.new_empty(x.shape[0], *function.result.shape, dtype=function.result.dtype)]
    return results + [x.new_empty(take.shape[0], *value.shape, dtype=value.dtype) for value in function.saved]


def _fake_run_gradient(
    grad: Tensor, x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], saved: list[Tensor],
    expected: int, body: str,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x), torch.empty_like(scale), *map(torch.empty_like, params)]


for _name, _function, _fake in (
    ("call", _call, _fake_call),
    ("gradient", _gradient, _fake_gradient),
    ("run", _run, _fake_run),
    ("run_gradient", _run_gradient, _fake_run_gradient),
    ("noted", _note, lambda index, experts, over: torch.empty_like(index)),
    ("order", _order, _fake_order),
    ("arrived", _arrived, _fake_arrived),
    ("counts", _counts, torch.empty_like),
    ("within", _within, lambda sends, most, rows: torch.empty_like(sends)),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardc_experts::{_name}", _fake, lib=_library)
CALL, GRADIENT = torch.ops.shardc_experts.call.default, torch.ops.shardc_experts.gradient.default
NOTED, ORDER, COUNTS, ARRIVED, WITHIN = (
    getattr(torch.ops.shardc_experts, name).default for name in ("noted", "order", "counts", "arrived", "within")
)
RUN, RUN_GRADIENT = torch.ops.shardc_experts.run.default, torch.ops.shardc_experts.run_gradient.default
