"""Rules for ops that create tensors from numbers alone (``full``, ``arange``), and for random draws. Each rank draws
the elements of its shard, by their global positions.
"""

from __future__ import annotations

import torch

import shardc.custom_ops.random as draws
from shardc.rules.notation import FREE, WHOLE, Loops
from shardc.rules.positions import positions, split
from shardc.rules.rule import ANY, Call, Emitted, Local, Rule, rules_for, sized, table
from shardc.rules.spec import Spec

aten = torch.ops.aten


def _created(call: Call, kind: str = FREE) -> Spec:
    """Return the spec of an op that creates a tensor: each dim of the result may be split (``kind`` is `FREE`), or must
    be whole (`WHOLE`). Operands, such as the tensor of ``new_zeros`` or the key of a draw, are whole.
    """
    loops = Loops(call)
    operands = [loops.dims(f"x{i}.", shape, WHOLE) for i, shape in enumerate(loops.shapes)]
    return loops.spec(operands, [loops.dims("d", loops.result_shapes[0], kind)])


def _uniform_local(local: Local) -> Emitted:
    """Emit and return the draw of this rank's elements, each a function of the key and its global position, so that the
    draws are the same on every mesh.
    """
    layout, device = local.results[0], local.call["device"]
    # The position of each element in the contiguous global tensor: the sum over dims of index times stride.
    call, stride, index = local.builder.call, layout.numel, None
    for dim, size in enumerate(layout.shape):
        stride //= max(size, 1)
        along = call(aten.mul.Tensor, positions(local, layout, dim, device), stride)
        index = along if index is None else call(aten.add.Tensor, call(aten.unsqueeze.default, index, -1), along)
    if index is None:  # a tensor without dims
        index = call(aten.full.default, [], 0, dtype=torch.int64, device=device)
    key, stream = local.operand("key"), local.call["stream"]
    drawn = draws.uniform_at(call, key, stream, index, layout.numel, local.call["dtype"])
    return call(aten.reshape.default, drawn, list(layout.local_shape))


DRAWS = table(
    Rule("shardc_random.key", _created, "-> 1", lambda local: local.builder.key()),
    Rule("shardc_random.uniform", _created, "1 -> ...    by global position", _uniform_local),
    strides=ANY,
)


def _arange(call: Call) -> Spec:
    """Return the spec of ``arange``: its dim may be split if its numbers are integers."""
    # Floats are computed from the start by multiplication, which rounds differently on a shard; integers are exact.
    return _created(call, WHOLE if call.results[0].dtype.is_floating_point else FREE)  # type: ignore[union-attr]


def _arange_local(local: Local) -> Emitted:
    """Emit and return this rank's numbers of the range, by the global positions of its elements."""
    layout = local.results[0]
    if not split(layout, 0):
        return local.same()
    arange, result = local.call, local.call.results[0]
    # Some overloads have no start or no step.
    bounds = (arange["start"] if "start" in arange else 0), (arange["step"] if "step" in arange else 1)
    start, step = (int(x) if isinstance(x, float) else x for x in bounds)  # as torch does for integers
    assert result is not None
    call = local.builder.call
    index = positions(local, layout, 0, local.call["device"])
    numbers = call(aten.add.Scalar, call(aten.mul.Scalar, index, step), start)
    return numbers if result.dtype == torch.int64 else call(aten._to_copy.default, numbers, dtype=result.dtype)


def _strided_local(local: Local) -> Emitted:
    """Emit and return an ``empty_strided`` of the local shape, contiguous, with its dims in memory in the same order as
    in the global tensor.
    """
    shape, stride = local.results[0].local_shape, local.call["stride"]
    local_stride, elements = [0] * len(shape), 1  # elements of the dims that vary faster in memory
    for dim in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):  # the fastest first; of equals, the last
        local_stride[dim] = elements
        elements *= shape[dim]
    return local.same(size=list(shape), stride=local_stride)


TABLE = DRAWS | table(
    rules_for("full zeros ones empty.memory_format empty_permuted", _created, "-> ...", sized()),
    rules_for("new_full new_zeros new_ones new_empty", _created, "-> ...", sized()),
    Rule("aten.empty_strided", _created, "-> ...", _strided_local),
    Rule("aten.scalar_tensor", _created, "-> "),
    Rule("aten.arange", _arange, "-> n", _arange_local),
    strides=ANY,
)
