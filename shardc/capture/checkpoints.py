"""Rewrites forms of activation checkpointing that Dynamo cannot trace as calls of `torch.utils.checkpoint.checkpoint`,
which it can.

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
from shardc.capture.queried_states import Args, Kwargs, Translator

_MODULE = checkpoint_activation.__name__


@contextmanager
def sequential_traced() -> Iterator[None]:
    """Context manager in which Dynamo traces torch's ``checkpoint_sequential`` and its helper functions, which it
    otherwise skips.
    """
    inlined = trace_rules.get_mod_inlinelist()  # Dynamo's own set of path prefixes of files that it traces
    new = {Path(checkpoint_sequential.__code__.co_filename).with_suffix("").as_posix()} - inlined
    inlined |= new
    try:
        yield
    finally:
        inlined -= new


def _refused(*args: PyTree) -> None:
    """Stops Dynamo's trace with the reason "CheckpointFunction.apply". Replaces ``CheckpointFunction.forward`` (the
    reentrant checkpoint) in a trace.
    """
    torch._dynamo.graph_break(msg="CheckpointFunction.apply")


_call = CheckpointHigherOrderVariable._call_function


def _call_with_function(
    self: CheckpointHigherOrderVariable, tx: Translator, args: Args, kwargs: Kwargs
) -> VariableTracker:
    """Traces a checkpoint call by Dynamo's own handler and returns its result. A ``context_fn`` that Dynamo refuses (a
    method, or defined in forward) is first replaced by a plain function.
    """
    context_fn = kwargs.get("context_fn")
    if isinstance(context_fn, NestedUserFunctionVariable | UserMethodVariable):
        kwargs = {**kwargs, "context_fn": UserFunctionVariable(_plain(context_fn))}
    return _call(self, tx, args, kwargs)


def _plain(context_fn: NestedUserFunctionVariable | UserMethodVariable) -> FunctionType:
    """Returns a plain function that does what ``context_fn``, a variable of Dynamo's trace, does. Raises Unsupported if
    the function closes over traced values.
    """
    # A method of an object that exists outside of the trace.
    if isinstance(context_fn, UserMethodVariable) and hasattr(context_fn.obj, "value"):
        method = MethodType(context_fn.fn, context_fn.obj.value)
        return cast(FunctionType, lambda: method())
    try:
        return context_fn.as_python_constant()
    except NotImplementedError as error:
        raise Unsupported(f"context_fn of a checkpoint: {error}") from error


_partition_step = HopJointGraph.partition


def _partition(self: HopJointGraph, *args: Any, **kwargs: Any) -> HopPartitionedGraph:
    """Cuts the step of a scan into forward and backward as torch does, and returns both. First it removes the marks of
    a checkpoint around the scan from the step's ops.

    For the checkpoint the scan runs again in backward as a whole, by the mark on the scan. By marks on its ops, each
    step of backward would also compute the step of forward again.
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
    """Return name -> value of the attributes that ``module`` needs in a trace in place of torch's composable
    ``checkpoint``; {} if the module does not use it.
    """
    pre_hook = _composable_hook(module._forward_pre_hooks)
    if pre_hook is None:
        return {}
    hooks = {kind: _without(getattr(module, kind)) for kind in ("_forward_pre_hooks", "_forward_hooks")}
    # The options that the user gave `checkpoint` are closure variables of its hook.
    closure = dict(
        zip(pre_hook.__code__.co_freevars, (cell.cell_contents for cell in pre_hook.__closure__ or ()), strict=True)
    )
    return {**hooks, "forward": MethodType(_checkpointed(module.forward, closure["user_context_fns"]), module)}


def _checkpointed(forward: Callable[..., PyTree], context_fn: Callable[..., Any] | None) -> Callable[..., PyTree]:
    """Return a method that calls ``forward`` under `torch.utils.checkpoint.checkpoint`, with ``context_fn``
    if given.
    """
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def checkpointed(self: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return checkpointed


def _composable_hook(hooks: dict[int, Any]) -> FunctionType | None:
    """Return the hook in ``hooks`` that torch's composable ``checkpoint`` registered; None if there is none."""
    return next((x for x in hooks.values() if getattr(x, "__module__", "") == _MODULE), None)


def _without(hooks: dict[int, Any]) -> OrderedDict[int, Any]:
    """Return ``hooks`` without those of torch's composable ``checkpoint``."""
    return OrderedDict((key, x) for key, x in hooks.items() if getattr(x, "__module__", "") != _MODULE)
