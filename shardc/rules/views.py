"""Views and transposes: all elements under another shape. Their factors follow from the shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardc.rules.loops import FREE, Loops
from shardc.rules.notation import WHOLE
from shardc.rules.rule import ANY, Call, Local, Localize, Rule, SpecOf, each, sized, table
from shardc.rules.spec import Spec

aten = torch.ops.aten


# --- the same elements in the same order


def _view(call: Call) -> Spec:
    loops = Loops(call)
    before, after = loops.regroup(loops.shapes[0], loops.made[0])
    return loops.spec([before], [after], moves=True)


def _reshape_local(local: Local) -> Any:
    # A shard may have other strides than the whole tensor had, so a view may need a copy.
    return local.builder.call(aten.reshape.default, local.args[0], list(local.results[0].local_shape))


def _squeezed(local: Local) -> Any:
    """Drops the dims that are 1 in the global shape: a shard may be of size 1 in others too."""
    shape = local.call.operands[0].shape
    asked = range(len(shape)) if local.call.name.endswith("default") else as_dims(local.call["dim"], len(shape))
    return local.builder.call(aten.squeeze.dims, local.args[0], [d for d in asked if shape[d] == 1])


def as_dims(dims: int | Sequence[int], ndim: int) -> list[int]:
    return [d % ndim for d in ((dims,) if isinstance(dims, int) else dims)] if ndim else []


# --- dims in another order


def _reordered(order: Callable[[Call, int], Sequence[int]]) -> SpecOf:
    """The spec of an op whose result dim ``i`` is operand dim ``order(call, ndim)[i]``."""

    def spec(call: Call) -> Spec:
        loops = Loops(call)
        before = loops.dims("d", loops.shapes[0])
        return loops.spec([before], [tuple(before[i] for i in order(call, len(before)))], moves=True)

    return spec


def _swapped(call: Call, ndim: int) -> list[int]:
    order = list(range(ndim))
    if ndim:
        one, other = call["dim0"], call["dim1"]
        order[one], order[other] = order[other], order[one]
    return order


def _permutation(call: Call, ndim: int) -> Sequence[int]:
    return [d % ndim for d in call["dims"]]


# --- elements repeated


def _expand(call: Call) -> Spec:
    loops = Loops(call)
    shape = loops.made[0]
    return loops.spec([loops.broadcast(loops.shapes[0], shape)], [loops.broadcast(shape, shape)], moves=True)


def _repeat(call: Call) -> Spec:
    """Each dim is repeated as a whole: times the major factor, its own the minor one."""
    loops = Loops(call)
    shape, made = loops.shapes[0], loops.made[0]
    lead = len(made) - len(shape)
    before = loops.dims("d", [1] * lead + list(shape))
    times = [loops.dim(f"times{i}", n) for i, n in enumerate(call["repeats"])]
    after = [major + minor for major, minor in zip(times, before, strict=True)]
    return loops.spec([before[lead:]], [tuple(after)], moves=True)


def _repeat_local(local: Local) -> Any:
    made = local.results[0].local_shape
    own = [1] * (len(made) - local.operands[0].ndim) + list(local.operands[0].local_shape)
    # Where there is nothing to repeat, any number of times will do.
    return local.same(repeats=[n // size if size else 1 for n, size in zip(made, own, strict=True)])


# --- dims that meet each other


def _diagonal(call: Call) -> Spec:
    """Two dims become one, at the end."""
    loops = Loops(call)
    shape, made = loops.shapes[0], loops.made[0]
    met = {call["dim1"] % len(shape), call["dim2"] % len(shape)}
    x = tuple(loops.dim(f"d{i}", n, WHOLE if i in met else FREE) for i, n in enumerate(shape))
    kept = tuple(factors for i, factors in enumerate(x) if i not in met)
    return loops.spec([x], [(*kept, loops.dim("diagonal", made[-1], WHOLE))], moves=True)


def _unfold(call: Call) -> Spec:
    """One dim becomes its windows, whose elements stand at the end."""
    loops = Loops(call)
    shape, made = loops.shapes[0], loops.made[0]
    if not shape:
        return loops.spec([()], [((),)], moves=True)
    dim = call["dimension"] % len(shape)
    x = tuple(loops.dim(f"d{i}", n, WHOLE if i == dim else FREE) for i, n in enumerate(shape))
    windows, window = (loops.dim(name, n, WHOLE) for name, n in (("windows", made[dim]), ("window", made[-1])))
    return loops.spec([x], [(*x[:dim], windows, *x[dim + 1 :], window)], moves=True)


def _shuffle(call: Call, *, shrink: bool) -> Spec:
    """``(c a b) h w -> c (h a) (w b)`` where the image grows, the other way round where it shrinks."""
    loops = Loops(call)
    few, many = (loops.made[0], loops.shapes[0]) if shrink else (loops.shapes[0], loops.made[0])
    lead = loops.dims("n", few[:-3])
    factor = call["downscale_factor" if shrink else "upscale_factor"]
    c, h, w = loops.dim("c", many[-3]), loops.dim("h", few[-2]), loops.dim("w", few[-1])
    a, b = loops.dim("a", factor, WHOLE), loops.dim("b", factor, WHOLE)
    packed, image = (*lead, c + a + b, h, w), (*lead, c, h + a, w + b)
    return loops.spec([image if shrink else packed], [packed if shrink else image], moves=True)


def _copies(op: str, spec: SpecOf, text: str, localize: Localize = Local.same) -> list[Rule]:
    """The rule of a view and of its form that copies."""
    return each(f"{op} {op}_copy", spec, text, localize)


TABLE = table(
    each("view.default view_copy.default reshape _unsafe_view", _view, "factors shared by both shapes", _reshape_local),
    _copies("squeeze", _view, "dims of size 1 go", _squeezed),
    _copies("unsqueeze", _view, "... -> ... 1"),
    _copies("t", _reordered(lambda _, ndim: range(ndim)[::-1]), "a b -> b a"),
    _copies("transpose", _reordered(_swapped), "... a ... b -> ... b ... a"),
    _copies("permute", _reordered(_permutation), "dims in another order"),
    _copies("expand", _expand, "1 ... -> n ...", sized()),
    _copies("diagonal", _diagonal, "... a b -> ... d    a b d: whole"),
    _copies("unfold", _unfold, "... n -> ... m k    n m k: whole"),
    Rule("aten.repeat", _repeat, "n -> (times n)", _repeat_local),
    Rule("aten.pixel_shuffle", lambda call: _shuffle(call, shrink=False), "(c a b) h w -> c (h a) (w b)    a b: whole"),
    Rule(
        "aten.pixel_unshuffle", lambda call: _shuffle(call, shrink=True), "c (h a) (w b) -> (c a b) h w    a b: whole"
    ),
    strides=ANY,
)
