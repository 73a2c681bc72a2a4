"""By an all-to-all: each rank reduces the pieces that it gets by itself, or sends a copy to every other."""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir.graph import Value, value
from shardc.passes.algorithms.algorithm import Algorithm, Group, Spelling

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class ExchangedScatter(Algorithm):
    """An all-to-all whose pieces each rank reduces by itself."""

    kind = "reduce_scatter"

    def seconds(self, group: Group, x: Value) -> float:
        return group.native("all_to_all", x) + group.cost.compute_seconds(0, x.nbytes + x.nbytes / group.ranks)

    def spell(self, x: fx.Node, at: Spelling) -> fx.Node:
        ranks, shape = at.group.ranks, value(x).shape
        each = [shape[0] // ranks] * ranks
        pieces = at.start(c10d.all_to_all_single.default, x, each, each, at.group.name)
        pieces = at.rest(c10d.wait_tensor.default, pieces)
        return at.reduced(at.rest(aten.reshape.default, pieces, [ranks, each[0], *shape[1:]]))


class ExchangedGather(Algorithm):
    """An all-to-all of as many copies as there are ranks."""

    kind = "all_gather"

    def seconds(self, group: Group, x: Value) -> float:
        copies = group.cost.compute_seconds(0, (group.ranks + 1) * x.nbytes)
        return copies + group.cost.seconds("all_to_all", group.ranks, (group.ranks - 1) * x.nbytes)

    def spell(self, x: fx.Node, at: Spelling) -> fx.Node:
        ranks, shape = at.group.ranks, value(x).shape
        lead, rest = (shape[0], shape[1:]) if shape else (1, ())
        x = at.start(aten.expand.default, x, [ranks, *shape])
        x = at.start(aten.clone.default, x, memory_format=torch.contiguous_format)
        x = at.start(aten.reshape.default, x, [ranks * lead, *rest])
        made = at.start(c10d.all_to_all_single.default, x, [lead] * ranks, [lead] * ranks, at.group.name)
        return at.rest(c10d.wait_tensor.default, made)
