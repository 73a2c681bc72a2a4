"""Every layout of a shape on a mesh: what the tests of the planner go through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from shardc.errors import LayoutError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh


def every_layout(
    mesh: Mesh, shape: Sequence[int], majors: Sequence[int] = (), ops: Sequence[str] = ("sum",)
) -> list[Layout]:
    """All layouts of ``shape``: each axis whole, pending one of ``ops``, or on a sub-dim, in every order.

    Args:
        majors: for each dim the size of the first of its two sub-dims; one sub-dim where it is 1 or not given.
    """
    majors = [*majors, *[1] * (len(shape) - len(majors))]
    cuts = [
        ((size,), (major, size // major)) if major > 1 else ((size,),)
        for size, major in zip(shape, majors, strict=True)
    ]
    return list(dict.fromkeys(layout for cut in product(*cuts) for layout in _of_cut(mesh, cut, ops)))


def _of_cut(mesh: Mesh, cut: Sequence[Sequence[int]], ops: Sequence[str]) -> Iterator[Layout]:
    cells = [(dim, at) for dim, sizes in enumerate(cut) for at in range(len(sizes))]
    for where in product([None, *ops, *cells], repeat=len(mesh.axes)):
        home = dict(zip(mesh.axes, where, strict=True))
        pending = {axis: at for axis, at in home.items() if isinstance(at, str)}
        if len(set(pending.values())) > 1:
            continue
        for order in permutations(mesh.axes):
            dims = [
                [(size, tuple(axis for axis in order if home[axis] == (dim, at))) for at, size in enumerate(sizes)]
                for dim, sizes in enumerate(cut)
            ]
            try:
                yield Layout.of_sub_dims(mesh, dims, pending)
            except LayoutError:
                continue  # a sub-dim that the axes do not divide
