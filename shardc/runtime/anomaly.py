"""``torch.autograd.detect_anomaly`` for compiled backwards: names the op that first gave NaN, by module and line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc import _compat
from shardc.errors import BackwardError
from shardc.ir import graph as ir
from shardc.ir.comm_volume import collective_kind
from shardc.ir.executable import Half
from shardc.runtime.groups import Groups

_NOWHERE = 1 << 30


def watched(half: Half, inputs: list[Any]) -> tuple[Sequence[Any], int]:
    """Interprets a graph op by op; returns its results, and the index of the first node whose result has NaN."""
    watch = _Watch(half.gm)
    with torch.no_grad():
        return watch.boxed_run(inputs), watch.first


class _Watch(fx.Interpreter):
    first = _NOWHERE

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self._places = {node: at for at, node in enumerate(gm.graph.nodes)}

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; the result of a collective is checked at its wait."""
        result = super().run_node(n)
        looks = n.op == "call_function" and self.first == _NOWHERE and collective_kind(n) is None
        if looks and any(map(has_nan, _compat.pytree.tree_leaves(result))):
            self.first = self._places[n]
        return result


def has_nan(x: Any) -> bool:
    """Whether ``x`` is a tensor with a NaN."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and bool(x.isnan().any())


def check(
    half: Half, results: Sequence[Any], first: int, groups: Groups, unpadded: Callable[[str, Tensor], Tensor]
) -> None:
    """Raises if a gradient of a backward is NaN on any rank; all ranks call it.

    Args:
        first: node index from `watched`.
        unpadded: (name, gradient) -> the gradient without padding.

    Raises:
        BackwardError: the same on all ranks.
    """
    bad = [
        role.name
        for role, x in zip(half.gives, results, strict=True)
        if isinstance(x, Tensor) and has_nan(unpadded(role.name, x) if role.kind == "grad" else x)
    ]
    if not groups.any(bool(bad)):
        return
    place = -groups.most(-first)
    nodes = list(half.gm.graph.nodes)
    if place == _NOWHERE:
        raise BackwardError("a gradient that came into the backward of a compiled module is NaN")
    info = ir.info(nodes[place])
    where = f"module {info.origin.module!r}" if info.origin.module else "the model's own forward"
    raise BackwardError(
        f"%{info.name} is the first result with NaN in a backward, of {where}; gradients are NaN behind it",
        source=info.origin.source or None,
        fix="look at what this line takes: a division by zero, the root or the logarithm of 0, inf - inf; nothing was "
        "added to any .grad",
    )
