"""The mesh: named axes with sizes, and the coordinates of ranks along them.

A mesh here is abstract: it needs no devices and no process group. An axis can be cut into *parts*, which are written
``name:PREFIXxSIZE``: of an axis ``tp`` of size 4, ``"tp:1x2"`` is the major part of size 2 and ``"tp:2x2"`` the minor
one. PREFIX is the product of the sizes of the parts before it. A part may be used like an axis; only the planner and
the propagation create them.

An axis can also be one of time (`Mesh.timed`): its coordinates are the microbatches of a step, which each device runs
one after the other. A reduction over it is an addition in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod

from shardc.errors import MeshError

MICRO = "micro"  # name of the axis of microbatches


@dataclass(frozen=True, init=False)
class Mesh:
    """An abstract mesh of named axes, major to minor. A rank is the row-major index of its coordinates.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.size("tp"), mesh.ranks, mesh.coordinate(5)
    (4, 8, {'dp': 1, 'tp': 1})
    >>> mesh.timed(8), mesh.timed(8).untimed
    (Mesh(dp=2, tp=4, micro=8), Mesh(dp=2, tp=4))

    Attributes:
        time: the axis whose coordinates are microbatches, `MICRO`, which is the last; "" if there is none.
    """

    shape: tuple[tuple[str, int], ...]
    time: str

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]] | None = None, **named: int) -> None:
        entries = axes.items() if isinstance(axes, Mapping) else () if axes is None else axes
        listed = tuple(entries) if isinstance(entries, Iterable) and not isinstance(entries, str) else (entries,)
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in listed):
            raise MeshError(f"{axes!r} are no axes of a mesh", fix="write shardc.Mesh(dp=2, tp=4)")
        pairs = tuple((name, size) for name, size in (*listed, *named.items()))
        for at, (name, size) in enumerate(pairs):
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"mesh axis {name!r} is not an identifier", fix="name axes like dp or tp")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size!r}", fix="give each axis a size of 1 or more")
            if name in dict(pairs[:at]):
                raise MeshError(f"mesh axis {name!r} is there twice", fix="give each axis a name of its own")
        object.__setattr__(self, "shape", pairs)
        object.__setattr__(self, "time", "")

    def timed(self, microbatches: int) -> Mesh:
        """Return this mesh with the axis of microbatches added. The coordinates of that axis are the ``microbatches``
        of a step. For one microbatch, return the mesh itself.
        """
        if microbatches == 1:
            return self
        mesh = Mesh((*self.shape, (MICRO, microbatches)))
        object.__setattr__(mesh, "time", MICRO)
        return mesh

    def of_stage(self, axis: str) -> Mesh:
        """Return the mesh of one pipeline stage: this mesh with ``axis``, the axis of the stages, at size 1."""
        return Mesh((name, 1 if name == axis else size) for name, size in self.shape)

    @property
    def microbatches(self) -> int:
        """Return the size of the axis of microbatches; 1 if there is none."""
        return self._sizes[self.time] if self.time else 1

    @cached_property
    def untimed(self) -> Mesh:
        """Return this mesh without its axis of microbatches."""
        return Mesh(self.shape[:-1]) if self.time else self

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Without the cached hash: that of a string differs from process to process.
        return _remade, (self.untimed.shape, self.microbatches)

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.time))

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Return axis -> its size."""
        return dict(self.shape)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shape)

    @cached_property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return prod(size for _, size in self.shape)

    def __contains__(self, axis: str) -> bool:
        return split_part(axis)[0] in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``, which may be a part."""
        name, _, size = split_part(axis)
        if name not in self._sizes:
            raise MeshError(f"unknown mesh axis {name!r}; the mesh is {self}", fix=f"use one of {list(self.axes)}")
        return self._sizes[name] if size is None else size

    def order(self, axis: str) -> tuple[int, int]:
        """Return a sort key for ``axis``, which may be a part. It sorts axes in mesh order, and the parts of an axis
        major to minor.
        """
        name, pre, _ = split_part(axis)
        return self.axes.index(name), pre

    def cut(self, axis: str, major: int) -> tuple[str, str]:
        """Cut ``axis`` in two: return (major part, minor part). The major part has size ``major``: 2 cuts ``tp=4`` into
        ``tp:1x2`` and ``tp:2x2``.
        """
        name, pre, _ = split_part(axis)
        size = self.size(axis)
        assert size % major == 0, f"{axis} of size {size} cannot be cut by {major}"
        return self.part(name, pre, major), self.part(name, pre * major, size // major)

    def join(self, major: str, minor: str) -> str | None:
        """Return the axis (or part) that consists of ``major`` and ``minor``; None if they are not adjacent parts of
        one axis, in this order.
        """
        (name, pre, _), (other, other_pre, _) = split_part(major), split_part(minor)
        if name != other or pre * self.size(major) != other_pre:
            return None
        return self.part(name, pre, self.size(major) * self.size(minor))

    def part(self, name: str, pre: int, size: int) -> str:
        """Return the name of a part of axis ``name``, such as ``tp:2x2``. It has ``size`` ranks; ``pre`` is the product
        of the sizes of the parts before it. The whole axis is just ``name``.
        """
        return name if size == self._sizes[name] else f"{name}:{pre}x{size}"

    def edges(self, axes: Iterable[str]) -> dict[str, set[int]]:
        """Return axis name -> positions in that axis at which ``axes`` (axes or parts) begin and end. A position is the
        product of the sizes of all parts before it: ``tp:2x2`` of ``tp=4`` begins at 2 and ends at 4.
        """
        out: dict[str, set[int]] = {}
        for axis in axes:
            name, pre, _ = split_part(axis)
            out.setdefault(name, set()).update((pre, pre * self.size(axis)))
        return out

    def parts(self, axis: str, edges: Mapping[str, Iterable[int]]) -> list[str]:
        """Return the parts that result from cutting ``axis`` at ``edges`` (see `edges`), major to minor; an empty list
        for an axis of size 1.
        """
        name, pre, _ = split_part(axis)
        inside = sorted(edge for edge in edges[name] if pre <= edge <= pre * self.size(axis))
        return [self.part(name, low, high // low) for low, high in pairwise(inside)]

    def overlap(self, first: str, second: str) -> bool:
        """Return whether two axes (or parts of axes) share a factor of a mesh axis, as ``tp`` and its part ``tp:2x2``
        do.
        """
        (name, pre, _), (other_name, other_pre, _) = split_part(first), split_part(second)
        if name != other_name:
            return False
        return pre < other_pre * self.size(second) and other_pre < pre * self.size(first)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return axis -> the coordinate of ``rank`` along it."""
        out: dict[str, int] = {}
        for name, size in reversed(self.shape):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name, _ in self.shape}

    def index(self, axis: str, rank: int) -> int:
        """Return the coordinate of ``rank`` along ``axis``, which may be a part."""
        name, pre, _ = split_part(axis)
        full = self._sizes[name]
        return self.coordinate(rank)[name] // (full // (pre * self.size(axis))) % self.size(axis)

    def group(self, axes: Iterable[str], rank: int) -> tuple[int, ...]:
        """Return the group of ``rank`` along ``axes``: the ranks whose other coordinates are the same. The last axis
        varies fastest.
        """
        return next(group for group in groups_of(self, tuple(axes)) if rank in group)

    @staticmethod
    def of(mesh: object) -> Mesh:
        """Return the abstract mesh of a ``Mesh`` or of a ``DeviceMesh`` with named dims."""
        if isinstance(mesh, Mesh):
            return mesh
        names, shape = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "shape", None)
        if shape is None:
            raise MeshError(f"{mesh!r} is not a mesh", fix="pass a DeviceMesh or shardc.Mesh(dp=2, tp=4)")
        if not names:
            raise MeshError(
                "the DeviceMesh has no dim names", fix='pass mesh_dim_names=("dp", "tp") to init_device_mesh'
            )
        return Mesh(zip(names, (int(s) for s in shape), strict=True))

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.shape)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.shape)})"


