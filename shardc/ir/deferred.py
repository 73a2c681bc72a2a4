"""`Deferred`: the parameters whose gradients a backward leaves unreduced (``no_sync``), and the layouts of these
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardc.ir.layout import Layout


@dataclass(frozen=True)
class Deferred:
    """Names of the parameters whose gradients a backward under ``no_sync`` leaves unreduced. Each rank accumulates
    these gradients, and a later call reduces them.

    Args:
        whole: parameters whose gradients are not reduced at all.
        scattered: parameters whose gradients are reduced over the axes that split their storage only.
    """

    whole: frozenset[str] = frozenset()
    scattered: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all deferred parameters: the union of ``whole`` and ``scattered``."""
        return self.whole | self.scattered

    def renamed(self, change: Callable[[str], str | None]) -> Deferred:
        """Return a copy with parameters renamed by ``change``, which returns None for a parameter to leave out."""
        both = ({change(name) for name in names} - {None} for names in (self.whole, self.scattered))
        return Deferred(*(frozenset(str(name) for name in names) for names in both))

    def __bool__(self) -> bool:
        return bool(self.names)

    def layout(self, name: str, stored: Layout, incoming: Layout) -> Layout | None:
        """Return the layout of the gradient of parameter ``name`` as a backward returns it, with the reductions that
        are still pending. None if the parameter is not deferred: its gradient is reduced.

        Args:
            stored: layout of the parameter's storage.
            incoming: layout of the gradient before any reduction.
        """
        incoming = incoming.without_partial(filter(None, [incoming.mesh.time]))
        if name in self.whole:
            return incoming
        return pending_beside(stored, incoming) if name in self.scattered else None


NOTHING = Deferred()


def replicated(storages: Mapping[str, Layout], batch: Sequence[str]) -> dict[str, Layout]:
    """Return those entries of ``storages`` (parameter -> storage layout) in which some batch axis does not split the
    parameter. Its gradient is summed over that axis.
    """
    return {
        name: stored
        for name, stored in storages.items()
        if pending_beside(stored, Layout.whole(stored.mesh, stored.shape).with_partial(batch)).partial
    }


def pending_beside(stored: Layout, incoming: Layout) -> Layout:
    """Return the layout ``stored`` with the pending reductions of ``incoming`` added, except those over axes that split
    ``stored``.

    >>> from shardc.ir.mesh import Mesh
    >>> mesh = Mesh(rep=2, dp=4)
    >>> str(pending_beside(Layout.parse("[8@dp]", mesh), Layout.parse("[8]{sum:rep,sum:dp}", mesh)))
    '[8@dp]{sum:rep}'
    >>> str(pending_beside(Layout.parse("[8@dp:2x2]", mesh), Layout.parse("[8]{sum:dp}", mesh)))
    '[8@dp:2x2]{sum:dp:1x2}'
    """
    mesh = stored.mesh
    edges = mesh.edges((*stored.bound, *(axis for axis, _ in incoming.partial)))
    parts = [(part, op) for axis, op in incoming.partial for part in mesh.parts(axis, edges)]
    return stored.replace(partial=[(p, op) for p, op in parts if not any(mesh.overlap(p, b) for b in stored.bound)])
