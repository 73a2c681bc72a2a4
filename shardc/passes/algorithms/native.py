"""The backend's own collectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.graph import Value
from shardc.passes.algorithms.algorithm import Algorithm, Group, Spelling

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Native(Algorithm):
    """The backend's collective of this kind."""

    kind: str

    def seconds(self, group: Group, x: Value) -> float:
        return group.native(self.kind, x)

    def spell(self, x: fx.Node, at: Spelling) -> fx.Node:
        ranks, name = at.group.ranks, at.group.name
        if self.kind == "reduce_scatter":
            made = at.start(c10d.reduce_scatter_tensor.default, x, at.op, ranks, name)
        elif self.kind == "all_gather":
            made = at.start(c10d.all_gather_into_tensor.default, x, ranks, name)
        else:
            made = at.start(c10d.all_reduce.default, x, at.op, name)
        return at.rest(c10d.wait_tensor.default, made)
