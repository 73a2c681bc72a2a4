"""Layouts: how a global tensor is split over a mesh (`Layout`), and which positions of a dim are padding (`Run`).

A tensor dim is an ordered product of *digits*, major to minor: the dim's global index written in
mixed radix. A digit is bound to one mesh axis (its radix is then the axis's size) or local. A
*sub-dim* groups digits for printing: bound digits, then the local digit below them.

    f32[16, 32@(tp,dp)]             dim 1 split over tp first, then dp
    f32[(8@dp 128@tp), 512]         the [8, 128, 512] activation viewed as [1024, 512]
    f32[512, (3 512@tp)]            split over tp inside each of three blocks
    f32[16@dp, 8]{sum:tp}           a pending sum over tp

Canonical: no digit of radix 1, no two local digits side by side, no two parts of one axis side by
side that join. Two layouts of one tensor are equal exactly when they mean the same.

Uneven dims are padded. A dim is then an ordered product of *runs*, major to minor. A run has ``size`` positions, the
first ``true`` of which hold elements. A view may merge a padded dim with others, so a padded run can be anywhere among
the runs of a dim: a sequence of 7 in 8 positions, merged under a batch of 2, is ``(2 8/7)``, 16 positions of which the
8th and 16th are padding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, pairwise
from math import prod
from typing import NamedTuple

from shardc.errors import LayoutError
from shardc.ir.mesh import Mesh

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Digit(NamedTuple):
    """A factor of a dim's size (a mixed-radix digit of its index), with ``radix`` values. The mesh axis ``axis`` splits
    it, or it is local (None).
    """

    radix: int
    axis: str | None = None


Digits = tuple[Digit, ...]


class SubDim(NamedTuple):
    """A factor of a dim for printing: ``size`` elements over all ranks, split over ``axes``, major to minor."""

    size: int
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, init=False)
class Layout:
    """Layout of a global tensor on ``mesh``: which axes split each dim, and which reductions are pending.

    Args:
        mesh: the mesh; every axis of the layout is on it.
        dims: the digits of each tensor dim, major to minor; stored in canonical form.
        partial: axis -> reduce op of each pending reduction.

    Raises:
        LayoutError: an axis used twice, a radix that is not its axis's size, an unknown reduce op.
    """

    mesh: Mesh
    dims: tuple[Digits, ...]
    partial: tuple[tuple[str, str], ...]

    def __init__(
        self,
        mesh: Mesh,
        dims: Iterable[Iterable[Digit | tuple[int, str | None]]],
        partial: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    ) -> None:
        pairs = tuple(partial.items()) if isinstance(partial, Mapping) else tuple(partial)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "dims", tuple(canonical(mesh, digits) for digits in dims))
        object.__setattr__(self, "partial", canonical_partial(mesh, pairs))
        self._check()

    def _check(self) -> None:
        """Raise LayoutError if an axis is used twice, a radix is not its axis's size, or pending reductions are
        invalid.
        """
        for axis, op in self.partial:
            if op not in REDUCE_OPS:
                raise LayoutError(
                    f"unknown reduce op {op!r} on axis {axis!r} in {self}", fix=f"use one of {REDUCE_OPS}"
                )
        for (axis, op), (other_axis, other_op) in pairwise(self.partial):
            if op != other_op and {op, other_op} != {"sum", "avg"}:
                raise LayoutError(
                    f"in {self} the {op} over {axis!r} and the {other_op} over {other_axis!r} are both pending,"
                    " and do not commute",
                    fix="reduce over one of the axes first",
                )
        for digits in self.dims:
            for radix, bound in digits:
                if bound is not None and radix != self.mesh.size(bound):
                    size = self.mesh.size(bound)
                    raise LayoutError(f"axis {bound!r} of size {size} bound to a digit of radix {radix}")
        for axis_a, axis_b in combinations(self.axes, 2):
            if self.mesh.overlap(axis_a, axis_b):
                raise LayoutError(
                    f"layout {self} uses axis {axis_a!r} twice", fix="split or reduce over each axis once"
                )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Without the cached hash: that of a string differs from process to process.
        return Layout, (self.mesh, self.dims, self.partial)

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.partial))

    # --- properties

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the global shape."""
        return tuple(prod(d.radix for d in digits) for digits in self.dims)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of each rank's shard."""
        return tuple(prod(d.radix for d in digits if d.axis is None) for digits in self.dims)

    @cached_property
    def bound(self) -> tuple[str, ...]:
        """Return the mesh axes (or parts of axes) that split some dim: those of dim 0 first, then those of dim 1, and
        so on.
        """
        return tuple(d.axis for digits in self.dims for d in digits if d.axis is not None)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Return all axes of the layout: first those that split a dim, then those of pending reductions."""
        return self.bound + tuple(axis for axis, _ in self.partial)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @cached_property
    def shards(self) -> int:
        """Return the number of distinct shards."""
        return prod(self.mesh.size(axis) for axis in self.bound)

    @cached_property
    def local_numel(self) -> int:
        return prod(self.local_shape)

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    def dim_of(self, axis: str) -> int | None:
        """Return the dim that ``axis`` splits; None if it splits no dim."""
        return next((dim for dim, digits in enumerate(self.dims) if any(d.axis == axis for d in digits)), None)

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """Return the axes that split ``dim``, major to minor."""
        return tuple(d.axis for d in self.dims[dim] if d.axis is not None)

    def sub_dims(self, dim: int) -> tuple[SubDim, ...]:
        """Return the sub-dims of ``dim`` (its factors as they print, such as ``3`` and ``512@tp``), major to minor.

        Each consists of adjacent digits that axes split, and of the local digit below them.
        """
        out: list[SubDim] = []
        size, axes = 1, []
        for radix, axis in self.dims[dim]:
            size *= radix
            if axis is not None:
                axes.append(axis)
                continue
            out.append(SubDim(size, tuple(axes)))
            size, axes = 1, []
        if axes or not out:
            out.append(SubDim(size, tuple(axes)))
        return tuple(out)

    # --- layouts derived from others

    @classmethod
    def whole(cls, mesh: Mesh, shape: Sequence[int]) -> Layout:
        """Return the replicated layout of a tensor of ``shape``."""
        return cls(mesh, [[Digit(size)] for size in shape])

    @classmethod
    def of_sub_dims(
        cls, mesh: Mesh, dims: Iterable[Iterable[tuple[int, tuple[str, ...]]]], partial: Mapping[str, str] | None = None
    ) -> Layout:
        """Return the layout whose dims consist of the sub-dims ``(size, axes)``. LayoutError if a size is not divisible
        by the number of ranks along its axes.
        """
        out = []
        for dim, subs in enumerate(dims):
            digits: list[Digit] = []
            for size, axes in subs:
                split = prod(mesh.size(axis) for axis in axes)
                if size % split:
                    raise LayoutError(f"dim {dim}: {size} elements do not divide over {axes} ({split} shards)")
                digits += [Digit(mesh.size(axis), axis) for axis in axes]
                digits.append(Digit(size // split))
            out.append(digits)
        return cls(mesh, out, partial or {})

    def replace(
        self, dims: Iterable[Iterable[Digit]] | None = None, partial: Iterable[tuple[str, str]] | None = None
    ) -> Layout:
        """Return a copy of this layout with other ``dims`` (digits of each dim), or another ``partial`` (axis, reduce
        op of each pending reduction), or both.
        """
        return Layout(self.mesh, self.dims if dims is None else dims, self.partial if partial is None else partial)

    def unbind(self, axes: Iterable[str]) -> Layout:
        """Return this layout without the mesh axes ``axes`` in its dims: the digits that they split are local in it."""
        drop = set(axes).intersection(self.bound)
        if not drop:
            return self
        return self.replace(dims=[[Digit(d.radix) if d.axis in drop else d for d in digits] for digits in self.dims])

    def without_partial(self, axes: Iterable[str] | None = None) -> Layout:
        """Return this layout without the pending reductions over ``axes`` (by default all of them)."""
        if not self.partial:
            return self
        drop = {a for a, _ in self.partial} if axes is None else set(axes)
        return self.replace(partial=[(a, op) for a, op in self.partial if a not in drop])

    def with_partial(self, axes: Iterable[str], op: str = "sum") -> Layout:
        """Return this layout with pending reductions ``op`` over ``axes`` added."""
        return self.replace(partial=[*self.partial, *((axis, op) for axis in axes)])

    def on(self, mesh: Mesh) -> Layout:
        """Return the same layout on another ``mesh``, which must have all axes of the layout."""
        return Layout(mesh, self.dims, self.partial)

    @property
    def untimed(self) -> Layout:
        """Return this layout without the axis of microbatches. It is then on the mesh of devices, and its tensor has
        the rows of all microbatches.
        """
        if not (time := self.mesh.time):
            return self
        return self.unbind([time]).without_partial([time]).on(self.mesh.untimed)

    def split(self, dim: int, axis: str) -> Layout | None:
        """Return this layout with ``dim`` split over ``axis`` too, at the first local digit whose radix is divisible by
        the size of the axis. None if there is no such digit.
        """
        size = self.mesh.size(axis)
        if size == 1:
            return self
        for at, (radix, bound) in enumerate(self.dims[dim]):
            if bound is None and radix and radix % size == 0:
                digits = [*self.dims[dim][:at], Digit(size, axis), Digit(radix // size), *self.dims[dim][at + 1 :]]
                return self.replace(dims=[*self.dims[:dim], digits, *self.dims[dim + 1 :]])
        return None

    # --- which elements a rank holds

    def local_index(self, dim: int, rank: int) -> list[int]:
        """Return the global indices along ``dim`` of the elements that ``rank`` holds, in local order."""
        index = [0]
        for radix, axis in self.dims[dim]:
            values = range(radix) if axis is None else (self.mesh.index(axis, rank),)
            index = [i * radix + v for i in index for v in values]
        return index

    # --- text

    def dims_text(self) -> str:
        """Return the dims as text, as in ``str`` without the brackets: ``16@dp,(3 512@tp)``."""
        return ",".join(self._dim_text(dim) for dim in range(self.ndim))

    def _dim_text(self, dim: int) -> str:
        """Return ``dim`` as text, such as ``(3 512@tp)``."""
        parts = []
        for size, axes in self.sub_dims(dim):
            at = "" if not axes else f"@{axes[0]}" if len(axes) == 1 else f"@({','.join(axes)})"
            parts.append(f"{size}{at}")
        return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"

    def partial_text(self) -> str:
        """Return the pending reductions as text, as in ``str``: ``{sum:tp}``, or "" for none."""
        if not self.partial:
            return ""
        return "{" + ",".join(f"{op}:{axis}" for axis, op in self.partial) + "}"

    def __str__(self) -> str:
        return f"[{self.dims_text()}]{self.partial_text()}"

    def __repr__(self) -> str:
        return f"Layout({self.mesh}: {self})"

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Layout:
        """Return the layout whose text (by ``str``) is ``text``, such as ``[16@dp,(3 512@tp)]{sum:cp}``.

        Raises:
            LayoutError: the text is not a layout on ``mesh``.
        """
        match = re.fullmatch(r"\s*\[(.*)\]\s*(?:\{(.*)\})?\s*", text)
        if not match:
            raise LayoutError(f"{text!r} is not a layout", fix="write it as [16@dp,32@(tp,dp)]{sum:tp}")
        dims = [] if not match[1].strip() else [parse_dim(part) for part in split_top(match[1])]
        partial = {}
        for item in (match[2] or "").split(","):
            if item.strip():
                op, _, axis = item.strip().partition(":")
                partial[axis] = op
        return cls.of_sub_dims(mesh, [[(int(size), axes) for size, axes in subs] for subs in dims], partial)


def canonical(mesh: Mesh, digits: Iterable[Digit | tuple[int, str | None]]) -> Digits:
    """Return the ``digits`` of a dim in canonical form: none has radix 1; adjacent local digits are merged, and
    adjacent parts of one axis too.
    """
    out: list[Digit] = []
    for radix, axis in digits:
        if radix == 1:
            continue
        if out and axis is None and out[-1].axis is None:
            out[-1] = Digit(out[-1].radix * radix)
            continue
        if out and axis is not None and out[-1].axis is not None:
            joined = mesh.join(out[-1].axis, axis)
            if joined is not None:
                out[-1] = Digit(out[-1].radix * radix, joined)
                continue
        out.append(Digit(radix, axis))
    return tuple(out)


def canonical_partial(mesh: Mesh, pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return pending reductions, pairs of (axis, reduce op), in canonical form: in mesh order, without axes of size 1,
    and with adjacent parts of one axis merged.
    """
    out: list[tuple[str, str]] = []
    split = [(axis, op) for axis, op in pairs if mesh.size(axis) > 1]
    for axis, op in sorted(split, key=lambda pair: mesh.order(pair[0])):
        joined = mesh.join(out[-1][0], axis) if out and out[-1][1] == op else None
        if joined is None:
            out.append((axis, op))
        else:
            out[-1] = joined, op
    return tuple(out)


