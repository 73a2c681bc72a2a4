"""Support of ``deepcopy`` for compiled modules."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardc.ir.clone import unsharded
from shardc.runtime.guard_cache import GuardCache
from shardc.runtime.storage import padded_local, to_parameter
from shardc.runtime.wire.buffers import Buffers

if TYPE_CHECKING:
    from shardc.runtime.state import State


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copies a compiled module without its gradients; compiled programs are shared. All ranks call it."""
    state: State = module.shardc  # type: ignore[assignment]
    state.check()
    state.sync.refuse("deepcopy")
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            memo[id(param)] = _copied_param(param, state, name)
    memo[id(state)] = None
    module_copy: Any = copy.deepcopy(unsharded(module), memo)
    module_copy.__class__ = type(module)
    memo[id(module)] = module_copy
    build: Any = state.build
    copied_state = replace(
        state,
        build=build.for_copy(),
        sync=state.sync.for_copy(),
        buffers=Buffers(),
        programs={},
        deferring={},
        variants=GuardCache(),
        call_cache={},
        read=dict(state.read),
        sources={},
        fresh=True,
        _runners={},
        _census=None,
        _checked=None,
        _watch=None,
        _variants_now={},
        around=copy.deepcopy(state.around, memo),
    )
    object.__setattr__(module_copy, "shardc", copied_state)
    copied_state.adopt(module_copy)
    for program in state.programs.values():
        copied_state.add(program)
    for (_, deferred), program in state.deferring.items():
        copied_state.add(program, deferred)
    return module_copy


def _copied_param(param: DTensor, state: State, name: str) -> nn.Parameter:
    """Copies a parameter onto a new padded buffer."""
    assert state.param_mesh is not None
    storage = state.storages[name]
    padded = padded_local(param.detach(), storage)
    value = torch.empty_like(padded) if padded.is_meta else state.homes[name].keep(padded.clone())
    shard = to_parameter(value, storage, param.shape, state.param_mesh, state.rank, param.requires_grad)
    if getattr(param, "grad_dtype", None) is not None:
        shard.grad_dtype = param.grad_dtype
    return shard
