"""Reads the plans of hyper-parallel's ``shard_module`` into entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardc._compat import StridedShard
from shardc.errors import PlanError
from shardc.plan.entries import Entry, Param, Setting
from shardc.plan.entries.raw import activation_entries, port_entries
from shardc.plan.layout_spec import freeze, quote
from shardc.validate import checked


def sharding_plan_entries(
    plan: Mapping[str, object] | None,
    input_plan: Mapping[str, object] | None,
    output_plan: Mapping[str, object] | None,
    return_local_tensor: Iterable[str] | None,
) -> list[Entry]:
    """Return the entries of ``ShardingPlan(plan, input_plan, output_plan, return_local_tensor)``.

    Keys are parameter names, or module names followed by ``input`` or ``output``; those without a module are the inputs
    and outputs of the model. Values are alias tuples, placements or hyper-parallel's layouts, lists of these by
    position, or dicts by keyword. As with ``shard_module``, outputs are DTensors unless ``return_local_tensor`` is
    given.

    Raises:
        PlanError: an argument is not a dict, a key ends in neither ``input`` nor ``output``, or a value is not a
            layout.
    """
    entries: list[Entry] = []
    for what, table in (("plan", plan), ("input_plan", input_plan), ("output_plan", output_plan)):
        if not isinstance(table, Mapping | None):
            example = '{"input": ("dp", "None")}' if what != "plan" else '{"w": ("dp", "None")}'
            raise PlanError(
                f"{what} is a {type(table).__name__}, not a dict",
                plan_entry=f"Plan.from_sharding_plan({what}={table!r})",
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


def _translate(value: object) -> object:
    """Return ``value`` with hyper-parallel's layouts replaced by tuples of axis names, and its placements by
    torch's.
    """
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
    """Return hyper-parallel's placement ``value`` as torch's."""
    if value.is_replicate():
        return Replicate()
    if value.is_partial():
        return Partial({"prod": "product"}.get(value.reduce_op, value.reduce_op))
    factor = getattr(value, "split_factor", 1)
    return Shard(value.dim) if factor == 1 else StridedShard(value.dim, split_factor=factor)
