"""Wraps a function of tensors as a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def as_module(function: Callable[..., Any]) -> nn.Module:
    """Return a module that calls ``function``, with its name and signature."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    name = getattr(function, "__name__", type(function).__name__)
    cls: Any = type(name, (nn.Module,), {"forward": forward, "__module__": function.__module__})
    return cls()
