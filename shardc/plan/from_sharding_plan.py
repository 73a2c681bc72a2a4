"""The plans of hyper-parallel's ``shard_module``, read into entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardc._compat import StridedShard
from shardc.errors import PlanError
from shardc.plan.entries import Entry, Param, Setting
from shardc.plan.entries.raw import activation_entries, port_entries
from shardc.plan.forms import freeze, quote
from shardc.validate import checked


def sharding_plan_entries(
    plan: Mapping[str, Any] | None,
    input_plan: Mapping[str, Any] | None,
    output_plan: Mapping[str, Any] | None,
    return_local_tensor: Iterable[str] | None,
) -> list[Entry]:
    """The entries of ``ShardingPlan(plan, input_plan, output_plan, return_local_tensor)``.

    Keys name parameters, and modules followed by ``input`` or ``output``; the root's are the model's own inputs and
    outputs. Values are alias tuples, placements or hyper-parallel's layouts, lists of these by position, dicts by
    keyword. Its ``shard_module`` returns DTensors unless a module is told to return local tensors; so does the plan.

    Raises:
        PlanError: something else than a dict, a key that ends in neither ``input`` nor ``output``, a value that is
            not a layout.
    """
    entries: list[Entry] = []
    for what, given in (("plan", plan), ("input_plan", input_plan), ("output_plan", output_plan)):
        if not isinstance(given, Mapping | None):
            example = '{"input": ("dp", "None")}' if what != "plan" else '{"w": ("dp", "None")}'
            raise PlanError(
                f"{what} is a {type(given).__name__}, not a dict",
                plan_entry=f"Plan.from_sharding_plan({what}={given!r})",
                fix=f"write {example}, with the name of what each layout is for; several inputs are a list in it",
            )
    for name, value in (plan or {}).items():
        entries.append(Param(name, freeze(_translate(value), f"plan[{quote(name)}]")))
    for key, value in [*(input_plan or {}).items(), *(output_plan or {}).items()]:
        module, _, where = str(key).rpartition(".")
        if where not in ("input", "output"):
            raise PlanError(
                f"key {key!r} ends in neither input nor output",
                plan_entry=f"Plan.from_sharding_plan({quote(str(key))})",
                fix=f'write "{key}.input" or "{key}.output"',
            )
        specs = _translate(value)
        entries += activation_entries(f"{module}:{where}", specs) if module else port_entries(f"{where}s", specs)
    fix = 'write ["relu"], a list of modules'
    local = checked(return_local_tensor, tuple[str, ...] | None, "return_local_tensor", PlanError, fix=fix)
    return [*entries, Setting("dtensor_outputs", not local)]


def _translate(value: Any) -> Any:
    """``value`` with hyper-parallel's layouts and placements as alias tuples and torch's placements."""
    if isinstance(value, dict):
        return {name: _translate(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_translate(item) for item in value)
    if hasattr(value, "alias_placements"):
        return tuple(_translate(item) for item in value.alias_placements)
    if hasattr(value, "is_replicate") and not isinstance(value, Placement):
        return _placement(value)
    return value


def _placement(value: Any) -> Placement:
    if value.is_replicate():
        return Replicate()
    if value.is_partial():
        return Partial({"prod": "product"}.get(value.reduce_op, value.reduce_op))
    factor = getattr(value, "split_factor", 1)
    return Shard(value.dim) if factor == 1 else StridedShard(value.dim, split_factor=factor)
