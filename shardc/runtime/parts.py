"""Parts of a compiled module say what to do where one is called by itself: their parameters are shards."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardc.errors import InputError

_CALL = "_compiled_call_impl"  # of a module: what torch calls instead of its forward, where it is not None


def guard(owner: nn.Module) -> None:
    """Guards all modules inside of ``owner``."""
    for part in owner.modules():
        if part is not owner and vars(part).get(_CALL) is None:
            vars(part)[_CALL] = MethodType(_call, part)


def unguard(owner: nn.Module) -> None:
    """Undoes `guard`."""
    for part in owner.modules():
        if getattr(vars(part).get(_CALL), "__func__", None) is _call:
            del vars(part)[_CALL]


def _call(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(param, DTensor) for param in part.parameters()):
        raise by_itself(type(part).__name__)
    return part._call_impl(*args, **kwargs)


def call_slice(part: nn.Module, cls: Any, args: Any, kwargs: Any) -> Any:
    """As ``part`` of class ``cls``, a slice of a compiled container, does."""
    if any(isinstance(param, DTensor) for param in part.parameters()):
        raise by_itself(cls.__name__)
    return cls.forward(part, *args, **kwargs)


def by_itself(kind: str) -> InputError:
    """The error for a part of class ``kind``."""
    return InputError(
        f"a part of a compiled module ({kind}) was called by itself; its parameters are shards",
        fix="call it inside of `with module.summon_full_params():`, or compile it as a module of its own; a method of "
        "the model may call it after shardc.register_forward_method(module, name of the method)",
    )
