"""Plans against inputs, outputs and module borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard

from shardc.errors import LayoutError, PlanError, ShardcWarning
from shardc.ir.mesh import Mesh
from shardc.plan import (
    ActivationPin,
    Plan,
    batch_axes,
    ddp,
    fsdp,
    hsdp,
    resolve_activations,
    resolve_inputs,
    resolve_outputs,
    tp,
)

MESH = Mesh(dp=2, rep=2, tp=2)
INPUTS = [("tokens", (8, 6)), ("batch.mask", (8, 6)), ("batch.bias", (8,)), ("scale", ())]


def inputs(plan: Plan, mesh: Mesh = MESH) -> list[str]:
    return [f"{found.layout} {found.cause}".strip() for found in resolve_inputs(plan, mesh, INPUTS)]


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        (Plan(), ()),
        (tp("tp"), ()),
        (fsdp(("dp", "cp")), ("dp", "cp")),
        (hsdp(), ("rep", "dp")),
        (fsdp("dp") | ddp("rep"), ("dp", "rep")),
    ],
)
def test_batch_axes(plan: Plan, axes: tuple[str, ...]) -> None:
    assert batch_axes(plan) == axes


def test_batch_axes_in_the_order_of_the_mesh() -> None:
    assert batch_axes(hsdp(), MESH) == ("dp", "rep") and batch_axes(hsdp(), Mesh(rep=2, dp=2)) == ("rep", "dp")


def test_inputs_are_split_over_the_batch() -> None:
    assert inputs(fsdp("dp")) == [
        '[8@dp,6] fsdp("dp", level=3)',
        '[8@dp,6] fsdp("dp", level=3)',
        '[8@dp] fsdp("dp", level=3)',
        "[]",
    ]
    whole = ["[8,6]", "[8,6]", "[8]", "[]"]
    assert inputs(tp("tp", colwise=["m"])) == whole


INPUT_SPECS: dict[str, tuple[Any, list[str]]] = {
    "one for all": ("~...", ["[8,6]", "[8,6]", "[8]", "[]"]),
    "by name": ({"tokens": ("dp", "tp"), "*.mask": "..."}, ["[8@dp,6@tp]", "[8,6]", "[8@(dp,rep)]", "[]"]),
    "by name of the argument": ({"batch": "..."}, ["[8@(dp,rep),6]", "[8,6]", "[8]", "[]"]),
    "by position": ([("tp", None), "..."], ["[8@tp,6]", "[8,6]", "[8]", "[]"]),
    "by position, some": ([None, "..."], ["[8@(dp,rep),6]", "[8,6]", "[8]", "[]"]),
    "a pytree": (
        [None, {"mask": (None, "tp"), "bias": (Shard(0), Replicate(), Replicate())}],
        ["[8@(dp,rep),6]", "[8,6@tp]", "[8@dp]", "[]"],
    ),
    "the last wins": ({"": "...", "tokens": "@dp, _"}, ["[8@dp,6]", "[8,6]", "[8]", "[]"]),
}


@pytest.mark.parametrize("case", INPUT_SPECS)
def test_inputs_as_said(case: str) -> None:
    spec, layouts = INPUT_SPECS[case]
    assert [str(found.layout) for found in resolve_inputs(hsdp() | Plan(inputs=spec), MESH, INPUTS)] == layouts


def test_inputs_that_do_not_divide_are_whole_and_computed_with_padded() -> None:
    said = hsdp() | Plan(inputs={"y": (None, "tp")})
    with pytest.warns(ShardcWarning) as warned:
        x, y = resolve_inputs(said, MESH, [("x", (6, 3)), ("y", (6, 3))])
    assert [str(found.layout) for found in (x, y)] == ["[6,3]", "[6,3]"]
    assert [str(found.padded) for found in (x, y)] == ["[8@(dp,rep),3]", "[6,4@tp]"]
    assert [str(one.message) for one in warned] == [
        "input 'x' of shape (6, 3) does not divide: dim 0 of 6 is padded to 8; every rank takes input 'x' whole over "
        'dp, rep (4 ranks) and splits it itself\n  plan entry: hsdp(shard="dp", replicate="rep", level=3)\n'
        "  fix: pass sizes that are multiples of 4; or Plan(inputs={'x': '...'}), if dim 0 is not the batch, as of a "
        "mask",
        "input 'y' of shape (6, 3) does not divide: dim 1 of 3 is padded to 4; every rank takes input 'y' whole over "
        'tp (2 ranks) and splits it itself\n  plan entry: inputs["y"] = (None, "tp")\n'
        "  fix: pass sizes that are multiples of 2, or leave tp off",
    ]


ERRORS: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "dim 1 of input 'x' of shape (6, 6): 3 elements do not divide over axis 'tp' of size 2\n  plan entry: "
    'inputs["x"] = "_, (2 3@tp)"\n  fix: make the size a multiple of 2, or leave tp off': (
        LayoutError,
        lambda: resolve_inputs(Plan(inputs={"x": "_, (2 3@tp)"}), MESH, [("x", (6, 6))]),
    ),
    "there is no input 'token'\n  plan entry: inputs[\"token\"] = \"...\"\n  fix: did you mean 'tokens'?": (
        PlanError,
        lambda: resolve_inputs(Plan(inputs={"token": "..."}), MESH, INPUTS),
    ),
    "there is no input '3'\n  plan entry: inputs[3] = \"...\"\n  fix: the inputs are 'tokens', 'batch.mask', "
    "'batch.bias', 'scale'": (
        PlanError,
        lambda: resolve_inputs(Plan(inputs=[None, None, None, "..."]), MESH, INPUTS),
    ),
    "there is no output 'logit'\n  plan entry: outputs[\"logit\"] = \"...\"\n  fix: did you mean 'logits'?": (
        PlanError,
        lambda: resolve_outputs(Plan(outputs={"logit": "..."}), ["logits"]),
    ),
    '\'layers.*.atn\' matches no module\n  plan entry: activations["layers.*.atn.input"] = "~, ~"\n  fix: did you mean '
    "'layers.0.attn' or 'layers.0' or 'layers.0.attn.output'?": (
        PlanError,
        lambda: resolve_activations(Plan(activations={"layers.*.atn.input": "~, ~"}), MODULES),
    ),
    "'*.attn.output' is the output of 'layers.0.attn' and also the module 'layers.0.attn.output'\n  plan entry: "
    'activations["*.attn.output"] = "~, ~"\n  fix: write \'*.attn:output\' for the output, or '
    "'*.attn.output:output' for that module's output": (
        PlanError,
        lambda: resolve_activations(Plan(activations={"*.attn.output": "~, ~"}), MODULES),
    ),
}

MODULES = ["", "layers.0", "layers.0.attn", "layers.0.attn.output", "norm"]


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text: str) -> None:
    kind, act = ERRORS[text]
    with pytest.raises(kind) as caught:
        act()
    assert str(caught.value) == text


def test_outputs() -> None:
    plan = Plan(outputs={"": "...", "logits": ("dp", None)})
    assert resolve_outputs(plan, ["logits", "aux.0"]) == [
        (("dp", None), 'outputs["logits"] = ("dp", None)'),
        ("...", 'outputs = "..."'),
    ]
    assert resolve_outputs(Plan(outputs=[None, "..."]), ["0", "1"]) == [None, ("...", 'outputs[1] = "..."')]
    assert resolve_outputs(Plan(), ["0"]) == [None]


def pins(activations: dict[str, Any]) -> list[tuple[str, str, int | str, Any]]:
    found = resolve_activations(Plan(activations=activations), MODULES)
    return [(pin.module, pin.where, pin.index, pin.spec) for pin in found]


def test_activations() -> None:
    plan = Plan(activations={"norm": "~, _@tp"})
    assert resolve_activations(plan, MODULES) == [
        ActivationPin("norm", "output", 0, "~, _@tp", 'activations["norm"] = "~, _@tp"')
    ]


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        ({"layers.?": "~"}, [("layers.0", "output", 0, "~")]),
        ({"*.attn.input": "~"}, [("layers.0.attn", "input", 0, "~")]),
        ({"*.attn:output": "~"}, [("layers.0.attn", "output", 0, "~")]),
        ({"*.attn.output:input": "~"}, [("layers.0.attn.output", "input", 0, "~")]),
        ({"input": "~"}, [("", "input", 0, "~")]),
        ({"": "~"}, [("", "output", 0, "~")]),
        ({"./*.*": "~"}, [("layers.0", "output", 0, "~")]),
        ({"./layers.*.attn:input": "~"}, [("layers.0.attn", "input", 0, "~")]),
        (
            {"norm.input": ["~", None, ("dp", None)], "norm": {"hidden": "_"}},
            [
                ("norm", "input", 0, "~"),
                ("norm", "input", 2, ("dp", None)),
                ("norm", "output", "hidden", "_"),
            ],
        ),
        (
            {"*": "~", "norm": "_"},
            [
                ("layers.0", "output", 0, "~"),
                ("layers.0.attn", "output", 0, "~"),
                ("layers.0.attn.output", "output", 0, "~"),
                ("norm", "output", 0, "_"),
            ],
        ),
    ],
)
def test_which_tensors_a_target_is(activations: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    assert pins(activations) == expected
