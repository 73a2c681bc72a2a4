"""Rules for views, permutations and repeats: they keep the elements, and factors follow from the shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardc.rules.notation import FREE, WHOLE, Loops
from shardc.rules.rule import ANY, Call, Emitted, Local, Rule, SpecOf, rules_for, sized, table
from shardc.rules.spec import Spec

aten = torch.ops.aten


# --- view, squeeze, unsqueeze


def _view(call: Call) -> Spec:
    """Return the spec of a reshape: common factors of the shapes may be split (`Loops.regroup`)."""
    loops = Loops(call)
    before, after = loops.regroup(loops.shapes[0], loops.result_shapes[0])
    return loops.spec([before], [after], moves=True)


def _reshape_local(local: Local) -> Emitted:
    """Emit and return a reshape to the local shape of the result."""
    # A shard may have other strides than the whole tensor had, so a view may need a copy.
    return local.builder.call(aten.reshape.default, local.args[0], list(local.results[0].local_shape))


def _squeezed(local: Local) -> Emitted:
    """Emit and return a squeeze of the dims that have size 1 in the global shape: on a shard other dims may have size 1
    too.
    """
    shape = local.call.operands[0].shape
    dims = range(len(shape)) if local.call.name.endswith("default") else as_dims(local.call["dim"], len(shape))
    return local.builder.call(aten.squeeze.dims, local.args[0], [d for d in dims if shape[d] == 1])


def as_dims(dims: int | Sequence[int], ndim: int) -> list[int]:
    """Return ``dims``, an int or several, as a list of dims counted from 0, given the number of dims; [] for a tensor
    without dims.
    """
    return [d % ndim for d in ((dims,) if isinstance(dims, int) else dims)] if ndim else []


# --- transpose, permute


def _reordered(order: Callable[[Call, int], Sequence[int]]) -> SpecOf:
    """Return the spec function of an op whose result dim ``i`` is operand dim ``order(call, ndim)[i]``."""

    def spec(call: Call) -> Spec:
        loops = Loops(call)
        before = loops.dims("d", loops.shapes[0])
        return loops.spec([before], [tuple(before[i] for i in order(call, len(before)))], moves=True)

    return spec


def _swapped(call: Call, ndim: int) -> list[int]:
    """Return the order of dims of ``transpose``: the operand's dim in each place of the result."""
    order = list(range(ndim))
    if ndim:  # torch accepts a tensor without dims
        first, second = call["dim0"], call["dim1"]
        order[first], order[second] = order[second], order[first]
    return order


def _permutation(call: Call, ndim: int) -> Sequence[int]:
    """Return the order of dims of ``permute``: the operand's dim in each place of the result, counted from 0."""
    return [d % ndim for d in call["dims"]]


# --- expand, repeat


def _expand(call: Call) -> Spec:
    """Return the spec of ``expand``. Dims of size 1 have no factors, so that the dims that they become may be split."""
    loops = Loops(call)
    shape = loops.result_shapes[0]
    return loops.spec([loops.broadcast(loops.shapes[0], shape)], [loops.broadcast(shape, shape)], moves=True)


def _repeat(call: Call) -> Spec:
    """Return the spec of ``repeat``: each result dim is the number of repeats (major) times the dim (minor)."""
    loops = Loops(call)
    lead = len(loops.result_shapes[0]) - len(loops.shapes[0])  # ``repeats`` may add leading dims
    before = loops.dims("d", [1] * lead + list(loops.shapes[0]))
    times = [loops.dim(f"times{i}", n) for i, n in enumerate(call["repeats"])]
    after = [major + minor for major, minor in zip(times, before, strict=True)]
    return loops.spec([before[lead:]], [tuple(after)], moves=True)


