"""`Certificate`: the collectives of a step as text. Ranks compare it, to agree that they start the same collectives in
the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem

from torch import fx

from shardc.ir import graph as ir
from shardc.ir.comm import WAIT, waits_of
from shardc.ir.comm_volume import arguments_of, collective_kind, group_axes
from shardc.ir.graph import DTYPE_NAMES
from shardc.ir.mesh import Mesh


@dataclass(frozen=True)
class Certificate:
    """Text of the collectives that every rank starts, in order, with the op before which each is waited for.

    One graph serves all ranks. So ranks with the same certificate start the same collectives on every group in the same
    order, and cannot deadlock.

    Args:
        mesh: mesh of the collectives' groups.
        lines: one per collective: half, kind, axes, dtypes, local shapes, name, and the ops before which it is waited
            for.
    """

    mesh: Mesh
    lines: tuple[str, ...]

    def text(self) -> str:
        """Return the certificate as text: the mesh, then one line per collective."""
        return "\n".join([f"mesh {self.mesh}", *self.lines])


def certify(mesh: Mesh, halves: Sequence[tuple[str, fx.Graph]]) -> Certificate:
    """Return the certificate (all collectives, in order) of local graphs, given as (name, graph) in the order in which
    they run.
    """
    lines = []
    for name, graph in halves:
        next_op = _next_ops(graph)
        for node in graph.nodes:
            kind = collective_kind(node)
            if kind is None:
                continue
            axes = group_axes(str(arguments_of(node)["group_name"]), mesh) or ()
            record = ir.info(node)
            shapes = ", ".join(
                f"{DTYPE_NAMES.get(v.dtype, v.dtype)}[{','.join(map(str, v.shape))}]" for v in record.tensors
            )
            until = ", ".join(dict.fromkeys(op for _, op in sorted(next_op[wait] for wait in waits_of(node))))
            lines.append(f"{name}: {kind}({','.join(axes)}) {shapes} %{record.name}, waited for in front of {until}")
    return Certificate(mesh, tuple(lines))


def _next_ops(graph: fx.Graph) -> dict[fx.Node, tuple[int, str]]:
    """Return wait node of a collective -> (sort key, text of the next op after the wait). The sort keys put waits in
    the graph's order; waits and getitems do not count as next ops.
    """
    out: dict[fx.Node, tuple[int, str]] = {}
    next_op = "the outputs"
    for node in reversed(graph.nodes):
        if node.target is WAIT:
            out[node] = -len(out), next_op
        elif node.op == "call_function" and node.target is not getitem:
            next_op = f"%{ir.info(node).name}"
    return out
