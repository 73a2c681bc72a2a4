# ruff: noqa: E501
"""Plans against a mesh and parameters: the whole table of layouts, the warnings, and each error's whole text."""

from __future__ import annotations

import warnings
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tabulate import tabulate
from torch import nn

import shardc
from shardc.errors import PlanError, ShardcWarning
from shardc.ir.mesh import Mesh
from shardc.plan import ParamPlan, Plan, ddp, ep, fsdp, hsdp, resolve_params, tp

MESH = Mesh(rep=2, dp=2, tp=2)
MODEL: dict[str, tuple[tuple[int, ...], int]] = {
    "tok.weight": ((10, 4), 4),
    "layers.0.up.weight": ((16, 4), 4),
    "layers.0.up.bias": ((16,), 4),
    "layers.0.down.weight": ((4, 16), 4),
    "layers.0.down.bias": ((4,), 4),
    "norm.weight": ((3,), 4),
    "conv.weight": ((8, 6, 3, 3), 4),
    "scale": ((), 4),
    "empty": ((0, 4), 4),
}
TP = tp("tp", colwise=["*.up"], rowwise=["*.down", "conv"], vocab=["tok"])


def table(plans: dict[str, ParamPlan]) -> str:
    rows = [
        (name, p.storage, p.compute, p.level, p.storage_cause or "-", p.compute_cause or "-")
        for name, p in plans.items()
    ]
    return f"\n{tabulate(rows, tablefmt='plain')}\n"


def resolve(plan: Plan, mesh: Mesh = MESH) -> str:
    return table(resolve_params(plan, mesh, MODEL))


def test_nothing_said() -> None:
    assert (
        resolve(ddp("dp"))
        == """
tok.weight            [10,4]     [10,4]     0  -  -
layers.0.up.weight    [16,4]     [16,4]     0  -  -
layers.0.up.bias      [16]       [16]       0  -  -
layers.0.down.weight  [4,16]     [4,16]     0  -  -
layers.0.down.bias    [4]        [4]        0  -  -
norm.weight           [3]        [3]        0  -  -
conv.weight           [8,6,3,3]  [8,6,3,3]  0  -  -
scale                 []         []         0  -  -
empty                 [0,4]      [0,4]      0  -  -
"""
    )


def test_tp() -> None:
    assert (
        resolve(TP)
        == """
tok.weight            [10@tp,4]     [10@tp,4]     0  tp("tp", vocab=["tok"])       tp("tp", vocab=["tok"])
layers.0.up.weight    [16@tp,4]     [16@tp,4]     0  tp("tp", colwise=["*.up"])    tp("tp", colwise=["*.up"])
layers.0.up.bias      [16@tp]       [16@tp]       0  tp("tp", colwise=["*.up"])    tp("tp", colwise=["*.up"])
layers.0.down.weight  [4,16@tp]     [4,16@tp]     0  tp("tp", rowwise=["*.down"])  tp("tp", rowwise=["*.down"])
layers.0.down.bias    [4]           [4]           0  -                             -
norm.weight           [3]           [3]           0  -                             -
conv.weight           [8,6@tp,3,3]  [8,6@tp,3,3]  0  tp("tp", rowwise=["conv"])    tp("tp", rowwise=["conv"])
scale                 []            []            0  -                             -
empty                 [0,4]         [0,4]         0  -                             -
"""
    )


def test_fsdp_over_tp_with_a_threshold() -> None:
    # norm.weight has 12 bytes; layers.0.down.bias has 16.
    assert (
        resolve(fsdp("dp", level=2, threshold=16) | TP)
        == """
tok.weight            [10@tp,4@dp]     [10@tp,4]     2  fsdp("dp", level=2, threshold=16)                   tp("tp", vocab=["tok"])
layers.0.up.weight    [16@(tp,dp),4]   [16@tp,4]     2  fsdp("dp", level=2, threshold=16)                   tp("tp", colwise=["*.up"])
layers.0.up.bias      [16@(tp,dp)]     [16@tp]       2  fsdp("dp", level=2, threshold=16)                   tp("tp", colwise=["*.up"])
layers.0.down.weight  [4@dp,16@tp]     [4,16@tp]     2  fsdp("dp", level=2, threshold=16)                   tp("tp", rowwise=["*.down"])
layers.0.down.bias    [4@dp]           [4]           2  fsdp("dp", level=2, threshold=16)                   -
norm.weight           [3]              [3]           2  fsdp("dp", level=2, threshold=16): 12 B stay whole  -
conv.weight           [8@dp,6@tp,3,3]  [8,6@tp,3,3]  2  fsdp("dp", level=2, threshold=16)                   tp("tp", rowwise=["conv"])
scale                 []               []            2  fsdp("dp", level=2, threshold=16): 4 B stay whole   -
empty                 [0,4]            [0,4]         2  fsdp("dp", level=2, threshold=16): 0 B stay whole   -
"""
    )