def _repeat_local(local: Local) -> Emitted:
    """Emit and return a repeat with the numbers of repeats that give the local shape of the result."""
    result_shape = local.results[0].local_shape
    operand_shape = [1] * (len(result_shape) - local.operands[0].ndim) + list(local.operands[0].local_shape)
    # An empty dim can be repeated any number of times.
    return local.same(repeats=[n // size if size else 1 for n, size in zip(result_shape, operand_shape, strict=True)])


# --- diagonal, unfold, pixel_shuffle


def _diagonal(call: Call) -> Spec:
    """Return the spec of ``diagonal``: two dims, which must not be split, become one, at the end."""
    loops = Loops(call)
    shape, result_shape = loops.shapes[0], loops.result_shapes[0]
    pair = {call["dim1"] % len(shape), call["dim2"] % len(shape)}
    x = tuple(loops.dim(f"d{i}", n, WHOLE if i in pair else FREE) for i, n in enumerate(shape))
    others = tuple(factors for i, factors in enumerate(x) if i not in pair)
    return loops.spec([x], [(*others, loops.dim("diagonal", result_shape[-1], WHOLE))], moves=True)


def _unfold(call: Call) -> Spec:
    """Return the spec of ``unfold``: a dim becomes its windows; the elements of a window become a last dim. These must
    not be split, as windows overlap.
    """
    loops = Loops(call)
    shape, result_shape = loops.shapes[0], loops.result_shapes[0]
    if not shape:  # torch gives a tensor without dims a last dim of size 1
        return loops.spec([()], [((),)], moves=True)
    dim = call["dimension"] % len(shape)
    x = tuple(loops.dim(f"d{i}", n, WHOLE if i == dim else FREE) for i, n in enumerate(shape))
    windows, window = (
        loops.dim(name, n, WHOLE) for name, n in (("windows", result_shape[dim]), ("window", result_shape[-1]))
    )
    return loops.spec([x], [(*x[:dim], windows, *x[dim + 1 :], window)], moves=True)


def _shuffle(call: Call, *, shrink: bool) -> Spec:
    """Return the spec of pixel_shuffle ``(c a b) h w -> c (h a) (w b)``, or of its inverse (``shrink``)."""
    loops = Loops(call)
    operand, result = loops.shapes[0], loops.result_shapes[0]
    # The shape [n, c a b, h, w], which has few pixels, and the shape [n, c, h a, w b].
    packed_shape, image_shape = (result, operand) if shrink else (operand, result)
    lead = loops.dims("n", packed_shape[:-3])
    factor = call["downscale_factor" if shrink else "upscale_factor"]
    c, h, w = loops.dim("c", image_shape[-3]), loops.dim("h", packed_shape[-2]), loops.dim("w", packed_shape[-1])
    a, b = loops.dim("a", factor, WHOLE), loops.dim("b", factor, WHOLE)
    packed, image = (*lead, c + a + b, h, w), (*lead, c, h + a, w + b)
    return loops.spec([image if shrink else packed], [packed if shrink else image], moves=True)


TABLE = table(
    rules_for(
        "view.default view_copy.default reshape _unsafe_view", _view, "factors shared by both shapes", _reshape_local
    ),
    rules_for("squeeze squeeze_copy", _view, "dims of size 1 go", _squeezed),
    rules_for("unsqueeze unsqueeze_copy", _view, "... -> ... 1"),
    rules_for("t t_copy", _reordered(lambda _, ndim: range(ndim)[::-1]), "a b -> b a"),
    rules_for("transpose transpose_copy", _reordered(_swapped), "... a ... b -> ... b ... a"),
    rules_for("permute permute_copy", _reordered(_permutation), "dims in another order"),
    rules_for("expand expand_copy", _expand, "1 ... -> n ...", sized()),
    rules_for("diagonal diagonal_copy", _diagonal, "... a b -> ... d    a b d: whole"),
    rules_for("unfold unfold_copy", _unfold, "... n -> ... m k    n m k: whole"),
    Rule("aten.repeat", _repeat, "n -> (times n)", _repeat_local),
    Rule("aten.pixel_shuffle", lambda call: _shuffle(call, shrink=False), "(c a b) h w -> c (h a) (w b)    a b: whole"),
    Rule(
        "aten.pixel_unshuffle", lambda call: _shuffle(call, shrink=True), "c (h a) (w b) -> (c a b) h w    a b: whole"
    ),
    strides=ANY,
)
