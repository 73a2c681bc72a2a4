"""Factories: tensors made from numbers alone; their factors stand in the result only."""

from __future__ import annotations

from typing import Any

import torch

from shardc.rules.loops import FREE, Loops
from shardc.rules.notation import WHOLE
from shardc.rules.positions import positions, split
from shardc.rules.rule import ANY, Call, Local, Rule, each, sized, table
from shardc.rules.spec import Spec

aten = torch.ops.aten


def _constant(call: Call) -> Spec:
    """Every element alike: any part of it is as good as another."""
    loops = Loops(call)
    given = [loops.dims(f"x{i}.", shape, WHOLE) for i, shape in enumerate(loops.shapes)]
    return loops.spec(given, [loops.dims("d", loops.made[0])])


def _arange(call: Call) -> Spec:
    loops = Loops(call)
    # Integers are the same however they are computed.
    kind = WHOLE if call.results[0].dtype.is_floating_point else FREE  # type: ignore[union-attr]
    return loops.spec([], [loops.dims("d", loops.made[0], kind)])


def _arange_local(local: Local) -> Any:
    layout = local.results[0]
    if not split(layout, 0):
        return local.same()
    asked, value = local.call, local.call.results[0]
    start, step = (asked["start"] if "start" in asked else 0), (asked["step"] if "step" in asked else 1)
    assert value is not None
    call = local.builder.call
    at = positions(local, layout, 0, local.call["device"])
    at = call(aten.add.Scalar, call(aten.mul.Scalar, at, step), start)
    return at if value.dtype == torch.int64 else call(aten._to_copy.default, at, dtype=value.dtype)


def _strided_local(local: Local) -> Any:
    """The local shape, its dims in the same order in memory."""
    shape, stride = local.results[0].local_shape, local.call["stride"]
    local_stride, below = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
        local_stride[dim] = below
        below *= shape[dim]
    return local.same(size=list(shape), stride=local_stride)


TABLE = table(
    each("full zeros ones empty.memory_format empty_permuted", _constant, "-> ...", sized()),
    each("new_full new_zeros new_ones new_empty", _constant, "-> ...", sized()),
    Rule("aten.empty_strided", _constant, "-> ...", _strided_local),
    Rule("aten.scalar_tensor", _constant, "-> "),
    Rule("aten.arange", _arange, "-> n", _arange_local),
    strides=ANY,
)
