"""The order of collectives on each process group, as text that ranks compare before their first step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from shardc.ir import graph as ir
from shardc.ir.graph import DTYPE_NAMES
from shardc.ir.mesh import Mesh
from shardc.ir.tally import arguments_of, collective_kind, group_axes


@dataclass(frozen=True)
class Certificate:
    """The collectives that every rank starts, in order.

    One graph serves all ranks, so ranks that have this text start the same collectives on every group, in an
    order that is the same for all groups: no two ranks can wait for each other in a circle.

    Args:
        mesh: whose groups they are on.
        lines: one collective each: which half, kind, axes, dtypes and local shapes, and what it stands for.
    """

    mesh: Mesh
    lines: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A hash of the text."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def text(self) -> str:
        return "\n".join([f"mesh {self.mesh}", *self.lines])


def outputs_text(used: Iterable[int]) -> str:
    """The outputs that a backward is of.

    >>> outputs_text([2, 0])
    'outputs 0, 2'
    """
    return f"outputs {', '.join(map(str, sorted(used)))}"


def certify(mesh: Mesh, halves: Sequence[tuple[str, fx.Graph]]) -> Certificate:
    """The certificate of a program's local graphs, given by name in the order in which they run."""
    lines = []
    for name, graph in halves:
        for node in graph.nodes:
            kind = collective_kind(node)
            if kind is None:
                continue
            axes = group_axes(str(arguments_of(node)["group_name"]), mesh) or ()
            record = ir.info(node)
            shapes = ", ".join(
                f"{DTYPE_NAMES.get(v.dtype, v.dtype)}[{','.join(map(str, v.shape))}]" for v in record.tensors
            )
            lines.append(f"{name}: {kind}({','.join(axes)}) {shapes} %{record.name}")
    return Certificate(mesh, tuple(lines))
