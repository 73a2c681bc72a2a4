"""Layouts chosen exactly: programs equal one device, and no rank does work that others do too."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
import torch

import shardc
from examples.models import llama
from tests.models.test_matrix import Case, cases, check
from tests.semantics.random_programs import program, simulated, verdict

EVERYDAY = (
    Case("mlp", "ddp", {"dp": 2}),
    Case("mlp", "fsdp2", {"dp": 2}),
    Case("mlp", "tp", {"tp": 2}),
    Case("mlp", "tp", {"tp": 4}),
    Case("mlp", "fsdp+tp", {"dp": 2, "tp": 2}),
    Case("mlp", "hsdp+tp", {"rep": 2, "dp": 2, "tp": 2}),
    Case("convnet", "fsdp3", {"dp": 2}),
    Case("convnet", "tp", {"tp": 2}),
    Case("vit", "hsdp", {"rep": 2, "dp": 2}),
    Case("vit", "tp+sp", {"tp": 2}),
    Case("gpt2", "fsdp3", {"dp": 2}),
    Case("llama", "tp", {"tp": 2}),
)


def matrix() -> list[Any]:
    rest = [each.values[0] for each in cases() if each.values[0] not in EVERYDAY]
    return [*EVERYDAY, *(pytest.param(each, marks=pytest.mark.long) for each in rest)]


@pytest.mark.parametrize("case", matrix(), ids=str)
def test_example_models_equal_one_device(case: Case) -> None:
    check(case, "exact")


def check_random(seeds: range) -> None:
    found = []
    for seed in seeds:
        torch._dynamo.reset()
        made = program(seed)
        said = verdict(made, partial(simulated, options=shardc.Options(chooser="exact")))
        if said is not None:
            found.append(f"{said}\n{made}")
    assert not found, "\n\n".join(found)


def test_some_random_programs_equal_one_device() -> None:
    check_random(range(8))


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_random_programs_equal_one_device(part: int) -> None:
    check_random(range(50 * part, 50 * (part + 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("chooser", "most"), [("greedy", 5.5e12), ("exact", 5.1e12)])
def test_an_axis_that_only_inputs_are_split_over_splits_the_backward_too(
    chooser: Literal["greedy", "exact"], most: float
) -> None:
    """A 64th of what one device does is 5.05e12 operations."""
    model, given = llama.llama3_8b(1)
    plan = shardc.ddp("dp") | shardc.Plan(inputs={"tokens": ("dp", "cp")})
    options = shardc.Options(chooser=chooser)
    module = shardc.compile(model, shardc.Mesh(dp=8, cp=8), plan, loss=llama.loss, options=options)
    assert module.lower(*given, *given).schedule().flops <= most
