"""Checkpoints that Dynamo does not trace, as calls of `torch.utils.checkpoint.checkpoint`, which it does.

- The composable ``checkpoint(module)`` is a pair of hooks, which run a generator around forward.
- ``checkpoint_sequential`` is among the functions that Dynamo skips; its code can be traced.
- A ``context_fn`` that forward defines, or that is a method, is one that Dynamo does not take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import NestedUserFunctionVariable, UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._higher_order_ops.partitioner import HopJointGraph, HopPartitionedGraph
from torch.distributed._composable import checkpoint_activation
from torch.utils.checkpoint import CheckpointFunction, _CachingTorchDispatchMode, checkpoint, checkpoint_sequential

from shardc._compat import PyTree

_MODULE = checkpoint_activation.__name__


@contextmanager
def sequential_traced() -> Iterator[None]:
    """Context manager in which Dynamo traces ``checkpoint_sequential``, and the functions that it calls in its file."""
    inlined = trace_rules.get_mod_inlinelist()
    new = {Path(checkpoint_sequential.__code__.co_filename).with_suffix("").as_posix()} - inlined
    inlined |= new
    try:
        yield
    finally:
        inlined -= new


def _refused(*args: PyTree) -> None:
    """Makes Dynamo stop with the reason "CheckpointFunction.apply"; replaces ``CheckpointFunction.forward`` where
    Dynamo traces its file.
    """
    torch._dynamo.graph_break(msg="CheckpointFunction.apply")


_call = CheckpointHigherOrderVariable._call_function


def _call_with_function(
    self: CheckpointHigherOrderVariable, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """Calls Dynamo's handler of a checkpoint and returns its result; a ``context_fn`` that is defined in forward, or
    that is a method, is passed as a plain function.
    """
    context_fn = kwargs.get("context_fn")
    if isinstance(context_fn, NestedUserFunctionVariable | UserMethodVariable):
        kwargs = {**kwargs, "context_fn": UserFunctionVariable(_plain(context_fn))}
    return _call(self, tx, args, kwargs)


def _plain(context_fn: NestedUserFunctionVariable | UserMethodVariable) -> FunctionType:
    """Returns the plain function of the traced ``context_fn``; raises Unsupported if it closes over values."""
    if isinstance(context_fn, UserMethodVariable) and hasattr(context_fn.obj, "value"):
        method = MethodType(context_fn.fn, context_fn.obj.value)
        return cast(FunctionType, lambda: method())
    try:
        return context_fn.as_python_constant()
    except NotImplementedError as error:
        raise Unsupported(f"context_fn of a checkpoint: {error}") from error


_partition_step = HopJointGraph.partition


def _partition(self: HopJointGraph, *args: Any, **kwargs: Any) -> HopPartitionedGraph:
    """Returns the step of a scan, cut into forward and backward as torch does, without the marks that a checkpoint
    around the scan left on the step's ops.
    """
    for node in self.joint_gm.graph.nodes:
        node.meta.pop("recompute", None)
    return _partition_step(self, *args, **kwargs)


# (owner, attribute name, replacement)
OTHER_FORMS: tuple[tuple[object, str, object], ...] = (
    (CheckpointFunction, "forward", staticmethod(_refused)),
    (CheckpointHigherOrderVariable, "_call_function", _call_with_function),
    (HopJointGraph, "partition", _partition),
    (_CachingTorchDispatchMode, "supports_higher_order_operators", True),  # loops and branches in a checkpoint
)


def composed(module: nn.Module) -> dict[str, object]:
    """Return name -> value of attributes that replace the composable checkpoint of ``module``; {} if it has none."""
    before = _composable_hook(module._forward_pre_hooks)
    if before is None:
        return {}
    hooks = {kind: _without(getattr(module, kind)) for kind in ("_forward_pre_hooks", "_forward_hooks")}
    cells = dict(
        zip(before.__code__.co_freevars, (cell.cell_contents for cell in before.__closure__ or ()), strict=True)
    )
    return {**hooks, "forward": MethodType(_checkpointed(module.forward, cells["user_context_fns"]), module)}


def _checkpointed(forward: Callable[..., PyTree], context_fn: Callable[..., Any] | None) -> Callable[..., PyTree]:
    """Return a method that calls ``forward`` under `torch.utils.checkpoint.checkpoint`, with ``context_fn``
    if given.
    """
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def checkpointed(self: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return checkpointed


def _composable_hook(hooks: dict[int, Any]) -> FunctionType | None:
    """Return the hook that torch's composable ``checkpoint`` registered; None if there is none."""
    return next((x for x in hooks.values() if getattr(x, "__module__", "") == _MODULE), None)


def _without(hooks: dict[int, Any]) -> OrderedDict[int, Any]:
    """Return ``hooks`` without those of torch's composable ``checkpoint``."""
    return OrderedDict((key, x) for key, x in hooks.items() if getattr(x, "__module__", "") != _MODULE)
