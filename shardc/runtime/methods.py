"""Methods besides ``forward`` that run as compiled programs, and token counts of expert layers."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn

from shardc._compat import PyTree
from shardc.errors import InputError
from shardc.ir.comm_volume import group_axes
from shardc.runtime.module import ShardedModule
from shardc.runtime.state import State
from shardc.validate import typed


@typed()
def register_forward_method(module: nn.Module, name: str) -> None:
    """Compiles the method ``name`` of a module: a call of the method then runs a program, as a call of the module
    does. Corresponds to FSDP2's function of the same name.

    It takes shards of inputs and returns shards of outputs, and is compiled at its first calls. The module's forward
    hooks run around it. It may call submodules and other methods, but not the module or its ``forward``: a method that
    does so needs no registering.

    Args:
        module: from `shardc.compile`; other modules are left as they are, so that a script runs without shardc too.
        name: a method of the model's class.

    Raises:
        InputError: the module was compiled with ``loss=``, or the model's class does not define the method.
    """
    if not isinstance(module, ShardedModule):
        return
    # Bases of a compiled module's class: `ShardedModule` (or a subclass), the model's class, `BehindModel`.
    front, cls, _ = type(module).__bases__
    method = inspect.getattr_static(cls, name, None)
    if not isinstance(method, FunctionType) or hasattr(front, name):
        raise InputError(f"{cls.__name__} has no method {name!r} of its own", fix="name one that its class defines")
    if module.shardc.cache.build.loss is not None:
        raise InputError(
            f"the module was compiled with loss=, and {name!r} returns no argument of it",
            fix="compile it without loss=, and take the loss of what the module returns",
        )

    @torch.compiler.disable
    @functools.wraps(method)
    def call(self: ShardedModule, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the program of ``method``, as that of a forward that is set for the time of the call."""
        before = vars(self).get("forward")
        vars(self)["forward"] = MethodType(method, self)  # a call runs the program of the present forward
        try:
            return ShardedModule.forward(self, *args, **kwargs)
        finally:
            del vars(self)["forward"]
            if before is not None:
                vars(self)["forward"] = before

    setattr(type(module), name, call)  # only the class of this compiled module


def expert_tokens(module: nn.Module) -> dict[str, Tensor]:
    """Returns how many tokens each expert of ``module`` got in the last forward, summed over ranks. All ranks call
    it.

    A step only counts on the device, without synchronisation.

    Returns:
        By name of the module with the experts: int64 [experts], the same on every rank.

    Raises:
        InputError: the module was not compiled by `shardc.compile` for a DeviceMesh.
    """
    state: State | None = getattr(module, "shardc", None)
    groups = None if state is None else state.spec.groups
    if state is None or groups is None:
        raise InputError(
            f"{type(module).__name__} has no ranks", fix="pass what shardc.compile returned for a DeviceMesh"
        )
    out = {}
    with groups.consistency.shares_errors(), groups.consistency.communicates("expert_tokens()"):
        for where, (counts, over) in state.cache.routing.tokens.items():
            if over:  # name of the group of ranks that have other tokens; "" if there are none
                axes = group_axes(over, groups.mesh) or ()
                started = torch.ops._c10d_functional.all_reduce(counts, "sum", groups.add([axes])[over])
                counts = torch.ops._c10d_functional.wait_tensor(started)
            out[where] = counts.clone()  # the caller's, whatever becomes of it
    return out