def test_hsdp_pads_what_does_not_divide() -> None:
    plans = resolve_params(hsdp(shard="dp", replicate="rep"), Mesh(rep=2, dp=4), MODEL)
    assert (
        table(plans)
        == """
tok.weight            [10,4@dp]     [10,4]     3  hsdp(shard="dp", replicate="rep", level=3)  -
layers.0.up.weight    [16@dp,4]     [16,4]     3  hsdp(shard="dp", replicate="rep", level=3)  -
layers.0.up.bias      [16@dp]       [16]       3  hsdp(shard="dp", replicate="rep", level=3)  -
layers.0.down.weight  [4@dp,16]     [4,16]     3  hsdp(shard="dp", replicate="rep", level=3)  -
layers.0.down.bias    [4@dp]        [4]        3  hsdp(shard="dp", replicate="rep", level=3)  -
norm.weight           [4@dp]        [3]        3  hsdp(shard="dp", replicate="rep", level=3)  -
conv.weight           [8@dp,6,3,3]  [8,6,3,3]  3  hsdp(shard="dp", replicate="rep", level=3)  -
scale                 []            []         3  -                                           -
empty                 [0,4]         [0,4]      3  -                                           -
"""
    )
    assert {name: plan.padded for name, plan in plans.items() if plan.padded != MODEL[name][0]} == {"norm.weight": (4,)}


@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
def test_several_axes_are_bound_in_order() -> None:
    params = {"a": ((12, 8), 4), "b": ((10, 3), 4), "c": ((5,), 4), "d": ((6,), 4), "e": ((8, 2), 4)}
    assert (
        table(resolve_params(fsdp(("x", "y")), Mesh(x=2, y=4), params))
        == """
a  [12@x,8@y]   [12,8]  3  fsdp(("x", "y"), level=3)                               -
b  [10@x,4@y]   [10,3]  3  fsdp(("x", "y"), level=3)                               -
c  [6@x]        [5]     3  fsdp(("x", "y"), level=3): no dim divides, stays whole  -
d  [6@x]        [6]     3  fsdp(("x", "y"), level=3): no dim divides, stays whole  -
e  [8@(x,y),2]  [8,2]   3  fsdp(("x", "y"), level=3)                               -
"""
    )


def test_storage_goes_where_a_raw_entry_says() -> None:
    params = {"a": ((8, 8), 4), "b": ((8, 8), 4), "c": ((6, 8), 4)}
    plan = fsdp("dp") | Plan(params={"a": (None, ("tp", "dp")), "b": "(2 _@tp), _"})
    assert (
        table(resolve_params(plan, MESH, params))
        == """
a  [8,8@(tp,dp)]  [8,8@tp]      3  params["a"] = (None, ("tp", "dp"))  params["a"] = (None, ("tp", "dp"))
b  [8@(dp,tp),8]  [(2 4@tp),8]  3  fsdp("dp", level=3)                 params["b"] = "(2 _@tp), _"
c  [6@dp,8]       [6,8]         3  fsdp("dp", level=3)                 -
"""
    )


def test_without_an_fsdp_entry_a_raw_entry_is_the_compute_layout_too() -> None:
    plan = ddp("rep") | Plan(params={"a": ("dp", None)})
    assert (
        table(resolve_params(plan, MESH, {"a": ((8, 8), 4)}))
        == """
a  [8@dp,8]  [8@dp,8]  0  params["a"] = ("dp", None)  params["a"] = ("dp", None)
"""
    )


