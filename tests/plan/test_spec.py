"""Every form of a spec as a layout, and every error with its whole text."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardc.errors import LayoutError, PlanError, ShardcWarning
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.plan.layout_spec import freeze, is_one, show, to_layout

MESH = Mesh(dp=2, tp=4, one=1)


def apply(spec: Any, shape: tuple[int, ...] = (16, 8), **options: Any) -> str:
    return str(to_layout(spec, MESH, shape, what="parameter 'w'", entry="e", **options))


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (("dp", None), "[16@dp,8]"),
        (["dp", "None"], "[16@dp,8]"),
        ((("tp", "dp"), None), "[16@(tp,dp),8]"),
        ((("None", "tp"), ()), "[16@tp,8]"),
        ((None, "one"), "[16,8]"),
        ((Shard(0), Replicate(), Replicate()), "[16@dp,8]"),
        ((Shard(0), Shard(0), Shard(1)), "[16@(dp,tp),8]"),
        ([Shard(-1), Partial(), Replicate()], "[16,8@dp]{sum:tp}"),
        ((Partial("max"), Replicate(), Replicate()), "[16,8]{max:dp}"),
        ("16@dp, 8", "[16@dp,8]"),
        ("[16@dp, 8]", "[16@dp,8]"),
        ("@dp, _", "[16@dp,8]"),
        ("@(tp,dp), _", "[16@(tp,dp),8]"),
        ("(2 _@tp), _", "[(2 8@tp),8]"),
        ("(4@dp 4@tp), _", "[(4@dp 4@tp),8]"),
        ("..., _@tp", "[16,8@tp]"),
        ("...", "[16,8]"),
        ("_, _{sum:tp}", "[16,8]{sum:tp}"),
        ("_@dp, _{sum:tp, max:one}", "[16@dp,8]{sum:tp}"),
        ((_StridedShard(0, split_factor=2), Replicate(), Replicate()), "[(2 8@dp),8]"),
        (Layout.parse("[16@dp,8]", MESH), "[16@dp,8]"),
    ],
)
def test_forms(spec: Any, layout: str) -> None:
    assert apply(spec) == layout


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        ("~, _@tp, _", "[8@dp,16@tp,32]"),
        ("~, ~, ~", "[8@dp,16,32@tp]"),
        ("~, ~, _", "[8@dp,16,32]"),
        ("~..., _", "[8@dp,16,32]"),
        ("..., ~", "[8,16,32@tp]"),
        ("~, _@dp, ~", "[8,16@dp,32@tp]"),
        ({"tp": Shard(1)}, "[8@dp,16@tp,32]"),
        ({"tp": Shard(-3)}, "[8@(dp,tp),16,32]"),
        ({"tp": Replicate()}, "[8@dp,16,32]"),
        ({"dp": Shard(2), "tp": Shard(1)}, "[8,16@tp,32@dp]"),
        ({"tp": _StridedShard(1, split_factor=2)}, "[8@dp,(2 8@tp),32]"),
        ({"tp": Partial()}, "[8@dp,16,32]{sum:tp}"),
    ],
)
def test_dims_are_left_as_the_base_has_them(spec: str, layout: str) -> None:
    base = Layout.parse("[8@dp,16,32@tp]{sum:one}", MESH)
    assert apply(spec, (8, 16, 32), base=base) == layout


def test_without_a_base_dims_are_left_whole() -> None:
    assert apply("~, _@tp") == "[16,8@tp]"


def test_a_scalar() -> None:
    assert apply((), ()) == apply("...", ()) == apply("[]", ()) == "[]"


ERRORS: list[tuple[Any, tuple[int, ...], type[Exception], str]] = [
    (
        ("tpp", None),
        (16, 8),
        PlanError,
        "unknown mesh axis 'tpp'; the mesh is dp=2 tp=4 one=1\n  plan entry: e\n  fix: did you mean 'tp'?",
    ),
    (
        "_@model, _",
        (16, 8),
        PlanError,
        "unknown mesh axis 'model'; the mesh is dp=2 tp=4 one=1\n  plan entry: e\n"
        "  fix: use one of ['dp', 'tp', 'one']",
    ),
    (
        ("one", "one"),
        (16, 8),
        PlanError,
        'spec ("one", "one") uses axis \'one\' twice\n  plan entry: e\n'
        "  fix: split or reduce over each axis once; give the specs of several tensors as a list",
    ),
    (
        "_@dp, _{sum:dp}",
        (16, 8),
        PlanError,
        "spec \"_@dp, _{sum:dp}\" uses axis 'dp' twice\n  plan entry: e\n"
        "  fix: split or reduce over each axis once; give the specs of several tensors as a list",
    ),
    (
        ("dp", None, None),
        (16, 8),
        PlanError,
        "spec (\"dp\", None, None) has 3 dims, parameter 'w' of shape (16, 8) has 2\n  plan entry: e\n"
        "  fix: give one item for each dim of the tensor",
    ),
    (
        "..., _@dp, _, _",
        (16, 8),
        PlanError,
        "spec \"..., _@dp, _, _\" has 3 dims, parameter 'w' of shape (16, 8) has 2\n  plan entry: e\n"
        "  fix: give one item for each dim of the tensor",
    ),
    (
        (Shard(0),),
        (16, 8),
        PlanError,
        "(Shard(0),) has 1 placements, the mesh dp=2 tp=4 one=1 has 3 axes\n  plan entry: e\n"
        "  fix: give one placement for each mesh axis",
    ),
    (
        (Shard(2), Replicate(), Replicate()),
        (16, 8),
        PlanError,
        "(Shard(2), Replicate(), Replicate()) shards dim 2, parameter 'w' of shape (16, 8) has 2 dims\n"
        "  plan entry: e\n  fix: shard a dim that the tensor has",
    ),
    (
        (_StridedShard(2, split_factor=2), Replicate(), Replicate()),
        (16, 8),
        PlanError,
        "(_StridedShard(2, split_factor=2), Replicate(), Replicate()) shards dim 2, parameter 'w' of shape (16, 8) has "
        "2 dims\n  plan entry: e\n  fix: shard a dim that the tensor has",
    ),
    (
        (_StridedShard(0, split_factor=3), Replicate(), Replicate()),
        (16, 8),
        LayoutError,
        "parameter 'w' of shape (16, 8): _S(0, 3) on dp cannot split a tensor of shape (16, 8): 16 local elements, 3 "
        "pieces of 2\n  plan entry: e\n  fix: shapes must divide; uneven tensors are padded in storage",
    ),
    (
        {"tpp": Shard(0)},
        (16, 8),
        PlanError,
        "unknown mesh axis 'tpp'; the mesh is dp=2 tp=4 one=1\n  plan entry: e\n  fix: did you mean 'tp'?",
    ),
    (
        {"tp": Shard(2)},
        (16, 8),
        PlanError,
        "{\"tp\": Shard(2)} shards dim 2, parameter 'w' of shape (16, 8) has 2 dims\n"
        "  plan entry: e\n  fix: shard a dim that the tensor has",
    ),
    (
        {"tp": _StridedShard(0, split_factor=3)},
        (16, 8),
        LayoutError,
        "dim 0 of parameter 'w' of shape (16, 8): 16 elements do not divide over axis 'tp' of size 4 inside each of 3 "
        "pieces\n  plan entry: e\n  fix: make the size a multiple of 12, or leave tp off",
    ),
    (
        "32@dp, 8",
        (16, 8),
        PlanError,
        "spec \"32@dp, 8\" gives dim 0 32 elements, parameter 'w' of shape (16, 8) has 16\n  plan entry: e\n"
        "  fix: write _ for whatever size is left",
    ),
    (
        "(3 _@tp), _",
        (16, 8),
        PlanError,
        "spec \"(3 _@tp), _\" gives dim 0 3 elements, parameter 'w' of shape (16, 8) has 16\n  plan entry: e\n"
        "  fix: write _ for whatever size is left",
    ),
    (
        ("tp", None),
        (6, 8),
        LayoutError,
        "dim 0 of parameter 'w' of shape (6, 8): 6 elements do not divide over axis 'tp' of size 4\n  plan entry: e\n"
        "  fix: make the size a multiple of 4, or leave tp off",
    ),
    (
        "dp",
        (16,),
        PlanError,
        "'dp' is not a layout\n  plan entry: e\n  fix: write it like \"@dp\"",
    ),
    (
        "_@dp, (_ _)",
        (16, 8),
        PlanError,
        '\'_@dp, (_ _)\' is not a layout\n  plan entry: e\n  fix: write it like "16@dp, 8", "@dp, _" or "(3 _@tp), _"',
    ),
    (
        "_{median:dp}",
        (16,),
        PlanError,
        '\'_{median:dp}\' is not a layout\n  plan entry: e\n  fix: write it like "16@dp, 8", "@dp, _" or "(3 _@tp), _"',
    ),
    (
        (1, None),
        (16, 8),
        PlanError,
        '(1, None) is not a spec\n  plan entry: e\n  fix: write ("dp", None), (Shard(0), Replicate()) or "@dp, _"',
    ),
]


@pytest.mark.parametrize(("spec", "shape", "kind", "text"), ERRORS, ids=[repr(error[0]) for error in ERRORS])
def test_errors(spec: Any, shape: tuple[int, ...], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        apply(spec, shape)
    assert str(caught.value) == text


def test_an_axis_that_does_not_divide_is_left_off_with_a_warning() -> None:
    with pytest.warns(ShardcWarning) as caught:
        assert apply((("dp", "tp"), None), (6, 8), uneven="drop") == "[6@dp,8]"
    assert [str(warning.message) for warning in caught] == [
        "dim 0 of parameter 'w' of shape (6, 8): 3 elements do not divide over axis 'tp' of size 4; the dim stays "
        "whole on tp\n  plan entry: e\n  fix: make the size a multiple of 4, or leave tp off"
    ]


@pytest.mark.parametrize(
    ("spec", "one"),
    [
        ("@dp, _", True),
        (("dp", None), True),
        (["dp", None], True),
        ((("tp", "dp"), None), True),
        ([("tp", "dp"), None], False),
        ((("dp", None), ("dp", None)), False),
        (["@dp", "_"], False),
        ([Shard(0), Replicate()], True),
        ([(Shard(0), Replicate()), None], False),
        ({"x": "@dp"}, False),
        ({"tp": Shard(0)}, True),
        ({"x": (Shard(0),)}, False),
        (("dp0", "tp_1"), True),
        ((), True),
    ],
)
def test_one_spec_or_several(spec: Any, one: bool) -> None:
    assert is_one(spec) is one


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts over sub-dims, each axis used at most once."""
    axes = draw(st.permutations(["dp", "tp", "one"]))
    dims, at = [], 0
    for _ in range(draw(st.integers(0, 3))):
        subs = []
        for _ in range(draw(st.integers(1, 2))):
            count = draw(st.integers(0, 3 - at))
            mine, at = tuple(axes[at : at + count]), at + count
            size = draw(st.integers(1, 3))
            for axis in mine:
                size *= MESH.size(axis)
            subs.append((size, mine))
        dims.append(subs)
    op = draw(st.sampled_from(["sum", "max"]))  # one: a sum and a max do not commute
    partial = {axis: op for axis in axes[at:] if axis != "one" and draw(st.booleans())}
    return Layout.of_sub_dims(MESH, dims, partial)


@given(layouts())
def test_a_layout_read_from_its_text_is_itself(layout: Layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_layout(str(layout), MESH, layout.shape, what="x", entry="e", uneven="drop") == layout


@given(layouts())
def test_forms_print_as_source(layout: Layout) -> None:
    form = freeze(layout)
    assert eval(show(form)) == form
    by_axes = tuple(layout.dim_axes(dim) or None for dim in range(layout.ndim))
    form = freeze(by_axes)
    assert freeze(eval(show(form))) == form
