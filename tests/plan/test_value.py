"""Plans as values: what composes, what wins, how they print."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import shardc.plan
from shardc.errors import PlanError
from shardc.plan import Plan, ddp, fsdp, hsdp, parse_plan, precision, tp

NAMES = {name: getattr(shardc.plan, name) for name in ("ddp", "fsdp", "hsdp", "tp", "precision", "Plan")} | {
    "torch": torch,
    "Shard": Shard,
    "Replicate": Replicate,
    "Partial": Partial,
}

PLANS = {
    "precision(param=torch.bfloat16, reduce=torch.float32, keep_low_precision_grads=True)": precision(
        torch.bfloat16, torch.float32, keep_low_precision_grads=True
    ),
    'Plan(params={"w": {"tp": Shard(-1), "dp": Replicate()}})': Plan(
        params={"w": {"tp": Shard(-1), "dp": Replicate()}}
    ),
    "Plan()": Plan(),
    'ddp("dp")': ddp("dp"),
    'ddp("dp") | ddp("rep")': ddp(["dp", "rep"]),
    'fsdp("dp", level=3)': fsdp("dp"),
    'fsdp(("dp", "cp"), level=2, threshold=1024)': fsdp(["dp", "cp"], level=2, threshold=1024),
    'hsdp(shard="dp", replicate="rep", level=1)': hsdp(level=1),
    'fsdp("dp", level=3, threshold=64, shard_size=2, overrides={"*.bias": 1, "head.*": -1})': fsdp(
        "dp", threshold=64, shard_size=2, overrides={"*.bias": 1, "head.*": -1}
    ),
    'tp("tp", colwise=["*.up", "*.gate"], rowwise=["*.down"], vocab=["tok"])': tp(
        "tp", colwise=["*.up", "*.gate"], rowwise=["*.down"], vocab=["tok"]
    ),
    'fsdp("dp", level=3) | tp("tp", colwise=["*.up"]) | Plan(params={"head.*": ("tp", None)}, reduce="sum")': (
        fsdp("dp") | tp("tp", colwise=["*.up"]) | Plan(params={"head.*": ["tp", "None"]}, reduce="sum")
    ),
    'Plan(inputs=[("dp", None), "..."], outputs=("dp",), grad_scale=0.5, dtensor_outputs=True)': Plan(
        inputs=[("dp", None), "..."], outputs=("dp",), grad_scale=0.5, dtensor_outputs=True
    ),
    'Plan(inputs={"tokens": ("dp", None), "batch.mask": "@dp, _", "batch.rest.0": (Shard(0), Replicate())})': Plan(
        inputs={"tokens": ("dp", None), "batch": {"mask": "@dp, _", "rest": [(Shard(0), Replicate()), None]}}
    ),
    'Plan(activations={"norm": "~, _@tp", "attn.input": "~, ~", "mlp:output[0]": (None, ("tp", "dp")), '
    '"mlp:output[2]": (Partial(), Partial("max"), Shard(1)), "attn:input[mask]": "..."})': Plan(
        activations={
            "norm": "~, _@tp",
            "attn.input": "~, ~",
            "mlp": [(None, ("tp", "dp")), None, (Partial(), Partial("max"), Shard(1))],
            "attn:input": {"mask": "..."},
        }
    ),
}


@pytest.mark.parametrize("text", PLANS)
def test_text_evaluates_back(text: str) -> None:
    plan = PLANS[text]
    assert repr(plan) == str(plan) == text
    assert eval(text, dict(NAMES)) == plan == parse_plan(text)
    assert hash(eval(text, dict(NAMES))) == hash(plan)


COMPOSED = {
    'ddp("rep") | fsdp("dp", level=3)': lambda: ddp("rep") | fsdp("dp"),
    'fsdp("dp", level=1)': lambda: ddp("dp") | fsdp("dp", level=3) | fsdp("dp", level=1),
    'fsdp(("b", "a"), level=3)': lambda: fsdp(("a", "b")) | fsdp(("b", "a")),
    'tp("tp", colwise=["a"]) | tp("tp", colwise=["c"], rowwise=["b"])': (
        lambda: tp("tp", colwise=["a", "b"]) | tp("tp", colwise=["c"], rowwise=["b"])
    ),
    'tp("x", colwise=["a"]) | tp("y", rowwise=["a"])': lambda: tp("x", colwise=["a"]) | tp("y", rowwise=["a"]),
    'tp("tp", rowwise=["a"]) | tp("tp", colwise=["b"])': lambda: tp("tp", rowwise=["a"]) | tp("tp", colwise=["b"]),
    'Plan(params={"b": (None,), "a": ("dp",)})': (
        lambda: Plan(params={"a": ("tp",), "b": (None,)}) | Plan(params={"a": ("dp",)})
    ),
    'Plan(inputs={"x": "_", "y": "@dp"}, reduce="sum", grad_scale=2.0)': (
        lambda: Plan(inputs={"x": "_"}, reduce="mean", grad_scale=2.0) | Plan(inputs={"y": "@dp"}, reduce="sum")
    ),
    'Plan(inputs="_") | Plan(reduce="sum") | Plan(outputs="_", grad_scale=3.0)': (
        lambda: Plan(inputs="_", reduce="sum") | Plan(outputs="_", grad_scale=3.0)
    ),
    'Plan(activations={"m": "@dp"})': lambda: Plan(activations={"m": "_"}) | Plan() | Plan(activations={"m": "@dp"}),
}


@pytest.mark.parametrize("text", COMPOSED)
def test_later_wins_where_both_speak_of_the_same(text: str) -> None:
    compose: Callable[[], Plan] = COMPOSED[text]
    expected = eval(text, dict(NAMES))
    assert set(compose().entries) == set(expected.entries)
    assert set(parse_plan(repr(compose())).entries) == set(expected.entries)
    assert parse_plan(repr(compose())) == compose()


def test_precision() -> None:
    assert (precision(torch.float16) | precision(torch.bfloat16)).precision.of("any").param is torch.bfloat16
    assert Plan().precision.of("any").call == ("precision", {})


def test_a_module_follows_the_last_precision_that_matches_it() -> None:
    said = precision(torch.bfloat16) | precision(torch.float32, modules="head") | precision(modules=["layers.*.norm"])
    of = {name: said.precision.of(name).param for name in ("", "head", "head.up", "layers.0", "layers.0.norm")}
    assert of == {
        "": torch.bfloat16, "head": torch.float32, "head.up": torch.float32, "layers.0": torch.bfloat16,
        "layers.0.norm": None,
    }  # fmt: skip
    assert parse_plan(repr(said)) == said


def test_a_plan_is_empty_or_not() -> None:
    assert not Plan() and fsdp("dp") and Plan(reduce="mean")


def test_settings() -> None:
    joined = Plan(reduce="sum", grad_scale=3) | Plan(grad_scale=0.5)
    assert [Plan().setting(name) for name in ("reduce", "grad_scale")] == ["mean", 1.0]
    assert [joined.setting(name) for name in ("reduce", "grad_scale")] == ["sum", 0.5]
    assert Plan().setting("dtensor_outputs") is False and Plan(dtensor_outputs=True).setting("dtensor_outputs") is True


ERRORS: dict[str, Callable[[], Plan]] = {
    'level is 4, not 1 or 2 or 3\n  plan entry: fsdp("dp", level=4)': lambda: fsdp("dp", level=4),
    'threshold is -1, not a number of bytes\n  plan entry: fsdp("dp", level=3, threshold=-1)': (
        lambda: fsdp("dp", threshold=-1)
    ),
    'shard_size is 0, not an integer of 1 or more, or -1\n  plan entry: fsdp("dp", level=3, shard_size=0)': lambda: (
        fsdp("dp", shard_size=0)
    ),
    'axis \'dp\' is used twice\n  plan entry: hsdp(shard="dp", replicate="dp", level=3)\n  fix: name each axis once': (
        lambda: hsdp("dp", "dp")
    ),
    'axis \'dp\' is used twice\n  plan entry: fsdp(("dp", "dp"), level=3)\n  fix: name each axis once': (
        lambda: fsdp(("dp", "dp"))
    ),
    'fsdp needs an axis to split parameters over\n  fix: write fsdp("dp")': lambda: fsdp(()),
    "ddp needs axes to split the batch over, each once\n  plan entry: ddp(['dp', 'dp'])\n"
    '  fix: write ddp("dp")': lambda: ddp(["dp", "dp"]),
    'ddp needs axes to split the batch over, each once\n  plan entry: ddp([])\n  fix: write ddp("dp")': lambda: ddp([]),
    '2 is not the name of a mesh axis\n  plan entry: ddp(2)\n  fix: name axes like "dp"': (
        lambda: ddp(2)  # type: ignore[arg-type]
    ),
    "colwise is '*.up', not a list, each item a string\n  plan entry: tp('tp')\n"
    '  fix: write colwise=["*.up"]': lambda: tp("tp", colwise="*.up"),
    "reduce=torch.int32 is not a floating-point dtype\n  plan entry: precision(...)\n"
    "  fix: write reduce=torch.bfloat16": (lambda: precision(reduce=torch.int32)),
    "reduce is 'avg', not 'mean' or 'sum'\n  plan entry: reduce=\"avg\"": lambda: Plan(reduce="avg"),
    'axis \'dp\' is given to two data-parallel entries: hsdp(shard="dp", replicate="rep", level=3) and fsdp("dp", '
    'level=3)\n  plan entry: fsdp("dp", level=3)\n  fix: give each axis to one entry': lambda: hsdp() | fsdp("dp"),
    '3 is neither a spec nor a list or dict of specs\n  plan entry: inputs\n  fix: write ("dp", None), '
    '(Shard(0), Replicate()) or "@dp, _"': lambda: Plan(inputs=3),
    "'dp' is not a layout\n  plan entry: inputs='dp'\n  fix: write it like \"@dp\"": lambda: Plan(inputs="dp"),
    "spec (\"dp\", \"dp\") uses axis 'dp' twice\n  plan entry: params[\"w\"] = ('dp', 'dp')\n  fix: split or reduce "
    "over each axis once; give the specs of several tensors as a list": lambda: Plan(params={"w": ("dp", "dp")}),
    "an activation's specs are nested\n  plan entry: activations[\"m\"] = [{'a': '_'}]\n"
    "  fix: give one list or one dict": (lambda: Plan(activations={"m": [{"a": "_"}]})),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        ERRORS[text]()
    assert str(caught.value) == text


def test_a_plan_composes_with_plans_only() -> None:
    with pytest.raises(TypeError):
        fsdp("dp") | "ddp"  # type: ignore[operator]


def test_describe() -> None:
    plan = (
        hsdp(threshold=64) | tp("tp", colwise=["*.up"]) | Plan(params={"w": (None, "tp")}, inputs="@dp", reduce="sum")
    )
    assert (
        f"\n{plan.describe()}\n"
        == """
what          of              where
fsdp level 3  inputs, params  storage over dp, whole over rep, under 64 B whole
tp colwise    *.up            over tp
param         w               (None, "tp")
input         all             "@dp"
setting       reduce          sum
"""
    )
