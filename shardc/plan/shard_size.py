"""Over which ranks ``fsdp`` entries split each parameter: all of their axes', or some that are neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import NamedTuple

from shardc.errors import PlanError
from shardc.ir.mesh import Mesh
from shardc.plan.entries import Fsdp
from shardc.plan.match import matching, must_match
from shardc.plan.value import Plan


class Split(NamedTuple):
    """The axes (or parts) that split a parameter's storage, and whether an override chose them."""

    axes: tuple[str, ...]
    chosen: bool


def split_over(plan: Plan, mesh: Mesh, name: str, names: Mapping[str, str]) -> dict[Fsdp, Split]:
    """Over what each ``fsdp`` entry splits parameter ``name``.

    Args:
        names: every name of a parameter -> its first.

    Raises:
        PlanError: an override whose glob matches no parameter.
    """
    out = {}
    mine = [other for other, first in names.items() if first == name]
    for entry in plan.entries:
        if isinstance(entry, Fsdp):
            sizes = []
            for glob, size in entry.overrides:
                must_match(glob, names, "parameter", str(entry))
                sizes += [size] if matching(glob, mine) else []
            axes = _minor(mesh, entry.shard, sizes[-1] if sizes else entry.shard_size)
            assert axes is not None, f"{entry} was not checked"
            out[entry] = Split(axes, bool(sizes))
    return out


def check_sizes(entry: Fsdp, mesh: Mesh) -> None:
    """Raises PlanError for a shard size that does not divide the ranks, or two neither of which divides the other."""
    ranks = prod(mesh.size(axis) for axis in entry.shard)
    sizes = sorted(
        {ranks, *((ranks if size == -1 else size) for size in (entry.shard_size, *dict(entry.overrides).values()))}
    )
    for size in sizes:
        if _minor(mesh, entry.shard, size) is None or ranks % size:
            over = " and ".join(f"{axis}={mesh.size(axis)}" for axis in entry.shard)
            divisors = [n for n in range(1, ranks + 1) if ranks % n == 0 and _minor(mesh, entry.shard, n) is not None]
            raise PlanError(
                f"storage cannot be split over {size} of the {ranks} ranks of {over}",
                plan_entry=str(entry),
                fix=f"use one of {divisors}",
            )
    for one, other in pairwise(sizes):
        if other % one:
            raise PlanError(
                f"parameters cannot be split over {one} and over {other} ranks of one axis",
                plan_entry=str(entry),
                fix="use shard sizes of which one divides the other",
            )


def _minor(mesh: Mesh, axes: tuple[str, ...], size: int) -> tuple[str, ...] | None:
    """The axes, and parts of axes, that the minor ``size`` ranks of ``axes`` together differ along; None if none do."""
    if size == -1:
        return axes
    out: list[str] = []
    for axis in reversed(axes):
        have = mesh.size(axis)
        if size == 1:
            break
        if size % have == 0:
            out.append(axis)
            size //= have
        elif have % size == 0:
            out.append(mesh.cut(axis, have // size)[1])
            size = 1
        else:
            return None
    return tuple(reversed(out)) if size == 1 else None
