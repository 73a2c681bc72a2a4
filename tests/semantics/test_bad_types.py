"""Every argument of every public function, option and method that is of another type is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import shardc
from shardc.cost.hardware import find
from shardc.cost.model import CostModel
from shardc.errors import ShardcError
from shardc.runtime.module import BehindModel
from tests.semantics.bad_input import DP, Mlp, X, compiled


class Odd:
    """Nothing takes this."""

    def __repr__(self) -> str:
        return "<odd>"


MODULE = compiled()
PROGRAM = MODULE.lower(X)
# Functions and methods, and what they must be given.
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "compile": (shardc.compile, {"model": Mlp(), "mesh": DP, "plan": shardc.fsdp("dp"), "backend": "eager"}),
    "Options": (shardc.Options, {}),
    "CostModel": (CostModel, {}),
    "fsdp": (shardc.fsdp, {"axis": "dp"}),
    "hsdp": (shardc.hsdp, {}),
    "ddp": (shardc.ddp, {"axis": "dp"}),
    "tp": (shardc.tp, {"axis": "tp"}),
    "precision": (shardc.precision, {}),
    "offload": (shardc.offload, {}),
    "hsdp_plan": (shardc.hsdp_plan, {}),
    "Plan": (shardc.Plan, {}),
    "Plan.from_styles": (shardc.Plan.from_styles, {"styles": {}}),
    "Plan.from_hf": (shardc.Plan.from_hf, {"model": Mlp()}),
    "Plan.from_sharding_plan": (shardc.Plan.from_sharding_plan, {}),
    "Plan.load": (shardc.Plan.load, {"path": "/nowhere"}),
    "Plan.from_json": (shardc.Plan.from_json, {"text": shardc.Plan().to_json()}),
    "load": (shardc.load, {"folder": "/nowhere"}),
    "train_step": (shardc.train_step, {"module": MODULE, "optimizer": torch.optim.SGD(MODULE.parameters())}),
    "value_and_grad": (shardc.value_and_grad, {"module": MODULE}),
    "wrap": (shardc.optim.wrap, {"optimizer_cls": torch.optim.SGD, "module": MODULE}),
    "measure_links": (shardc.measure_links, {}),
    "Simulation": (shardc.Simulation, {}),
    "register_forward_method": (shardc.register_forward_method, {"module": MODULE, "name": "forward"}),
    "register_rule": (shardc.register_rule, {"op": "bad_types::op", "text": "i -> i"}),
    "local_map": (shardc.local_map, {"function": abs, "in_layouts": "_", "out_layouts": "_"}),
    "no_sync": (MODULE.no_sync, {}),
    "set_requires_grad_sync": (MODULE.set_requires_grad_sync, {"sync": True}),
    "zero_grad": (partial(BehindModel.zero_grad, MODULE), {}),
    "init_weights": (MODULE.init_weights, {}),
    "summon_full_params": (MODULE.summon_full_params, {}),
    "full_state_dict": (MODULE.full_state_dict, {}),
    "clip_grad_norm_": (MODULE.clip_grad_norm_, {"max_norm": 1.0}),
    "load_state_dict": (partial(BehindModel.load_state_dict, MODULE), {"state_dict": Mlp().state_dict()}),
    "text": (PROGRAM.text, {}),
    "draw": (PROGRAM.draw, {"name": "up.weight"}),
    "schedule": (PROGRAM.schedule, {}),
    "costs": (PROGRAM.costs, {}),
    "lint": (PROGRAM.lint, {}),
    "save": (PROGRAM.save, {}),
}
WRONG: dict[str, tuple[Any, ...]] = {
    "bool": ("x", 1, None), "str": (3, True, None), "int": ("x", 1.5, True, None), "float": ("x", None, float("nan")),
}  # fmt: skip
NUMBERS = {3: 3}  # what cannot be part of a plan's text
LATER = {("wrap", "params"), ("local_map", "in_layouts"), ("local_map", "out_layouts")}  # looked at later


def cases() -> Iterator[Any]:
    for name, (function, _) in FUNCTIONS.items():
        for parameter in inspect.signature(function).parameters.values():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and (name, parameter.name) not in LATER:
                for value in (Odd(), [Odd()], NUMBERS, *WRONG.get(str(parameter.annotation), ())):
                    yield pytest.param(name, parameter.name, value, id=f"{name}-{parameter.name}-{value!r}")


@pytest.mark.parametrize(("name", "parameter", "value"), list(cases()))
def test_it_is_refused_by_name(name: str, parameter: str, value: Any) -> None:
    function, given = FUNCTIONS[name]
    before = {key: param.clone() for key, param in MODULE.named_parameters()}
    with pytest.raises(ShardcError) as caught:
        function(**{**given, parameter: value})
    named = (parameter, "<odd>", "3", type(value).__name__)
    assert len(str(caught.value)) < 2000 and any(text in str(caught.value) for text in named), str(caught.value)
    assert all(torch.equal(param, before[key]) for key, param in MODULE.named_parameters())


def test_what_is_right_is_taken() -> None:
    """Numbers of either kind, lists for tuples, names of devices, and arguments by position."""
    MODULE.clip_grad_norm_(1, 2, True)
    MODULE.set_requires_grad_sync(True, "up.*")
    assert set(MODULE.full_state_dict("cpu")) == set(MODULE.full_state_dict(torch.device("cpu"), rank0_only=False))
    MODULE.load_state_dict(Mlp().state_dict(), True, assign=False)
    assert PROGRAM.schedule("h100", optimizer_copies=2) == PROGRAM.schedule(find("h100"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'param'|missing a required argument|got an un"):
        MODULE.no_sync(param="up.*")
