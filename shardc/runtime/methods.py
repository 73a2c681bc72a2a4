"""Methods besides ``forward`` that run as programs of a compiled module, and what its experts noted."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import InputError
from shardc.ir.comm_volume import GROUP_PREFIX
from shardc.runtime.module import ShardedModule
from shardc.validate import typed


@typed()
def register_forward_method(module: nn.Module, name: str) -> None:
    """Makes ``module.<name>(...)`` a call of a program, as a call of the module is; FSDP2's function of that purpose.

    It takes shards of inputs and returns shards of outputs, as a module without ``loss=``. Its programs are compiled at
    its first calls. Forward hooks of the module run around it. It may call parts of the module and its other methods,
    but neither the module nor its ``forward``: a method that does so needs no registering for that.

    Args:
        module: from `shardc.compile`. Another module stays as it is, so that a script may run with or without shardc.
        name: of a method of the model's class.

    Raises:
        InputError: the module has a loss, or its model's class has no such method of its own.
    """
    if not isinstance(module, ShardedModule):
        return
    front, cls, _ = type(module).__bases__
    method = inspect.getattr_static(cls, name, None)
    if not isinstance(method, FunctionType) or hasattr(front, name):
        raise InputError(f"{cls.__name__} has no method {name!r} of its own", fix="name one that its class defines")
    build: Any = module.shardc.build
    if build.loss is not None:
        raise InputError(
            f"the module was compiled with loss=, and {name!r} returns no argument of it",
            fix="compile it without loss=, and take the loss of what the module returns",
        )

    @torch.compiler.disable
    @functools.wraps(method)
    def call(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
        before = vars(self).get("forward")
        vars(self)["forward"] = MethodType(method, self)  # a call runs the program of the forward that it finds
        try:
            return ShardedModule.forward(self, *args, **kwargs)
        finally:
            del vars(self)["forward"]
            if before is not None:
                vars(self)["forward"] = before

    setattr(type(module), name, call)  # a class that `shardc.compile` made for this module; the model's own stays


def expert_tokens(module: nn.Module) -> dict[str, Tensor]:
    """How many tokens each expert got in the last forward, over all ranks; every rank calls it.

    A step only counts, on the device, and waits for nothing.

    Returns:
        By the module that holds the experts, int64 [experts], the same on every rank.

    Raises:
        InputError: a module that `shardc.compile` did not return, or not for a DeviceMesh.
    """
    state: Any = getattr(module, "shardc", None)
    groups = getattr(state, "groups", None)
    if groups is None:
        raise InputError(
            f"{type(module).__name__} has no ranks", fix="pass what shardc.compile returned for a DeviceMesh"
        )
    out = {}
    with groups.agreement.tells(), groups.agreement.reduces("expert_tokens()"):
        for where, (counts, over) in state.tokens.items():
            if over:
                axes = tuple(over.removeprefix(GROUP_PREFIX).split(","))
                started = torch.ops._c10d_functional.all_reduce(counts, "sum", groups.add([axes])[over])
                counts = torch.ops._c10d_functional.wait_tensor(started)
            out[where] = counts
    return out
