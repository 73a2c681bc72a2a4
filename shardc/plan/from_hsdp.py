"""Reads the arguments of hyper-parallel's ``hsdp()`` into a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, TypeGuard

import torch

from shardc.errors import PlanError
from shardc.plan.constructors import fsdp, precision
from shardc.plan.value import Plan

_KB = 1024
_LEVELS = {"level1": 1, "level2": 2, "level3": 3}
# The arguments that may differ by cell, with their defaults.
_CELL = {"shard_size": -1, "threshold": 64, "optimizer_level": "level1", "reduce_dtype": None}


def hsdp_plan(
    shard_size: int = -1,
    threshold: int = 64,
    optimizer_level: str = "level1",
    enable_grad_accumulation: bool = False,
    grad_scale: float = 1.0,
    reduce_dtype: torch.dtype | None = None,
    comm_async: bool = False,
    comm_fusion: bool = False,
    bucket_size: int = -1,
    *,
    axis: str | Sequence[str] = "dp",
    cells: Mapping[str, Mapping[str, Any]] | None = None,
    use_eager_hook: bool = True,
) -> Plan:
    """Return the plan for the arguments of hyper-parallel's ``hsdp(cell, ...)``, with its meanings, units and defaults.

    As there, gradients are summed over the ranks, not averaged: divide the loss, or pass ``grad_scale=1 / ranks``.
    If a dim does not divide, hyper-parallel splits a parameter over fewer ranks; here it is padded.

    Args:
        shard_size: ranks that a parameter is split over, -1 for all of ``axis``.
        threshold: parameters of fewer KB (1024 bytes) stay whole.
        optimizer_level: "level1" splits parameters and optimizer state, "level2" gradients too, "level3" gathers
            parameters again in backward.
        enable_grad_accumulation: the module starts as after ``set_requires_grad_sync(False)``.
        grad_scale: a factor on every gradient, a float.
        reduce_dtype: dtype that gradients are reduced in; their own by default.
        comm_async: overlap communication with compute. (You never wait by hand, with it or without.)
        comm_fusion: fuse collectives into buckets.
        bucket_size: KB of a bucket if they are fused; -1 for one bucket of all, 0 for none.
        axis: the mesh axis (or axes) of the data-parallel ranks, which hyper-parallel takes from the cell's layout.
        cells: module glob -> arguments of a call of ``hsdp()`` for these cells alone: ``shard_size``, ``threshold``,
            ``optimizer_level`` and ``reduce_dtype``, with hyper-parallel's defaults. The last match wins. The other
            arguments hold for the model.
        use_eager_hook: there, eager mode or graph mode; no difference here (``shardc.compile(backend="eager")`` runs op
            by op).

    Raises:
        PlanError: as ``hsdp()`` does, for a size that is neither positive nor -1, an unknown level or a value of
            another type; an argument of ``cells`` that is none of its four.

    >>> hsdp_plan(shard_size=4, optimizer_level="level3", comm_async=True)
    fsdp("dp", level=3, threshold=65536, shard_size=4) | Plan(reduce="sum", bucket_size=0)
    """
    cell_arguments = (shard_size, threshold, optimizer_level, reduce_dtype)
    _check_cell(root := dict(zip(_CELL, cell_arguments, strict=True)))
    for name, value in {
        "enable_grad_accumulation": enable_grad_accumulation, "comm_async": comm_async, "comm_fusion": comm_fusion,
        "use_eager_hook": use_eager_hook,
    }.items():  # fmt: skip
        _check(name, value, isinstance(value, bool), "True or False")
    _check("grad_scale", grad_scale, isinstance(grad_scale, float), "a float, such as 0.5")
    _check("bucket_size", bucket_size, _is_int(bucket_size) and bucket_size >= -1, "a number of KB, or -1")
    size = (bucket_size * _KB if bucket_size > 0 else bucket_size) if comm_fusion else 0
    _check("cells", cells, isinstance(cells, Mapping | None), 'a table such as {"layers.*": {"threshold": 0}}')
    by_cell = {glob: _cell(glob, arguments) for glob, arguments in (cells or {}).items()}
    plan = fsdp(
        axis, _LEVELS[optimizer_level], threshold * _KB, shard_size,
        overrides={f"{glob}.*": cell["shard_size"] for glob, cell in by_cell.items()},
        levels={f"{glob}.*": _LEVELS[cell["optimizer_level"]] for glob, cell in by_cell.items()},
        thresholds={f"{glob}.*": cell["threshold"] * _KB for glob, cell in by_cell.items()},
    )  # fmt: skip
    reduced: dict[Any, dict[str, Any]] = {(): root, **by_cell}
    if any(cell["reduce_dtype"] is not None for cell in reduced.values()):
        plan = reduce(or_, (precision(reduce=cell["reduce_dtype"], modules=of) for of, cell in reduced.items()), plan)
    return plan | Plan(
        reduce="sum",
        grad_scale=grad_scale if grad_scale != 1.0 else None,
        accumulate=True if enable_grad_accumulation else None,
        overlap=None if comm_async else False,
        bucket_size=size,
    )


def _cell(glob: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of the call of ``hsdp()`` for the cells (groups of parameters) that ``glob`` matches: name
    -> value, checked, with defaults filled in.
    """
    _check(f"cells[{glob!r}]", arguments, isinstance(arguments, Mapping), "a table of arguments of hsdp()")
    cell = dict(_CELL) | dict(arguments)
    for name in arguments:
        _check(f"cells[{glob!r}]", name, name in _CELL, f"one of {list(_CELL)}; the others hold for the whole model")
    _check_cell(cell)
    return cell


def _check_cell(cell: Mapping[str, Any]) -> None:
    """Raise PlanError if an argument that may differ by cell is invalid."""
    size, least, level, dtype = (cell[name] for name in _CELL)
    _check("shard_size", size, _is_int(size) and (size > 0 or size == -1), "positive or -1")
    _check("threshold", least, _is_int(least) and least >= 0, "a number of KB, 0 or more")
    _check("optimizer_level", level, level in list(_LEVELS), f"one of {list(_LEVELS)}")
    _check("reduce_dtype", dtype, dtype is None or isinstance(dtype, torch.dtype), "a torch.dtype")


def _is_int(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: object, good: bool, wanted: str) -> None:
    """Raise PlanError about the ``value`` of argument ``name`` unless ``good``. ``wanted`` describes valid values."""
    if not good:
        raise PlanError(f"{name}={value!r} is not {wanted}", plan_entry=f"hsdp_plan({name}={value!r})")
