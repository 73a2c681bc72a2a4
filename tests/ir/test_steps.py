"""What each data-movement op may change, against what the ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.steps import broken_step


def layouts_of(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    """Every layout of ``shape`` that puts each axis of ``mesh`` on a dim, nowhere, or leaves it pending."""
    out = [Layout.whole(mesh, shape)]
    for places in product(range(-2, len(shape)), repeat=len(mesh.axes)):
        layout: Layout | None = Layout.whole(mesh, shape)
        for axis, place in zip(mesh.axes, places, strict=True):
            if layout is None:
                break
            if place == -2:
                layout = layout.with_partial([axis])
            elif place >= 0:
                layout = layout.split(place, axis)
        if layout is not None and layout not in out:
            out.append(layout)
    return out


def values(layout: Layout, rank: int) -> tuple[tuple[int, ...], ...]:
    """The global indices that ``rank`` holds, dim by dim."""
    return tuple(tuple(layout.local_index(dim, rank)) for dim in range(layout.ndim))


def may_step(op: object, source: Layout, made: Layout, axis: str) -> bool:
    """Whether ``op`` over ``axis`` turns ``source`` into ``made``, by what each rank holds and what is pending."""
    mesh = source.mesh
    groups = [mesh.group([axis], rank) for rank in range(mesh.ranks)]
    union = [{v for r in group for v in product(*values(source, r))} for group in groups]
    held = [set(product(*values(source, rank))) for rank in range(mesh.ranks)]
    after = [set(product(*values(made, rank))) for rank in range(mesh.ranks)]
    union_after = [{v for r in group for v in product(*values(made, r))} for group in groups]
    had, has = set(source.partial), set(made.partial)
    pending = (axis, "sum")
    if op is ops.all_gather:
        return held != union and after == union and had == has
    if op is ops.shard:
        return held == union and after != union_after and union_after == held and had == has
    if op is ops.all_reduce:
        return held == after and had == has | {pending} and pending not in has
    if op is ops.to_partial:
        return held == after and has == had | {pending} and pending not in had
    if op is ops.reduce_scatter:
        return after != union_after and union_after == held and had == has | {pending} and pending not in has
    moved = held != union and after != union_after and union == union_after and had == has
    return moved and held != after


@pytest.mark.parametrize(
    "op", [f for f in (*ops.COLLECTIVES, *ops.LOCAL_MOVES) if f is not ops.permute_ranks], ids=lambda f: f.__name__
)
def test_a_step_is_accepted_exactly_where_it_does_what_it_says(op: Callable[..., object]) -> None:
    mesh = Mesh(dp=2, tp=2)
    layouts = layouts_of(mesh, (4, 4))
    wrong, right = [], 0
    for source, made, axis in product(layouts, layouts, mesh.axes):
        accepted = broken_step(op, source, made, [axis], "sum") is None
        right += accepted
        if accepted != may_step(op, source, made, axis):
            wrong.append(f"{source} -> {made} over {axis}: accepted {accepted}")
    assert wrong == []
    assert right > 0


PARTS = [
    (ops.all_gather, "[8@tp,4]", "[8@tp:1x2,4]", ["tp:2x2"]),
    (ops.all_gather, "[8@tp:1x2,4@tp:2x2]", "[8,4]", ["tp"]),
    (ops.reduce_scatter, "[8,4]{sum:tp}", "[8@tp:1x2,4@tp:2x2]", ["tp"]),
    (ops.shard, "[8,4]", "[8@(dp,tp),4]", ["dp", "tp"]),
    (ops.all_to_all, "[8@tp,4]", "[8@tp:1x2,4@tp:2x2]", ["tp:2x2"]),
    (ops.permute_ranks, "[8@(dp,tp:1x2),4]", "[8@(tp:1x2,dp),4]", ["dp", "tp:1x2"]),
]
WRONG_PARTS = [
    (ops.all_gather, "[8@tp,4]", "[8@tp:2x2,4]", ["tp:2x2"]),
    (ops.all_gather, "[8@tp:1x2,4]", "[8,4]", ["tp"]),
    (ops.reduce_scatter, "[8,4]{sum:tp}", "[8@tp:1x2,4]", ["tp"]),
    (ops.permute_ranks, "[8@tp:1x2,4]", "[8,4@tp:1x2]", ["tp:1x2"]),
    (ops.all_to_all, "[8@tp,4]", "[8@tp,4]", ["tp"]),
]


@pytest.mark.parametrize("expected, cases", [(True, PARTS), (False, WRONG_PARTS)], ids=["right", "wrong"])
def test_steps_over_several_axes_and_parts(expected: bool, cases: list[tuple]) -> None:
    mesh = Mesh(dp=2, tp=4)
    found = {
        (op.__name__, source, made): broken_step(op, Layout.parse(source, mesh), Layout.parse(made, mesh), axes, "sum")
        is None
        for op, source, made, axes in cases
    }
    assert found == {(op.__name__, source, made): expected for op, source, made, _ in cases}