def refine(mesh: Mesh, digits: Digits, cuts: Sequence[int]) -> Digits | None:
    """Return the ``digits`` of a dim, cut into finer digits, with a boundary between two digits at each stride in
    ``cuts``.

    Args:
        cuts: strides, i.e. numbers of elements below a boundary.

    Returns:
        The finer digits (a bound digit is cut into parts of its axis), or None if a cut does not divide a radix.
    """
    out: list[Digit] = []
    stride = prod(d.radix for d in digits)
    for radix, axis in digits:
        below = stride // radix if radix else 0
        inner = sorted({c for c in cuts if below < c < stride}, reverse=True)
        edges = [stride, *inner, below]
        if any(lower == 0 or upper % lower for upper, lower in pairwise(edges)):
            return None
        for upper, lower in pairwise(edges):
            step = upper // lower
            if axis is None:
                out.append(Digit(step))
            elif lower == below:
                out.append(Digit(step, axis))
            else:
                major, axis = mesh.cut(axis, step)
                out.append(Digit(step, major))
        stride = below
    return tuple(out)


def cut_digits(mesh: Mesh, digits: Digits, parts: Callable[[str], Iterable[str]]) -> Digits:
    """Return the ``digits`` of a dim with each digit that an axis splits cut into several: one for each part of the
    axis.

    ``parts(axis)`` gives these parts, which are axes of ``mesh``.
    """
    cuts = ([digit] if digit.axis is None else [Digit(mesh.size(p), p) for p in parts(digit.axis)] for digit in digits)
    return tuple(chain.from_iterable(cuts))