def _remade(shape: tuple[tuple[str, int], ...], microbatches: int) -> Mesh:
    """Make a mesh from its axes ``shape`` and the number of ``microbatches``. Pickle restores meshes by this
    function.
    """
    return Mesh(shape).timed(microbatches)


@lru_cache(maxsize=1024)
def groups_of(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return all groups of ranks along ``axes``: ranks whose other coordinates are the same. In each group the last
    axis varies fastest.

    >>> groups_of(Mesh(dp=2, tp=2), ("dp",))
    ((0, 2), (1, 3))
    """
    steps = []
    for axis in axes:
        name, pre, _ = split_part(axis)
        steps.append((name, mesh.size(name) // (pre * mesh.size(axis)), mesh.size(axis)))
    groups: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}
    for rank in range(mesh.ranks):
        outside, along = mesh.coordinate(rank), []
        for name, step, size in steps:
            along.append(outside[name] // step % size)
            outside[name] -= along[-1] * step
        groups.setdefault(tuple(outside.values()), []).append((along, rank))
    return tuple(tuple(rank for _, rank in sorted(members)) for members in groups.values())


@lru_cache(maxsize=4096)
def split_part(axis: str) -> tuple[str, int, int | None]:
    """Return (name, prefix, size) of an axis or a part. The prefix is the product of the sizes of the parts before it:
    ("tp", 2, 4) for ``"tp:2x4"``. A whole axis has prefix 1 and size None.
    """
    name, _, part = axis.partition(":")
    if not part:
        return name, 1, None
    pre, _, size = part.partition("x")
    return name, int(pre), int(size)