def test_the_last_that_speaks_of_a_parameter_wins() -> None:
    params = {"a.weight": ((8, 8), 4), "b.weight": ((8, 8), 4), "c.weight": ((8, 8), 4), "d.weight": ((8, 8), 4)}
    plan = (
        tp("tp", colwise=["*"])
        | tp("tp", rowwise=["b"])
        | tp("dp", rowwise=["c"])
        | Plan(params={"d.*": "~, _@dp"})
        | Plan(params={"a.weight": (None, None)})
    )
    assert (
        table(resolve_params(plan, MESH, params))
        == """
a.weight  [8,8]        [8,8]        0  params["a.weight"] = (None, None)                    params["a.weight"] = (None, None)
b.weight  [8,8@tp]     [8,8@tp]     0  tp("tp", colwise=["*"]) | tp("tp", rowwise=["b"])    tp("tp", colwise=["*"]) | tp("tp", rowwise=["b"])
c.weight  [8@tp,8@dp]  [8@tp,8@dp]  0  tp("tp", colwise=["*"]) | tp("dp", rowwise=["c"])    tp("tp", colwise=["*"]) | tp("dp", rowwise=["c"])
d.weight  [8@tp,8@dp]  [8@tp,8@dp]  0  tp("tp", colwise=["*"]) | params["d.*"] = "~, _@dp"  tp("tp", colwise=["*"]) | params["d.*"] = "~, _@dp"
"""
    )


def test_globs_match_other_names_of_a_tied_parameter() -> None:
    plans = resolve_params(tp("tp", colwise=["head"]), MESH, {"tok.weight": ((8, 4), 4)}, {"head.weight": "tok.weight"})
    assert (
        table(plans)
        == """
tok.weight  [8@tp,4]  [8@tp,4]  0  tp("tp", colwise=["head"])  tp("tp", colwise=["head"])
"""
    )


def test_axes_of_size_one() -> None:
    mesh = Mesh(rep=1, dp=1, tp=1)
    everywhere = hsdp() | TP | Plan(params={"norm.weight": ("tp",)})
    assert {str(p.storage) for p in resolve_params(everywhere, mesh, MODEL).values()} == {
        f"[{','.join(map(str, shape))}]" for shape, _ in MODEL.values()
    }


