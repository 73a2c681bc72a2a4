"""The arguments of hyper-parallel's ``hsdp()``, read into a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.errors import PlanError
from shardc.plan.value import Plan, fsdp, precision

_KB = 1024
_LEVELS = {"level1": 1, "level2": 2, "level3": 3}


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
) -> Plan:
    """The plan for the arguments of hyper-parallel's ``hsdp(cell, ...)``, with its meanings, units and defaults.

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

    Raises:
        PlanError: as ``hsdp()`` does, for a size that is neither positive nor -1, an unknown level or a value of
            another type.

    >>> hsdp_plan(shard_size=4, optimizer_level="level3", comm_async=True)
    fsdp("dp", level=3, threshold=65536, shard_size=4) | Plan(reduce="sum", bucket_size=0)
    """
    _check("shard_size", shard_size, _is_int(shard_size) and (shard_size > 0 or shard_size == -1), "positive or -1")
    _check("threshold", threshold, _is_int(threshold) and threshold >= 0, "a number of KB, 0 or more")
    _check("optimizer_level", optimizer_level, optimizer_level in _LEVELS, f"one of {list(_LEVELS)}")
    for name, value in {
        "enable_grad_accumulation": enable_grad_accumulation, "comm_async": comm_async, "comm_fusion": comm_fusion,
    }.items():  # fmt: skip
        _check(name, value, isinstance(value, bool), "True or False")
    _check("grad_scale", grad_scale, isinstance(grad_scale, float), "a float, such as 0.5")
    _check("reduce_dtype", reduce_dtype, reduce_dtype is None or isinstance(reduce_dtype, torch.dtype), "a torch.dtype")
    _check("bucket_size", bucket_size, _is_int(bucket_size) and bucket_size >= -1, "a number of KB, or -1")
    size = (bucket_size * _KB if bucket_size > 0 else bucket_size) if comm_fusion else 0
    plan = fsdp(axis, _LEVELS[optimizer_level], threshold * _KB, shard_size)
    if reduce_dtype is not None:
        plan |= precision(reduce=reduce_dtype)
    return plan | Plan(
        reduce="sum",
        grad_scale=grad_scale if grad_scale != 1.0 else None,
        accumulate=True if enable_grad_accumulation else None,
        overlap=None if comm_async else False,
        bucket_size=size,
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: Any, good: bool, wanted: str) -> None:
    if not good:
        raise PlanError(f"{name}={value!r} is not {wanted}", plan_entry=f"hsdp_plan({name}={value!r})")
