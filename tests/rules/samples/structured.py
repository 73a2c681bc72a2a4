"""Samples of contractions, reductions and convolutions: ops whose arguments must fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.rules.samples.values import Draw, Sample, overloads

aten = torch.ops.aten


def _contraction(name: str, draw: Draw) -> Iterator[Sample]:
    shapes: dict[str, list[tuple[int, ...]]] = {
        "mm": [(4, 8), (8, 2)],
        "bmm": [(4, 2, 8), (4, 8, 6)],
        "mv": [(4, 8), (8,)],
        "dot": [(8,), (8,)],
        "vdot": [(8,), (8,)],
        "outer": [(4,), (6,)],
        "addmm": [(6,), (4, 8), (8, 6)],
        "baddbmm": [(4, 1, 6), (4, 2, 8), (4, 8, 6)],
        "addbmm": [(2, 6), (4, 2, 8), (4, 8, 6)],
        "addmv": [(4,), (4, 8), (8,)],
        "addr": [(4, 6), (4,), (6,)],
    }
    yield Sample(getattr(aten, name).default, tuple(draw.normal(*shape) for shape in shapes[name]))
    if name.startswith("add") or name == "baddbmm":
        arguments = tuple(draw.normal(*shape) for shape in shapes[name])
        yield Sample(getattr(aten, name).default, arguments, {"beta": 0.5, "alpha": 2.0})


def _reduction(op: str, name: str, draw: Draw) -> Iterator[Sample]:
    """Every overload over no dim, one dim and several, with and without keeping them."""
    x = draw.normal(4, 2, 8)
    if name in ("any", "all"):
        x = x > (1.2 if name == "any" else -1.2)
    for overload in overloads(op):
        arguments = {a.name: str(a.type) for a in overload._schema.arguments}
        required = {"k": 2} if "k" in arguments else {}
        keeps: list[dict[str, Any]] = [{"keepdim": True}, {}] if "keepdim" in arguments else [{}]
        dims: list[dict[str, Any]] = [{}]
        if "dim" in arguments:
            many = "List" in arguments["dim"]
            dims = [{"dim": [0, -1]}, {"dim": [1]}, {"dim": [0, 1, 2]}] if many else [{"dim": 0}, {"dim": -1}]
        for dim in dims:
            for keep in keeps:
                yield _by_name(overload, x, {**required, **dim, **keep})


def _by_name(overload: Any, x: Tensor, given: dict[str, Any]) -> Sample:
    """``overload(x, ...)`` with ``given`` by position where the schema has them so."""
    args: list[Any] = [x]
    kwargs: dict[str, Any] = {}
    for argument in overload._schema.arguments[1:]:
        value = given.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Sample(overload, tuple(args), kwargs)


# --- convolution and the like


def _convolution(name: str, draw: Draw) -> Iterator[Sample]:
    cases = [
        # input, weight, bias, stride, padding, dilation, transposed, groups
        ((4, 4, 5, 5), (6, 4, 3, 3), False, 2, 1, 1, False, 1),
        ((2, 4, 5, 5), (4, 4, 3, 3), True, 1, 0, 2, False, 1),
        ((2, 8, 6), (8, 4, 3), False, 1, 1, 1, False, 2),
        ((2, 8, 4, 4), (8, 1, 3, 3), False, 1, 1, 1, False, 8),
        ((2, 4, 3, 3), (4, 2, 2, 2), False, 2, 0, 1, True, 1),
        ((2, 8, 3, 3), (8, 2, 2, 2), False, 2, 0, 1, True, 2),
    ]
    for x_shape, w_shape, biased, stride, padding, dilation, transposed, groups in cases:
        x, w, places = draw.normal(*x_shape), draw.normal(*w_shape), len(x_shape) - 2
        bias = draw.normal(w_shape[0]) if biased else None
        geometry = ([stride] * places, [padding] * places, [dilation] * places, transposed, [0] * places, groups)
        if name == "convolution":
            yield Sample(aten.convolution.default, (x, w, bias, *geometry))
            continue
        grad = draw.normal(*aten.convolution.default(x, w, bias, *geometry).shape)
        for mask in ([True, True, biased], [True, False, False], [False, True, False]):
            sizes = [w_shape[0]] if biased else None
            yield Sample(aten.convolution_backward.default, (grad, x, w, sizes, *geometry, mask))


def _sampling(name: str, draw: Draw) -> Iterator[Sample]:
    places = 2 if "2d" in name else 3
    image, grid = draw.normal(4, 2, *[4] * places), 2 * draw.unit(4, *[2] * places, places) - 1
    options = (0, 0, False)
    if not name.endswith("backward"):
        yield Sample(getattr(aten, name).default, (image, grid, *options))
        return
    for mask in ([True, True], [True, False], [False, True]):
        yield Sample(getattr(aten, name).default, (draw.normal(4, 2, *[2] * places), image, grid, *options, mask))


def _columns(name: str, draw: Draw) -> Iterator[Sample]:
    windows = ([2, 2], [1, 1], [0, 0], [2, 2])
    for lead in ((2,), ()):
        if name == "im2col":
            yield Sample(aten.im2col.default, (draw.normal(*lead, 4, 6, 4), *windows))
        else:
            yield Sample(aten.col2im.default, (draw.normal(*lead, 16, 6), [6, 4], *windows))


def samples(op: str, family: str) -> Iterator[Sample]:
    """Samples of a rule of ``family``: contraction, reduction or convolution."""
    name = op.split(".")[1]
    draw = Draw(op)
    if family == "contraction":
        yield from _contraction(name, draw)
    elif family == "reduction":
        yield from _reduction(op, name, draw)
    elif name.startswith("grid"):
        yield from _sampling(name, draw)
    else:
        yield from (_convolution if name.startswith("convolution") else _columns)(name, draw)