WARNINGS = {
    "tp": (
        tp("tp", colwise=["a"]),
        {"a.weight": ((1, 8), 4)},
        "dim 0 of parameter 'a.weight' of shape (1, 8) does not divide over axis 'tp' of size 2; the parameter stays "
        'whole on tp\n  plan entry: tp("tp", colwise=["a"])',
        """
a.weight  [1,8]  [1,8]  0  tp("tp", colwise=["a"])  tp("tp", colwise=["a"])
""",
    ),
    "raw": (
        fsdp("dp") | Plan(params={"a": "(7@dp), 3"}),
        {"a": ((7, 3), 4)},
        "dim 0 of parameter 'a' of shape (7, 3): 7 elements do not divide over axis 'dp' of size 2; the dim stays whole "
        'on dp\n  plan entry: params["a"] = "(7@dp), 3"\n  fix: make the size a multiple of 2, or leave dp off',
        """
a  [8@dp,3]  [7,3]  3  fsdp("dp", level=3)  params["a"] = "(7@dp), 3"
""",
    ),
    "storage": (
        fsdp("dp") | tp("tp", colwise=["a"]),
        {"a.weight": ((6,), 4)},
        "no dim of parameter 'a.weight' of shape (6,) can be split over axis 'dp' of size 2 beside [6@tp]; its storage "
        'stays whole on dp\n  plan entry: fsdp("dp", level=3)',
        """
a.weight  [6@tp]  [6@tp]  3  fsdp("dp", level=3): no dim divides, stays whole  tp("tp", colwise=["a"])
""",
    ),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_what_is_done_where_a_dim_does_not_divide(case: str) -> None:
    plan, params, text, layouts = WARNINGS[case]
    with pytest.warns(ShardcWarning) as caught:
        plans = resolve_params(plan, MESH, params)
    assert [str(warning.message) for warning in caught] == [text]
    assert table(plans) == layouts


def test_dims_that_do_not_divide_are_stored_and_split_at_padded_sizes() -> None:
    plan = fsdp("dp") | tp("tp", colwise=["up"], rowwise=["down"]) | Plan(params={"raw": "_, @tp", "late": ("dp",)})
    shapes = {"up.weight": (13, 4), "up.bias": (13,), "down.weight": (4, 13), "raw": (3, 3), "late": (7,)}
    with pytest.warns(
        ShardcWarning, match=r"no dim of parameter 'up.bias' of shape \(13,\) can be split over axis 'dp'"
    ):
        plans = resolve_params(plan, MESH, {name: (shape, 4) for name, shape in shapes.items()})
    assert {name: [str(p.storage), str(p.compute), str(p.split)] for name, p in plans.items()} == {
        "up.weight": ["[14@tp,4@dp]", "[13,4]", "[14@tp,4]"],
        "up.bias": ["[14@tp]", "[13]", "[14@tp]"],
        "down.weight": ["[4@dp,14@tp]", "[4,13]", "[4,14@tp]"],
        "raw": ["[4@dp,4@tp]", "[3,3]", "[4,4@tp]"],
        "late": ["[8@dp]", "[7]", "None"],
    }


ERRORS = {
    '\'layers.*.wq.weight\' matches no parameter\n  plan entry: params["layers.*.wq.weight"] = ("tp", None)\n'
    "  fix: did you mean 'layers.0.down.weight' or 'layers.0.up.weight' or 'layers.0.down.bias'?": (
        Plan(params={"layers.*.wq.weight": ("tp", None)})
    ),
    "'zzz' matches no parameter\n  plan entry: params[\"zzz\"] = \"_\"\n  fix: there are 'tok.weight', "
    "'layers.0.up.weight', 'layers.0.up.bias', 'layers.0.down.weight', 'layers.0.down.bias', 'norm.weight', "
    "'conv.weight', 'scale' and 1 more": Plan(params={"zzz": "_"}),
    '\'*.upp\' matches no module with a weight\n  plan entry: tp("tp", colwise=["*.upp"])\n'
    "  fix: did you mean 'layers.0.up'?": tp("tp", colwise=["*.upp"]),
    '\'*.up.weight\' matches no module with a weight\n  plan entry: tp("tp", colwise=["*.up.weight"])\n'
    "  fix: did you mean '*.up'?": tp("tp", colwise=["*.up.weight"]),
    "parameter 'norm.weight' of shape (3,) has no dim 1 for rowwise to split\n"
    '  plan entry: tp("tp", rowwise=["norm"])\n  fix: match only modules whose weight is a matrix': (
        tp("tp", rowwise=["norm"])
    ),
    'unknown mesh axis \'model\'; the mesh is rep=2 dp=2 tp=2\n  plan entry: tp("model", colwise=["*.up"])\n'
    "  fix: use one of ['rep', 'dp', 'tp']": tp("model", colwise=["*.up"]),
    'unknown mesh axis \'tpp\'; the mesh is rep=2 dp=2 tp=2\n  plan entry: activations["m"] = ("tpp",)\n'
    "  fix: did you mean 'tp'?": Plan(activations={"m": ("tpp",)}),
    'axis \'dp\' is given to TP and to fsdp("dp", level=3)\n  plan entry: tp("dp", colwise=["*.up"])\n'
    "  fix: use one axis for the batch and another for TP": fsdp("dp") | tp("dp", colwise=["*.up"]),
    'the plan has fsdp entries of levels 2 and 3\n  plan entry: fsdp("dp", level=3) | fsdp("rep", level=2)\n'
    "  fix: give all of them the same level": fsdp("dp") | fsdp("rep", level=2),
    "parameter 'tok.weight' cannot be a partial reduction {sum:tp}\n"
    '  plan entry: params["tok.weight"] = "_, _{sum:tp}"\n  fix: split it, or leave it whole': (
        Plan(params={"tok.weight": "_, _{sum:tp}"})
    ),
    "spec (\"tp\",) has 1 dims, parameter 'tok.weight' of shape (10, 4) has 2\n"
    '  plan entry: params["tok.weight"] = ("tp",)\n  fix: give one item for each dim of the tensor': (
        Plan(params={"tok.weight": ("tp",)})
    ),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolve_params(ERRORS[text], MESH, MODEL)
    assert str(caught.value) == text


WHOLE, HALF = "tok.weight", "@tp:1x2, _"
# A plan -> how its error starts, and the entry that it names; the axis has four ranks.
PARTS: list[tuple[Plan, str, str]] = [
    (ep("tp:1x2", "*.up") | fsdp("tp"), 'ep("tp:1x2", experts="*.up") and fsdp("tp", level=3) split the batch over', "fsdp"),
    (fsdp("tp:1x2") | ddp("tp"), "fsdp(\"tp:1x2\", level=3) and ddp(\"tp\") split the batch over 'tp:1x2' and over 'tp'", "ddp"),
    (tp("tp:1x2", colwise=["*.up"]) | fsdp("tp"), "axis 'tp:1x2' is given to TP and to fsdp(\"tp\", level=3)", "tp("),
    (tp("tp", colwise=["*.up"]) | fsdp("tp:2x2"), "axis 'tp' is given to TP and to fsdp(\"tp:2x2\", level=3)", "tp("),
    (
        tp("tp:1x2", colwise=["*.up"]) | tp("tp", rowwise=["*.up"]),
        "parameter 'layers.0.up.weight' is split over 'tp' and over 'tp:1x2', which share ranks", "tp(",
    ),
    (Plan(params={WHOLE: HALF}) | fsdp("tp"), "layout [10@tp:1x2,4@tp] uses axis 'tp:1x2' twice", "params"),
    (Plan(params={WHOLE: "@tp:1x2, @tp"}), "layout [10@tp:1x2,4@tp] uses axis 'tp:1x2' twice", "params"),
    *(
        (fsdp(part), f"{part!r} is not a part of axis 'tp', which has 4 ranks", "fsdp")
        for part in ("tp:4x2", "tp:1x3", "tp:1x4", "tp:", "tp:ax2", "tp:0x2")
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "what", "entry"), PARTS, ids=lambda value: str(value) if isinstance(value, Plan) else ""
)
def test_parts_of_axes_that_share_ranks(plan: Plan, what: str, entry: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolve_params(plan, Mesh(dp=2, tp=4), MODEL)
    assert caught.value.what.startswith(what)
    assert (caught.value.plan_entry or "").startswith(entry) and caught.value.fix


def test_parts_of_axes_that_share_none() -> None:
    found = resolve_params(tp("tp:1x2", colwise=["*.up"]) | fsdp("tp:2x2"), Mesh(tp=4), MODEL)
    assert str(found["layers.0.up.weight"].storage) == "[16@tp,4]"


@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    style=st.sampled_from(["colwise", "rowwise", "none"]),
    threshold=st.sampled_from([0, 40]),
)
def test_storage_is_compute_split_further(
    shape: tuple[int, ...], sizes: tuple[int, int, int], style: str, threshold: int
) -> None:
    mesh = Mesh(dp=sizes[0], cp=sizes[1], tp=sizes[2])
    plan = fsdp(("dp", "cp"), threshold=threshold)
    if len(shape) >= 2 and style != "none":
        plan |= tp("tp", **{style: ["m"]})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        out = resolve_params(plan, mesh, {"m.weight": (shape, 4)})["m.weight"]
    assert out.compute.shape == shape and out.storage.shape == out.padded
    assert not {"dp", "cp"} & set(out.compute.bound)
    assert set(out.storage.bound) - {"dp", "cp"} == set((out.split or out.compute).bound)
    assert out.split is None or (out.split.shape == out.padded and "tp" not in out.compute.bound)
    grown = [dim for dim, (size, pad) in enumerate(zip(shape, out.padded, strict=True)) if size != pad]
    assert all(out.padded[dim] >= shape[dim] and not out.compute.dim_axes(dim) for dim in grown)
    whole = not shape or prod(shape) == 0 or prod(shape) * 4 < threshold
    split = [axis for axis in ("dp", "cp") if mesh.size(axis) > 1 and not whole]
    missing = set(split) - set(out.storage.bound)
    assert not missing or warned


EIGHT = Mesh(a=2, b=4)


@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
def test_storage_is_split_over_the_minor_ranks() -> None:
    params = {"up.weight": ((16, 4), 4), "up.bias": ((16,), 4), "head.weight": ((9, 4), 4), "tail.weight": ((8, 4), 4)}
    plan = fsdp(("a", "b"), threshold=65, shard_size=2, overrides={"*.bias": 4, "head.*": -1, "tail.*": 1})
    assert (
        table(resolve_params(plan, EIGHT, params, {"tied.bias": "head.weight"}))
        == """
up.weight    [16@b:2x2,4]  [16,4]  3  fsdp(("a", "b"), level=3, threshold=65, shard_size=2, overrides={"*.bias": 4, "head.*": -1, "tail.*": 1})                               -
up.bias      [16@b]        [16]    3  fsdp(("a", "b"), level=3, threshold=65, shard_size=2, overrides={"*.bias": 4, "head.*": -1, "tail.*": 1})                               -
head.weight  [9,4@a]       [9,4]   3  fsdp(("a", "b"), level=3, threshold=65, shard_size=2, overrides={"*.bias": 4, "head.*": -1, "tail.*": 1}): no dim divides, stays whole  -
tail.weight  [8,4]         [8,4]   3  fsdp(("a", "b"), level=3, threshold=65, shard_size=2, overrides={"*.bias": 4, "head.*": -1, "tail.*": 1}): split over 1 rank            -
"""
    )
    assert fsdp("a", shard_size=2, overrides={"*.bias": 1}).describe() == (
        'what          of              where\nfsdp level 3  inputs, params  storage over 2 ranks of a, {"*.bias": 1}'
    )


PART_ERRORS = {
    'parameters cannot be split over 3 of the 8 ranks of a=2 and b=4\n  plan entry: fsdp(("a", "b"), level=3, '
    "shard_size=3)\n  fix: use one of [1, 2, 4, 8]": (fsdp(("a", "b"), shard_size=3), EIGHT),
    "parameters cannot be split over 2 and over 3 ranks of one axis\n  plan entry: "
    'fsdp("a", level=3, shard_size=2, overrides={"up.bias": 3})\n'
    "  fix: use shard sizes of which one divides the other": (
        fsdp("a", shard_size=2, overrides={"up.bias": 3}),
        Mesh(a=6),
    ),
    '\'down.*\' matches no parameter\n  plan entry: fsdp("a", level=3, overrides={"down.*": 1})\n'
    "  fix: there are 'up.bias'": (fsdp("a", overrides={"down.*": 1}), EIGHT),
}


@pytest.mark.parametrize("text", PART_ERRORS)
def test_errors_of_shard_sizes(text: str) -> None:
    plan, mesh = PART_ERRORS[text]
    with pytest.raises(PlanError) as caught:
        resolve_params(plan, mesh, {"up.bias": ((16,), 4)})
    assert str(caught.value) == text


def test_levels_by_name() -> None:
    """The last glob that matches a parameter gives its level; text and files keep what was said."""
    plan = fsdp("dp", levels={"1.*": 3, "[13].*": 2})
    assert Plan.from_json(plan.to_json()) == plan
    params = {f"{at}.weight": ((8, 8), 4) for at in range(4)}
    assert {name: p.level for name, p in resolve_params(plan, Mesh(dp=2), params).items()} == {
        "0.weight": 3, "1.weight": 2, "2.weight": 3, "3.weight": 2,
    }  # fmt: skip
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    again, options = [], shardc.Options(bucket_size=0)
    for said in (fsdp("dp"), plan):
        module = shardc.compile(model, Mesh(dp=2), said, loss=lambda out: out.sum(), options=options, backend="eager")
        program = module.lower(torch.empty(4, 8))
        assert program.backward is not None
        again.append(sum("all_gather" in str(node.target) for node in program.backward.graph.nodes))
    assert again == [3, 1]  # the gradient of the input needs no weight of the first layer
    with pytest.raises(PlanError, match="'head' matches no parameter"):
        resolve_params(fsdp("dp", levels={"head": 2}), Mesh(dp=2), {"up.bias": ((16,), 4)})
    with pytest.raises(PlanError, match="is 4, not 1 or 2 or 3"):
        fsdp("dp", levels={"head": 4})