def strides(digits: Digits) -> tuple[int, ...]:
    """Return the stride of each digit of a dim: the product of the radices below it."""
    out, below = [], 1
    for radix, _ in reversed(digits):
        out.append(below)
        below *= radix
    return tuple(reversed(out))


def split_top(text: str, separator: str = ",") -> list[str]:
    """Return ``text`` split at each ``separator`` outside parentheses and brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == separator and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return parts


def parse_dim(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Parse the text of one dim, such as ``(3 512@tp)``, ``32@(tp,dp)`` or ``@dp``. Return its sub-dims as (size text,
    axes).
    """
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        return [sub for part in split_top(re.sub(r"\s+", " ", text[1:-1]).strip(), " ") for sub in parse_dim(part)]
    size, _, at = text.partition("@")
    at = at.strip().strip("()")
    axes = tuple(axis.strip() for axis in at.split(",")) if at else ()
    return [(size.strip() or "_", axes)]


class Run(NamedTuple):
    """A factor of a padded dim with ``size`` positions, which ``axes`` split. The first ``true`` positions hold
    elements, the others padding.
    """

    size: int
    true: int
    axes: tuple[str, ...] = ()

    @property
    def padded(self) -> bool:
        """Return whether the run has padding: positions that hold no element."""
        return self.size != self.true


