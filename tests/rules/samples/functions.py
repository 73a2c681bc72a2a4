"""Samples of ops that run functions: what they carry, sum, read by place, cut into heads, and decide by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.capture.functions import graph_of_function
from shardc.custom_ops.flops import function_flops
from shardc.custom_ops.function_ops import OPS, Function, register
from tests.rules.samples.values import Draw, Sample

STEPS = 3
Functions = tuple[Callable[..., Any], ...]


def _graph(kind: str, function: Callable[..., Any], given: list[Tensor]) -> fx.Graph:
    return graph_of_function(make_fx(function)(*given), None, kind)


def _registered(kind: str, graphs: list[fx.Graph], operands: list[Tensor], counts: tuple[int, int]) -> Sample:
    function = register(Function(kind, tuple(graphs), counts, function_flops(kind, tuple(graphs))))
    return Sample(OPS[kind], (operands, function.name))


def _sample(kind: str, functions: Functions, operands: list[Tensor], counts: tuple[int, int] = (0, 0)) -> Sample:
    arguments, (carries, sequences) = operands[1:] if kind == "cond" else operands, counts
    given = [x[0] if carries <= at < carries + sequences else x for at, x in enumerate(arguments)]
    return _registered(kind, [_graph(kind, function, given) for function in functions], operands, counts)


def recurrent(h: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    h = torch.tanh(h @ w.t() + x + b)
    return h, h * 2 + x


def gradients(grad: Tensor, total: Tensor, bias: Tensor, g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What is summed over the batch is carried; what is multiplied by a weight is not."""
    g = grad * x + g
    return g @ w, total + g.t() @ x, bias + g.sum(0), g * 2


def counted(count: Tensor, total: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """A number of steps, which is the same on every rank, and a sum."""
    h = torch.sigmoid(x) * h + count * x
    return count + 1, total * 0.5 + h.sum(), h, h.sum(1)


def by_heads(state: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    heads = x.view(x.shape[0], 4, 2)
    state = state * 0.9 + torch.einsum("bhd,bhe->bhde", heads, heads / heads.square().sum(-1, True))
    return state, state.sum(-1).flatten(1)


def by_place(h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """The batch's places, and a lookup in the features, which must be whole."""
    places = torch.arange(h.shape[0]).unsqueeze(1)
    h = torch.where(places > 1, torch.tanh(h + x), x)
    return h, h[:, 2] * places.squeeze(1)


def bounded(total: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """A sum over the batch, of which each step takes a function that is not linear."""
    total = torch.tanh(total + x.sum(0))
    return total, total * 2


def decided(h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """A branch in a step, by the first row: the batch must be whole."""
    larger = x[0, 0] > 0
    h = torch.where(larger, h + x, h - x)
    return h, h.clone()


def _scans(draw: Draw) -> Iterator[Sample]:
    h, x, w, b = draw.normal(4, 4), draw.normal(STEPS, 4, 4), draw.normal(4, 4), draw.normal(4)
    yield _sample("scan", (recurrent,), [h, x, w, b], (1, 1))
    yield _sample("scan", (gradients,), [h, draw.normal(4, 4), b, x, draw.normal(STEPS, 4, 4), w], (3, 2))
    yield _sample("scan", (counted,), [torch.tensor(2.0).double(), draw.normal(), h, x], (3, 1))
    yield _sample("scan", (by_heads,), [draw.normal(4, 4, 2, 2), draw.normal(STEPS, 4, 8)], (1, 1))
    yield _sample("scan", (by_place,), [h, x], (1, 1))
    yield _sample("scan", (bounded,), [b, x], (1, 1))
    yield _sample("scan", (decided,), [h, x], (1, 1))


def _branches(draw: Draw) -> Iterator[Sample]:
    h, b = draw.normal(4, 8), draw.normal(8)
    for predicate in (torch.tensor(True), torch.tensor(False)):
        yield _sample("cond", (lambda h, b: (h.tanh() + b,), lambda h, b: (h * 3,)), [predicate, h, b])
        # One branch sums, the other has a value that is whole on every rank.
        yield _sample("cond", (lambda h, b: (h.sum(0),), lambda h, b: (b * 2,)), [predicate, h, b])


def _loops(draw: Draw) -> Iterator[Sample]:
    count, h, x = torch.tensor(0), draw.normal(4, 8), draw.normal(4, 8)
    step = lambda n, h, total, x: (n + 1, torch.tanh(h) + x, total + h.sum(0))  # noqa: E731
    operands = [count, h, draw.normal(8), x]
    yield _sample("while_loop", (lambda n, h, total, x: n < 4, step), operands, (3, 0))
    # By values: those of all rows must be there.
    yield _sample("while_loop", (lambda n, h, total, x: (n < 4) & (h.sum() < 50), step), operands, (3, 0))
    yield _sample("while_loop", (lambda n, h, total, x: (n < 4) & (h.amax() < 5), step), operands, (3, 0))


def _loop_gradients(draw: Draw) -> Iterator[Sample]:
    def step(n: Tensor, h: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return n + 1, torch.tanh(h) * c + x

    def gradient(g: Tensor, of_c: Tensor, of_x: Tensor, n: Tensor, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(h)
        return g * rest[0] * (1 - y * y), of_c + (g * y).sum(0), of_x + g

    grads, operands = draw.normal(4, 8), [torch.tensor(0), draw.normal(4, 8), draw.normal(8), draw.normal(4, 8)]
    graphs = [_graph("while_loop", f, operands) for f in (lambda n, h, c, x: n < 3, step)]
    graphs.append(_graph("while_loop", gradient, [grads, *operands[2:], *operands]))
    yield _registered("loop_gradient", graphs, [grads, *operands], (1, 2))


def samples(op: str) -> list[Sample]:
    kind = op.removeprefix("shardc_function.")
    return list(
        {"scan": _scans, "cond": _branches, "while_loop": _loops, "loop_gradient": _loop_gradients}[kind](Draw(op))
    )
