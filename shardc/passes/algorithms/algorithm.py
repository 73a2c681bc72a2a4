"""What an algorithm for a collective is: what it costs, and the nodes that it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx

from shardc.cost.model import CostModel
from shardc.ir.graph import NameScope, Value, info, set_info, value
from shardc.ir.tally import wire_elements

aten = torch.ops.aten
# The op that reduces along the first dim, its dims, and what else it takes.
_REDUCE: dict[str, Callable[[torch.dtype], tuple[Any, Any, dict[str, Any]]]] = {
    "sum": lambda dtype: (aten.sum.dim_IntList, [0], {"dtype": dtype}),
    "avg": lambda dtype: (aten.mean.dim, [0], {}),
    "max": lambda dtype: (aten.amax.default, [0], {}),
    "min": lambda dtype: (aten.amin.default, [0], {}),
    "product": lambda dtype: (aten.prod.dim_int, 0, {"dtype": dtype}),
}


class Algorithm(ABC):
    """A way to do one kind of collective.

    Attributes:
        kind: "reduce_scatter", "all_gather" or "all_reduce".
    """

    kind: str

    @abstractmethod
    def seconds(self, group: Group, x: Value) -> float:
        """What it takes on ``group`` for a rank's tensor like ``x``; infinite where it cannot be done so."""

    @abstractmethod
    def spell(self, x: fx.Node, at: Spelling) -> fx.Node:
        """The result for ``x``, whose leading dim the ranks divide if it is scattered."""


@dataclass(frozen=True)
class Group:
    """The ranks of a collective, and the algorithms that there are.

    Args:
        name: of the process group.
        ranks: how many they are.
        cost: a measured cost model.
        algorithms: of equally fast ones the first is taken.
    """

    name: str
    ranks: int
    cost: CostModel
    algorithms: tuple[Algorithm, ...]

    def best(self, kind: str, x: Value) -> Algorithm:
        """The fastest algorithm for a tensor like ``x``."""
        return min((each for each in self.algorithms if each.kind == kind), key=lambda each: each.seconds(self, x))

    def native(self, kind: str, x: Value) -> float:
        """Seconds of the backend's own collective of ``kind``."""
        return self.cost.seconds(kind, self.ranks, wire_elements(kind, self.ranks, prod(x.shape)) * x.itemsize)


@dataclass(frozen=True)
class Spelling:
    """Where the nodes of an algorithm go: in front of the collective what starts it, the rest in front of its wait.

    Args:
        node, wait: the collective that is replaced, and the wait for it.
        group: its ranks.
        op: how it reduces, if it does.
        names: the names in the graph.
    """

    node: fx.Node
    wait: fx.Node
    group: Group
    op: str
    names: NameScope

    def start(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node in front of the collective."""
        return self._emit(self.node, target, args, kwargs)

    def rest(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node in front of the wait."""
        return self._emit(self.wait, target, args, kwargs)

    def reduced(self, pieces: fx.Node) -> fx.Node:
        """What the ranks' ``pieces``, one below the other, come to as the collective reduces; in front of the wait."""
        target, dims, kwargs = _REDUCE[self.op](value(pieces).dtype)
        return self.rest(target, pieces, dims, **kwargs)

    def behind(self) -> Spelling:
        """For a second collective, which starts when the first has arrived."""
        return replace(self, node=self.wait)

    def _emit(self, before: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        with before.graph.inserting_before(before):
            made = before.graph.call_function(target, args, kwargs)
        made.meta = dict(before.meta)
        values = partial(fx.map_arg, fn=lambda node: node.meta["val"])
        val = made.meta["val"] = target(*values(args), **values(kwargs))
        name = self.names.fresh(f"{info(before).name}.{target.overloadpacket.__name__}")
        return set_info(made, replace(info(before), name=name, value=Value(val.dtype, tuple(val.shape))))
