"""Plan expressions: what evaluates, and errors that point at their column."""

from __future__ import annotations

from typing import Any

import pytest

from shardc.errors import PlanError
from shardc.plan import Plan, fsdp, parse_plan, tp


def llama_tp(axis: str, sequence: bool = False, dims: tuple[int, ...] = ()) -> Plan:
    plan = tp(axis, colwise=["*.wq"])
    return plan | Plan(activations={"*.norm": f"~, _@{axis}"}) if sequence else plan


NAMES: dict[str, Any] = {"llama_tp": llama_tp, "BASE": fsdp("dp"), "number": 3, "broken": lambda: 1 / 0}


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ('fsdp("dp") | llama_tp("tp")', fsdp("dp") | llama_tp("tp")),
        ('BASE | llama_tp("tp", sequence=True)', fsdp("dp") | llama_tp("tp", sequence=True)),
        ('  Plan(params={"w": ("dp", None)}, grad_scale=-1.5)', Plan(params={"w": ("dp", None)}, grad_scale=-1.5)),
        ('(tp("tp", vocab=["a", "b"]))', tp("tp", vocab=["a", "b"])),
        ('shardc.fsdp("dp") | shardc.Plan(grad_scale=2.0)', fsdp("dp") | Plan(grad_scale=2.0)),
    ],
)
def test_expressions(text: str, plan: Plan) -> None:
    assert parse_plan(text, NAMES) == plan


ERRORS = {
    'fsdp("dp") | llama("tp")': "column 14: unknown name 'llama'\n"
    '  | fsdp("dp") | llama("tp")\n  |              ^\n  fix: did you mean \'llama_tp\'?',
    'fsdp("dp"': "column 5: '(' was never closed\n  | fsdp(\"dp\"\n  |     ^",
    "": "column 1: invalid syntax\n  | \n  | ^",
    'fsdp("dp") | number': 'column 14: number is a int, not a plan\n  | fsdp("dp") | number\n  |              ^',
    "number": "column 1: this is a int, not a plan\n  | number\n  | ^",
    "fsdp": "column 1: this is a function, not a plan\n  | fsdp\n  | ^\n  fix: call it, as fsdp(...)",
    "shardc.compile()": "column 1: shardc.compile may not stand in a plan\n  | shardc.compile()\n  | ^\n"
    '  fix: write calls joined by |, as fsdp("dp") | ddp("rep")',
    'number("dp")': 'column 1: number cannot be called\n  | number("dp")\n  | ^',
    'ddp("é") | fsdp("dp", level=9)': "column 12: level is 9, not 1 or 2 or 3\n"
    '  | ddp("é") | fsdp("dp", level=9)\n  |            ^',
    'fsdp("dp", lvl=2)': "column 1: fsdp('dp', lvl=2): fsdp() got an unexpected keyword argument 'lvl'\n"
    '  | fsdp("dp", lvl=2)\n  | ^',
    "broken()": "column 1: broken(): division by zero\n  | broken()\n  | ^",
    '__import__("os")': "column 1: unknown name '__import__'\n  | __import__(\"os\")\n  | ^\n  fix: known are BASE, "
    "Partial, Plan, Replicate, Shard, broken, chunked_loss, cp, ddp, ep, fsdp, hsdp, llama_tp, microbatches, number, "
    "offload, per_rank, pp, precision, recompute, save, tp",
    "fsdp.__globals__": "column 1: fsdp.__globals__ may not stand in a plan\n  | fsdp.__globals__\n  | ^\n"
    '  fix: write calls joined by |, as fsdp("dp") | ddp("rep")',
    'fsdp(*["dp"])': "column 6: *['dp'] may not stand in a plan\n  | fsdp(*[\"dp\"])\n  |      ^\n"
    '  fix: write calls joined by |, as fsdp("dp") | ddp("rep")',
    "Plan(**{})": "column 1: ** may not stand in a plan\n  | Plan(**{})\n  | ^\n"
    '  fix: write calls joined by |, as fsdp("dp") | ddp("rep")',
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text, NAMES)
    assert str(caught.value) == ERRORS[text]
