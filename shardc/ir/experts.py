"""Mixtures of experts: rows that are sent to the experts that a router chose for them, as ops.

A token goes to ``k`` of the ``e`` experts. An expert takes one row for each token that chose it, and a token's result
is the weighted sum of what its experts made of it. `call` and `gradient` say this for all experts and all tokens at
once, at global shapes. What one expert does with its rows is a `Body`, which every graph names by ``body``.

On one rank (`shardc.rules.experts`) rows are sorted by expert and `run` takes those of the rank's own experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx

from shardc.errors import InputError
from shardc.ir.bodies import body_of
from shardc.ir.graph import info

aten = torch.ops.aten
_library = torch.library.Library("shardc_experts", "DEF")

# --- what stands in a trace round the function of one expert


_library.define("enter(Tensor[] tensors, Tensor index) -> Tensor[]")
_library.define("enter_grad(Tensor[] grads, Tensor index, int[] sizes) -> Tensor[]")
_library.define("exit(Tensor rows, Tensor index) -> Tensor")
_library.define("exit_grad(Tensor grad, Tensor index) -> Tensor")


def _enter(tensors: list[Tensor], index: Tensor) -> list[Tensor]:
    x, weight, *params = tensors
    return [x.clone(), weight.new_empty(x.shape[0], 1), *(p.new_empty(p.shape[1:]) for p in params)]


def _enter_grad(grads: list[Tensor], index: Tensor, sizes: list[int]) -> list[Tensor]:
    x, scale, *params = grads
    return [
        x.clone(),
        scale.new_empty(index.shape),
        *(p.new_empty(n, *p.shape) for p, n in zip(params, sizes, strict=True)),
    ]


def _enter_setup(ctx: Any, inputs: tuple[list[Tensor], Tensor], output: list[Tensor]) -> None:
    (_, _, *params), index = inputs
    ctx.save_for_backward(index)
    ctx.sizes = [p.shape[0] for p in params]
    ctx.like = [(x.shape, x.dtype, x.device) for x in output]


def _enter_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor], None]:
    whole = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
    ]
    return torch.ops.shardc_experts.enter_grad(whole, ctx.saved_tensors[0], ctx.sizes), None


def _copy(x: Tensor, index: Tensor) -> Tensor:
    return x.clone()


_library.impl("enter", _enter, "CompositeExplicitAutograd")
_library.impl("enter_grad", _enter_grad, "CompositeExplicitAutograd")
_library.impl("exit", _copy, "CompositeExplicitAutograd")
_library.impl("exit_grad", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("shardc_experts::enter", _enter, lib=_library)
torch.library.register_fake("shardc_experts::enter_grad", _enter_grad, lib=_library)
torch.library.register_fake("shardc_experts::exit", _copy, lib=_library)
torch.library.register_fake("shardc_experts::exit_grad", _copy, lib=_library)
torch.library.register_autograd("shardc_experts::enter", _enter_backward, setup_context=_enter_setup, lib=_library)
torch.library.register_autograd(
    "shardc_experts::exit",
    lambda ctx, grad: (torch.ops.shardc_experts.exit_grad(grad, ctx.saved_tensors[0]), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    lib=_library,
)
ENTER, ENTER_GRAD = torch.ops.shardc_experts.enter.default, torch.ops.shardc_experts.enter_grad.default
EXIT, EXIT_GRAD = torch.ops.shardc_experts.exit.default, torch.ops.shardc_experts.exit_grad.default


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
    """Gives a list that gets, of each layer of experts that runs within, how many of this rank's choices each expert
    has, and the group of ranks that have others."""
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before


def experts_in(graph: fx.Graph) -> list[str]:
    """The modules whose experts `noting` hears of when ``graph`` runs, in order."""
    names = (info(node).name for node in graph.nodes if node.target is NOTED)
    return [name.rpartition(".noted")[0].rpartition("call")[0].rstrip(".") for name in names]


def _note(index: Tensor, experts: int, over: str) -> Tensor:
    """``index``; `noting` hears of it.

    Args:
        experts: how many there are in all.
        over: the group of ranks that have other tokens, "" if all have the same.
    """
    if _noted is not None:
        chosen = index.flatten()
        _noted.append((index.new_zeros(experts).scatter_add(0, chosen, torch.ones_like(chosen)), over))
    return index.clone()


def _order(key: Tensor, count: int) -> list[Tensor]:
    """The order that sorts ``key``, the place of each entry in it, and where each of ``count`` keys ends."""
    values, order = key.sort(stable=True)
    ends = torch.searchsorted(values, torch.arange(count, device=key.device), right=True)
    return [order, _inverse(order), ends]


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=order.device))


def _arrived(came: Tensor, ranks: int, rows: int) -> list[Tensor]:
    """Rows that came rank by rank, of each rank expert by expert, sorted by expert.

    Args:
        came: int64 [ranks e]: how many of each.
        rows: how many there is room for.

    Returns:
        the order, the place of each row in it, and where each expert's end.
    """
    own = came.numel() // ranks
    run = torch.searchsorted(came.cumsum(0), torch.arange(rows, device=came.device), right=True)
    key = torch.where(run < came.numel(), run % own, own)
    order = key.argsort(stable=True)
    return [order, _inverse(order), came.view(ranks, own).sum(0).cumsum(0)]


def _within(sends: Tensor, most: Tensor, rows: int) -> Tensor:
    """``sends``, if there is room for what comes everywhere.

    Args:
        most: int64 [1]: how many rows come to the rank to which the most do.
        rows: how many there is room for.

    Raises:
        InputError: there is not; on every rank, before a row is sent.
    """
    if (come := int(most)) > rows:
        raise InputError(
            f"{come} rows come to one rank, and its bound leaves room for {rows}",
            fix='raise the bound of shardc.ep(..., way="bounded"), or use way="send", which has room for all',
        )
    return sends.clone()


def _counts(ends: Tensor) -> Tensor:
    """How many entries each key has, of which ``ends`` says where they end."""
    return ends.diff(prepend=ends.new_zeros(1))


def sort(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The choices of ``index`` [t, k] sorted by expert, int64 [t k], and where each expert's end, int64 [e]."""
    chosen, order = index.flatten().sort(stable=True)
    return order, torch.searchsorted(chosen, torch.arange(experts, device=index.device), right=True)


