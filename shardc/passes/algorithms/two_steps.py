"""An all-reduce as a reduce-scatter and an all-gather, each by its fastest algorithm."""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod

import torch
from torch import fx

from shardc.ir.graph import Value, value
from shardc.passes.algorithms.algorithm import Algorithm, Group, Spelling

aten = torch.ops.aten


class TwoSteps(Algorithm):
    """A reduce-scatter of the tensor in a row, and an all-gather of the pieces."""

    kind = "all_reduce"

    def seconds(self, group: Group, x: Value) -> float:
        if prod(x.shape) % group.ranks:
            return inf
        flat = replace(x, shape=(prod(x.shape),))
        piece = replace(x, shape=(prod(x.shape) // group.ranks,))
        first, second = group.best("reduce_scatter", flat), group.best("all_gather", piece)
        return first.seconds(group, flat) + second.seconds(group, piece)

    def spell(self, x: fx.Node, at: Spelling) -> fx.Node:
        shape = value(x).shape
        flat = at.start(aten.reshape.default, x, [prod(shape)])
        piece = at.group.best("reduce_scatter", value(flat)).spell(flat, at)
        whole = at.group.best("all_gather", value(piece)).spell(piece, at.behind())
        return at.rest(aten.reshape.default, whole, list(shape))
