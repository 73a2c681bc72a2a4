"""Rules for shardc's random draws: each rank draws the numbers of its elements from their global positions."""

from __future__ import annotations

from typing import Any

import torch

import shardc.custom_ops.random as draws
from shardc.rules.loops import Loops
from shardc.rules.positions import positions
from shardc.rules.rule import ANY, Call, Local, Rule, table
from shardc.rules.spec import Spec

aten = torch.ops.aten


def _key(call: Call) -> Spec:
    loops = Loops(call)
    return loops.spec([], [loops.dims("key", loops.result_shapes[0])])


def _uniform(call: Call) -> Spec:
    loops = Loops(call)
    return loops.spec([loops.dims("key", loops.shapes[0])], [loops.dims("d", loops.result_shapes[0])])


def _uniform_local(local: Local) -> Any:
    layout, device = local.results[0], local.call["device"]
    call, below, index = local.builder.call, layout.numel, None
    for dim, size in enumerate(layout.shape):
        below //= max(size, 1)
        along = call(aten.mul.Tensor, positions(local, layout, dim, device), below)
        index = along if index is None else call(aten.add.Tensor, call(aten.unsqueeze.default, index, -1), along)
    if index is None:
        index = call(aten.full.default, [], 0, dtype=torch.int64, device=device)
    key, stream = local.operand("key"), local.call["stream"]
    drawn = draws.uniform_at(call, key, stream, index, layout.numel, local.call["dtype"])
    return call(aten.reshape.default, drawn, list(layout.local_shape))


TABLE = table(
    Rule("shardc_random.key", _key, "-> 1", lambda local: local.builder.key()),
    Rule("shardc_random.uniform", _uniform, "1 -> ...    by global position", _uniform_local),
    strides=ANY,
)