def _call(x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: Any) -> Tensor:
    order, ends = sort(index, params[0].shape[0])
    scale = weight.flatten()[order].unsqueeze(1)
    return _run(x, order // index.shape[1], scale, ends, params, order.numel(), body)[0]


def _gradient(
    grad: Tensor, x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: Any
) -> list[Tensor]:
    order, ends = sort(index, params[0].shape[0])
    scale, take = weight.flatten()[order].unsqueeze(1), order // index.shape[1]
    saved = _run(x, take, scale, ends, params, order.numel(), body)[1:]
    dx, dscale, *rest = _run_gradient(grad, x, take, scale, ends, params, saved, order.numel(), body)
    of_weight = torch.empty_like(dscale).index_copy(0, order, dscale)
    return [dx, of_weight.view(index.shape), *rest]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What rows of ``dtype`` are added up in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _run(
    x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], expected: int, body: str
) -> list[Tensor]:
    """What each of this rank's experts makes of its rows, added up where the rows came from.

    Args:
        x: [m, d].
        take: int64 [r]: the row of ``x`` that each choice is about, sorted by expert.
        scale: [r, 1].
        ends: int64 [e]: where in ``take`` each expert's end; what stands behind the last is for none of them.
        params: [e, ...] each.
        expected: how many of ``take`` are for this rank's experts, as predictions count them.

    Returns:
        [m, o], and each of the body's saved values, [r, ...].
    """
    it, start = body_of(body), 0
    saved = [x.new_empty(take.shape[0], *one.shape, dtype=one.dtype) for one in it.saved]
    made = x.new_zeros(x.shape[0], *it.result.shape, dtype=_wide(it.result.dtype))
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            at = take[start:end]
            keep = [one[start:end] for one in saved]
            out = it.run_forward(end - start, x[at], scale[start:end], *(p[expert] for p in params), *keep)
            made.index_add_(0, at, out.to(made.dtype))
            start = end
    return [made.to(it.result.dtype), *saved]


def _run_gradient(
    grad: Tensor, x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], saved: list[Tensor],
    expected: int, body: str,
) -> list[Tensor]:  # fmt: skip
    """The gradients of ``x``, ``scale`` and ``params``; ``grad`` is that of `run`'s first result."""
    it, start = body_of(body), 0
    dx = x.new_zeros(x.shape, dtype=_wide(x.dtype))
    dscale, made = torch.zeros_like(scale), [torch.empty_like(p) for p in params]
    for expert, end in enumerate(ends.tolist()):
        if end == start:
            for one in made:
                one[expert].zero_()
            continue
        at, own = take[start:end], [p[expert] for p in params]
        keep = [one[start:end] for one in saved]
        into = [one[expert] for one in made]
        drows, ds, *rest = it.run_backward(end - start, grad[at], x[at], scale[start:end], *own, *keep, *into)
        if drows is not None:
            dx.index_add_(0, at, drows.to(dx.dtype))
        if ds is not None:
            dscale[start:end] = ds
        for place, one in zip(into, rest, strict=True):
            if one is None:
                place.zero_()
            elif one.data_ptr() != place.data_ptr():
                place.copy_(one)
        start = end
    return [dx.to(x.dtype), dscale, *made]


