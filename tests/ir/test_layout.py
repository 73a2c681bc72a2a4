"""The layout algebra: canonical form, equality by meaning, refinement, text and bad input."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardc.errors import LayoutError, MeshError
from shardc.ir.layout import Digit, Digits, Layout, canonical, refine, strides
from shardc.ir.mesh import Mesh
from tests.layouts import every_layout

MESHES = [Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(a=4, b=2), Mesh(a=2, b=2, c=2), Mesh(a=6, b=4)]


Drawn = tuple[Mesh, list[list[Digit]], dict[str, str]]


def axes_and_parts(mesh: Mesh) -> list[list[str]]:
    """For each axis the ways to use it: whole, or cut in two parts at a divisor."""
    out = []
    for axis in mesh.axes:
        size = mesh.size(axis)
        out.append([axis])
        out[-1] += [part for cut in range(2, size) if size % cut == 0 for part in mesh.cut(axis, cut)]
    return out


@st.composite
def digits_of_dims(draw: st.DrawFn) -> Drawn:
    """A mesh, the digits of up to three dims (not canonical: radix 1, neighbours apart), and pending sums."""
    mesh = draw(st.sampled_from(MESHES))
    used = []
    for choices in axes_and_parts(mesh):
        if draw(st.booleans()):
            used.append(choices[0])
        elif len(choices) > 1 and draw(st.booleans()):
            at = 1 + 2 * draw(st.integers(0, len(choices) // 2 - 1))
            used += choices[at : at + 2]
    used = draw(st.permutations(used))
    dims: list[list[Digit]] = [[] for _ in range(draw(st.integers(1, 3)))]
    partial = {}
    for axis in used:
        home = draw(st.integers(-1, len(dims) - 1))
        if home < 0:
            partial[axis] = "sum"
        else:
            dims[home].append(Digit(mesh.size(axis), axis))
    for digits in dims:
        for radix in draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2)):
            digits.insert(draw(st.integers(0, len(digits))), Digit(radix))
    return mesh, dims, partial


def held(mesh: Mesh, digits: list[Digit] | Digits, rank: int) -> np.ndarray:
    """The indices along one dim that ``rank`` holds, by numpy: the dim viewed as its digits, bound ones picked."""
    index = np.arange(prod(d.radix for d in digits)).reshape([d.radix for d in digits])
    return index[tuple(slice(None) if d.axis is None else mesh.index(d.axis, rank) for d in digits)].ravel()


@given(digits_of_dims())
def test_canonical_form_is_idempotent_and_keeps_the_meaning(drawn: Drawn) -> None:
    mesh, dims, _ = drawn
    for digits in dims:
        once = canonical(mesh, digits)
        assert canonical(mesh, once) == once
        assert all(d.radix != 1 for d in once)
        for rank in range(mesh.ranks):
            assert held(mesh, once, rank).tolist() == held(mesh, digits, rank).tolist()


@given(digits_of_dims())
def test_a_rank_holds_what_numpy_picks(drawn: Drawn) -> None:
    mesh, dims, partial = drawn
    layout = Layout(mesh, dims, partial)
    assert layout.shape == tuple(prod(d.radix for d in digits) for digits in dims)
    for rank in range(mesh.ranks):
        picked = [held(mesh, digits, rank).tolist() for digits in dims]
        assert [layout.local_index(dim, rank) for dim in range(len(dims))] == picked
        assert layout.local_shape == tuple(map(len, picked))
    assert prod(layout.local_shape) == layout.local_numel == layout.numel // layout.shards


@given(digits_of_dims())
def test_print_and_parse_round_trip(drawn: Drawn) -> None:
    mesh, dims, partial = drawn
    layout = Layout(mesh, dims, partial)
    assert Layout.parse(str(layout), mesh) == layout


@given(digits_of_dims(), st.integers(0, 2), st.integers(1, 12))
def test_refining_keeps_the_meaning_and_cuts_where_asked(drawn: Drawn, dim: int, cut: int) -> None:
    mesh, dims, _ = drawn
    digits = canonical(mesh, dims[dim % len(dims)])
    fine = refine(mesh, digits, [cut])
    size = prod(d.radix for d in digits)
    edges = sorted({1, size, *strides(digits), *([cut] if cut < size else [])})
    fits = all(upper % lower == 0 for lower, upper in zip(edges, edges[1:], strict=False))
    assert (fine is not None) == fits
    if fine is not None:
        assert canonical(mesh, fine) == digits
        assert set(strides(fine)) == set(strides(digits)) | ({cut} if cut < size else set())


@pytest.mark.parametrize("mesh", [Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(a=2, b=2, c=2)], ids=str)
def test_layouts_are_equal_exactly_when_they_mean_the_same(mesh: Mesh) -> None:
    meaning = {}
    for layout in every_layout(mesh, (36, 12), (6, 2)):
        shards = tuple(tuple(tuple(layout.local_index(d, r)) for d in range(2)) for r in range(mesh.ranks))
        assert meaning.setdefault((shards, layout.partial), layout) == layout


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("[16@dp,32@(tp,dp)]", None),
        ("[16,32@(tp,dp)]", (16, 4)),
        ("[(8@dp 128@tp),512]", (128, 512)),
        ("[512,(3 512@tp)]", (512, 384)),
        ("[16@dp,8]{sum:tp}", (8, 8)),
        ("[16@tp:1x2,8@tp:2x2]", (8, 4)),
        ("[]", ()),
        ("[]{avg:dp}", ()),
        ("[0,4@tp]", (0, 1)),
    ],
)
def test_local_shapes(text: str, local: tuple[int, ...] | None) -> None:
    mesh = Mesh(dp=2, tp=4)
    if local is None:
        with pytest.raises(LayoutError, match="uses axis 'dp' twice"):
            Layout.parse(text, mesh)
    else:
        layout = Layout.parse(text, mesh)
        assert layout.local_shape == local
        assert str(layout) == text


@pytest.mark.parametrize(
    ("text", "error", "names"),
    [
        ("[16@dp,32@dp]", LayoutError, "axis 'dp' twice"),
        ("[16@tp]{sum:tp}", LayoutError, "axis 'tp' twice"),
        ("[16@tp:1x2,16@tp]", LayoutError, "axis 'tp:1x2' twice"),
        ("[16@cp]", MeshError, "unknown mesh axis 'cp'"),
        ("[6@tp]", LayoutError, r"dim 0: 6 elements do not divide over \('tp',\) \(4 shards\)"),
        ("[16]{mean:dp}", LayoutError, "unknown reduce op 'mean' on axis 'dp'"),
        ("[16]{sum:dp,max:tp}", LayoutError, r"sum over 'dp' and the max over 'tp'.*do not commute"),
        ("16@dp", LayoutError, "'16@dp' is not a layout"),
    ],
)
def test_bad_layouts_name_what_is_wrong(text: str, error: type[Exception], names: str) -> None:
    with pytest.raises(error, match=names):
        Layout.parse(text, Mesh(dp=2, tp=4))
