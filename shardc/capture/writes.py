"""Finds calls in Dynamo's graph that change a tensor in place."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def written(node: fx.Node) -> list[fx.Node]:
    """Return those operands of a call that the call may change in place."""
    if node.op in _NO_CALL or not _may_write(node):
        return []
    if node.target is operator.setitem or node.op == "call_method" and node.target.endswith("_"):
        return [x for x in node.args[:1] if isinstance(x, fx.Node)]
    return node.all_input_nodes


def _may_write(node: fx.Node) -> bool:
    """Return whether a call may change an operand in place."""
    target: Any = node.target
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
        return True
    name = target if isinstance(target, str) else getattr(target, "__name__", "_")
    if target is operator.setitem or getattr(operator, name, None) is target and name in _IN_PLACE:
        return True
    if hasattr(target, "_schema"):
        return bool(target._schema.is_mutable)
    if name.endswith("_") and not name.endswith("__") or "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    # A True by position may be that of `inplace`.
    return isinstance(target, Callable) and any(x is True for x in node.args) and _has_inplace(target)  # type: ignore[arg-type]


def _has_inplace(target: Callable[..., object]) -> bool:
    """Return whether the function ``target`` has a parameter named ``inplace``."""
    try:
        return "inplace" in inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False


_NO_CALL = ("placeholder", "get_attr", "output")
_IN_PLACE = frozenset(name for name in vars(operator) if name.startswith("i") and hasattr(operator, f"__{name}__"))