def _fake_order(key: Tensor, count: int) -> list[Tensor]:
    return [torch.empty_like(key), torch.empty_like(key), key.new_empty(count)]


def _fake_arrived(came: Tensor, ranks: int, rows: int) -> list[Tensor]:
    return [came.new_empty(rows), came.new_empty(rows), came.new_empty(came.numel() // ranks)]


def _fake_call(x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: Any) -> Tensor:
    it = body_of(body).result
    return x.new_empty(x.shape[0], *it.shape, dtype=it.dtype)


def _fake_gradient(
    grad: Tensor, x: Tensor, index: Tensor, weight: Tensor, params: list[Tensor], body: str, *_: Any
) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(weight), *map(torch.empty_like, params)]


def _fake_run(
    x: Tensor, take: Tensor, scale: Tensor, ends: Tensor, params: list[Tensor], expected: int, body: str
) -> list[Tensor]:
    it = body_of(body)
    made = [x.new_empty(x.shape[0], *it.result.shape, dtype=it.result.dtype)]
    return made + [x.new_empty(take.shape[0], *one.shape, dtype=one.dtype) for one in it.saved]


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


# --- functions of one expert

Function = Callable[..., Tensor]


def experts(function: Function) -> Function:
    """``function`` of one expert, as a function of all of them, for a model of one's own.

    Write what one expert does with its rows, ``function(rows, *weights) -> rows``: each row of the result from that row
    of the argument alone. `shardc.ep` then splits the experts over an axis. In a model that is not compiled, the
    experts run one after the other.

    Returns:
        A function of ``(x, index, weight, *weights)``: tokens [t, d], the experts that each goes to, int64 [t, k],
        their weights [t, k], and all experts' weights, [e, ...] each. It gives each token's weighted sum, [t, o].

    Raises:
        InputError: shapes that are others. When a model is compiled, CaptureError: the function mixes rows, or reads a
            tensor that it is not given.

    >>> import shardc, torch
    >>> @shardc.experts
    ... def products(rows, weight):
    ...     return rows @ weight
    >>> x, index, scale = torch.ones(3, 4), torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    >>> products(x, index, scale, torch.ones(2, 4, 5)).shape
    torch.Size([3, 5])
    """

    @wraps(function)
    def of_all(x: Tensor, index: Tensor, weight: Tensor, *weights: Tensor) -> Tensor:
        shapes = [tuple(one.shape) for one in (x, index, weight, *weights)]
        tokens = len(shapes[0]) == 2 and len(shapes[1]) == 2 and shapes[1] == shapes[2] and shapes[0][0] == shapes[1][0]
        if not tokens or not weights or any(len(one) < 2 or one[0] != shapes[3][0] for one in shapes[3:]):
            raise InputError(
                f"experts get tensors of the shapes {shapes}",
                fix="pass tokens [t, d], index [t, k], weight [t, k], and weights whose first dim is the experts",
            )
        made: Tensor = apply(function, x, index, weight, weights)
        return made

    return of_all


def one_by_one(
    function: Function, x: Tensor, index: Tensor, weight: Tensor, params: Sequence[Tensor], scaled: bool = False
) -> Tensor:
    """Experts one after the other, as one device computes them.

    Args:
        scaled: ``function`` takes the rows' weights, [n, 1], as its second argument and applies them itself.
    """
    order, ends = sort(index, params[0].shape[0])
    take, scale = order // index.shape[1], weight.flatten()[order].unsqueeze(1)
    made, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        rows, by, own = x[take[start:end]], scale[start:end], [p[expert] for p in params]
        made.append(function(rows, by, *own) if scaled else function(rows, *own) * by)
        start = end
    rows = torch.cat(made)
    return rows.new_zeros(x.shape[0], *rows.shape[1:]).index_add(0, take, rows).to(x.dtype)


def marked(
    function: Function, x: Tensor, index: Tensor, weight: Tensor, params: Sequence[Tensor], scaled: bool = False
) -> Tensor:
    """Experts in a trace: ``function`` is traced once, for one expert, between marks; otherwise as `one_by_one`."""
    index = index.clone()  # of this call alone
    rows, scale, *one = ENTER([x, weight, *params], index)
    made = function(rows, scale, *one) if scaled else function(rows, *one) * scale
    out: Tensor = EXIT(made.to(x.dtype), index)
    return out


apply = one_by_one  # `marked` while a model is captured
