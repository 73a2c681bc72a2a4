"""Support of ``deepcopy`` for compiled modules."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardc.ir.clone import unsharded
from shardc.runtime.storage import padded_local, to_parameter

if TYPE_CHECKING:
    from shardc.runtime.state import State


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copies a compiled module without its gradients; compiled programs are shared. All ranks call it."""
    state: State = module.shardc  # type: ignore[assignment]
    state.check()
    state.params.sync.refuse("deepcopy")
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            memo[id(param)] = _copied_param(param, state, name)
    memo[id(state)] = None
    module_copy: Any = copy.deepcopy(unsharded(module), memo)
    module_copy.__class__ = type(module)
    memo[id(module)] = module_copy
    build: Any = state.cache.build
    copied_state = type(state)(module_copy, state.spec, build.for_copy(), state.params.sync.for_copy(), {}, state.found)
    copied_state.around = copy.deepcopy(state.around, memo)
    copied_state.cache.explicit, copied_state.cache.shapes = state.cache.explicit, dict(state.cache.shapes)
    for key, program in state.cache.programs.items():
        copied_state.cache.add(program, key.guards)
    return module_copy


def _copied_param(param: DTensor, state: State, name: str) -> nn.Parameter:
    """Returns a copy of ``param`` with a new padded buffer."""
    assert state.spec.param_mesh is not None
    storage = state.spec.storages[name]
    padded = padded_local(param.detach(), storage)
    value = torch.empty_like(padded) if padded.is_meta else state.spec.homes[name].keep(padded.clone())
    shard = to_parameter(value, storage, param.shape, state.spec.param_mesh, state.spec.rank, param.requires_grad)
    if getattr(param, "grad_dtype", None) is not None:
        shard.grad_dtype = param.grad_dtype
    return shard