Runs = tuple[Run, ...]
Padding = tuple[Runs, ...]  # the runs of each dim


def unpadded(shape: Sequence[int]) -> Padding:
    """Return the `Padding` (the runs of each dim) of a tensor of ``shape`` without padding: a single run for each
    dim.
    """
    return tuple((Run(size, size),) for size in shape)


def is_padded(runs: Runs) -> bool:
    """Return whether a dim of these ``runs`` has padding."""
    return any(run.padded for run in runs)


def padded_size(runs: Runs) -> int:
    """Return the size of a dim with its padding: the product of the sizes of its ``runs``."""
    return prod(run.size for run in runs)


def true_size(runs: Runs) -> int:
    """Return the size of a dim without its padding: the product of the true sizes of its ``runs``."""
    return prod(run.true for run in runs)


def axes_of(padding: Padding) -> tuple[str, ...]:
    """Return the mesh axes that split a run with padding, in any dim. ``padding`` has the runs of each dim."""
    return tuple(dict.fromkeys(axis for runs in padding for run in runs if run.padded for axis in run.axes))


def canonical_runs(runs: Sequence[Run]) -> Runs:
    """Return the ``runs`` (factors of one padded dim, major to minor) in canonical form: each run without padding is
    merged into the run before it, whose padding stays at its end.

    >>> canonical_runs([Run(3, 3), Run(6, 5), Run(2, 2), Run(4, 4)])
    (Run(size=3, true=3, axes=()), Run(size=48, true=40, axes=()))
    """
    out: list[Run] = []
    for run in runs:
        if out and not run.padded:
            out[-1] = Run(out[-1].size * run.size, out[-1].true * run.true, out[-1].axes)
        elif run.size != 1:
            out.append(run)
    return tuple(out) or (Run(1, 1),)


def share_out(runs: Runs, sizes: Sequence[int]) -> list[Runs] | None:
    """Split the ``runs`` of a dim among the factors of which the dim is the product, as a reshape would. ``sizes`` are
    the factors' sizes without padding, major to minor. Return the runs of each factor.

    Returns None if a run cannot be cut between two factors so that all padding stays in the major one, or the sizes do
    not fit.

    >>> share_out((Run(12, 10),), [5, 2])
    [(Run(size=6, true=5, axes=()),), (Run(size=2, true=2, axes=()),)]
    """
    out, left = [], [run for run in runs if run != Run(1, 1)]
    for size in sizes:
        factors: list[Run] = []
        while size > 1:
            if not left:
                return None
            run = left.pop(0)
            if size % run.true == 0:
                factors.append(run)
                size //= run.true
                continue
            below = run.true // size
            if run.true % size or run.size % below:
                return None
            factors.append(Run(run.size // below, size, run.axes))
            left.insert(0, Run(below, below))
            size = 1
        out.append(canonical_runs(factors))
    return None if left else out
