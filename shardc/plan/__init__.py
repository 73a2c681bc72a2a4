"""Plans: frozen, composable values that say where a model's tensors lie on a mesh."""

from shardc.plan.expression import parse_plan
from shardc.plan.from_hsdp import hsdp_plan
from shardc.plan.ports import (
    ActivationPin,
    batch_axes,
    resolve_activations,
    resolve_inputs,
    resolve_outputs,
)
from shardc.plan.resolve import ParamPlan, resolve_params
from shardc.plan.value import Plan, ddp, fsdp, hsdp, offload, precision, tp

__all__ = [
    "ActivationPin",
    "ParamPlan",
    "Plan",
    "batch_axes",
    "ddp",
    "fsdp",
    "hsdp",
    "hsdp_plan",
    "offload",
    "parse_plan",
    "precision",
    "resolve_activations",
    "resolve_inputs",
    "resolve_outputs",
    "resolve_params",
    "tp",
]
