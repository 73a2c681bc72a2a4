"""Errors for code that would treat shards as parameters: calls of submodules, and wrappers such as DDP and FSDP."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardc._compat import REGISTRY_KEY, STATE_KEY
from shardc.errors import InputError

_CALL = "_compiled_call_impl"  # attribute of a module that torch calls instead of its forward, if not None
_OTHER = "replicate"  # ``fully_shard`` of an outer module skips modules with this


class Refuses(dict[Any, Any]):
    """A module's registry entry for ``fully_shard`` and ``replicate``; raises when either looks itself up in it."""

    def __contains__(self, function: Any) -> bool:
        raise wrapped(getattr(function, "__name__", "fully_shard"))

    def __reduce__(self) -> Any:
        return Refuses, (dict(self),)


def wrapped(by: str) -> InputError:
    """Returns the error for a compiled module, or a submodule of it, that ``by`` (DDP, FSDP) would wrap."""
    return InputError(
        f"{by} is given a compiled module, which shards its parameters and reduces its gradients itself",
        fix="train the module as it is: its plan says what is sharded; with accelerate or Trainer, use Accelerator or "
        "Trainer of shardc.integrations.accelerate",
    )


def check_ddp(owner: nn.Module) -> None:
    """Raises InputError if ``owner``, a compiled module, is inside a DDP module, which would average its shards."""
    front = DistributedDataParallel._active_ddp_module
    if front is not None and not {*map(id, front._module_parameters)}.isdisjoint(map(id, owner.parameters())):
        raise wrapped("DistributedDataParallel")


def guard(owner: nn.Module) -> None:
    """Makes direct calls of submodules raise, and hides the modules from a ``fully_shard`` of a model around them."""
    for part in owner.modules():
        vars(part)[STATE_KEY] = Refuses(vars(part).get(STATE_KEY, {}))
        vars(part)[REGISTRY_KEY] = vars(part).get(REGISTRY_KEY, {}) | {_OTHER: None}
        if part is not owner and vars(part).get(_CALL) is None:
            vars(part)[_CALL] = MethodType(_call, part)


def unguard(owner: nn.Module) -> None:
    """Undoes `guard`."""
    for part in owner.modules():
        if isinstance(vars(part).get(STATE_KEY), Refuses):
            vars(part)[STATE_KEY] = dict(vars(part)[STATE_KEY])
            del vars(part)[REGISTRY_KEY][_OTHER]
        if getattr(vars(part).get(_CALL), "__func__", None) is _call:
            del vars(part)[_CALL]


def _call(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(param, DTensor) for param in part.parameters()):
        raise by_itself(type(part).__name__)
    return part._call_impl(*args, **kwargs)


def call_slice(part: nn.Module, cls: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``part``, a slice of a compiled container, as a ``cls``; raises InputError if it has sharded parameters."""
    if any(isinstance(param, DTensor) for param in part.parameters()):
        raise by_itself(cls.__name__)
    return cls.forward(part, *args, **kwargs)


def by_itself(kind: str) -> InputError:
    """Returns the error for a direct call of a submodule of class ``kind``."""
    return InputError(
        f"a part of a compiled module ({kind}) was called by itself; its parameters are shards",
        fix="call it inside of `with module.summon_full_params():`, or compile it as a module of its own; a method of "
        "the model may call it after shardc.register_forward_method(module, name of the method)",
    )
