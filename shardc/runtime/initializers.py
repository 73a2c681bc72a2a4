"""A model's own initialisation methods: on a compiled module, they run shard by shard."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardc.errors import MeshError
from shardc.runtime.initialize import Slot, attributes, check_slots, shardwise
from shardc.runtime.storage import cut, refill

if TYPE_CHECKING:
    from shardc.runtime.state import State

# Names of initialisation methods in libraries and models.
_INITIALISES = re.compile(
    r"_{0,2}(re)?(init|initiali[sz]e|reset|set_init)(_?(all|model|module))?"
    r"(_?(weights?|params?|parameters?|buffers?|embeddings?|linears?|layers?))?_?"
)


def initializers(cls: Any) -> dict[str, Any]:
    """Returns wrappers of the methods of ``cls`` whose names say that they initialise (``init_weights``).

    What they write to parameters and buffers reaches the shards, with the values of one device; attributes that they
    set stay.
    """
    methods = {name: inspect.getattr_static(cls, name, None) for name in dir(cls) if _INITIALISES.fullmatch(name)}
    return {name: _shardwise(method) for name, method in methods.items() if isinstance(method, FunctionType)}


def _shardwise(method: FunctionType) -> Any:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: State | None = vars(self).get("shardc")
        if state is None:  # a slice of a container
            return method(self, *args, **kwargs)
        with state.tells():
            result = initialise(state, lambda model: method(model, *args, **kwargs))
        return self if result is state.params.view else result

    return call


def initialise(state: State, run: Callable[[nn.Module], Any], complete: bool = False) -> Any:
    """Calls ``run`` with the model and copies what it writes into the shards; returns its result. All ranks call it.

    Args:
        complete: whether all tensors on ``meta`` must be filled.

    Raises:
        InitError: an op cannot run shard by shard, or a tensor was filled in part or replaced by one of another kind.
            No parameter or buffer is changed then.
    """
    if state.spec.device_mesh is None:
        raise MeshError(f"the module was compiled for the abstract mesh {state.spec.mesh} and holds no shards")
    state.check()
    with shardwise(state.params.view, state.spec.storages, state.spec.rank) as slots:
        result = run(state.params.view)
        check_slots(state.params.view, slots)
        written = [slot for slot in slots if complete or slot.shard.touched or slot.now is not slot.stand_in]
        values = {id(slot): slot.value() for slot in written}
    fresh: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for slot in written:
            _write(state, slot, values[id(slot)], fresh)
        for slot in slots:
            _note_attributes(slot)
    state.params.fresh = True
    return result


def _note_attributes(slot: Slot) -> None:
    """Copies attributes and ``requires_grad`` from the stand-in to the tensor."""
    now: Any = slot.now
    slot.before.requires_grad_(now.requires_grad)
    vars(slot.before).update(attributes(now))


def _write(state: State, slot: Slot, value: torch.Tensor, fresh: dict[int, torch.Tensor]) -> None:
    before: Any = slot.before
    if slot.kind == "_buffers":
        if slot.now is not slot.stand_in or before.is_meta:
            slot.module._buffers[slot.key] = fresh.setdefault(id(before), value.to(state.spec.device))
        else:
            before.copy_(value)
    elif before.is_meta:
        storage = state.spec.storages[slot.shard.name]
        refill(before, state.spec.homes[slot.shard.name].keep(value.to(before.dtype)), storage, state.spec.rank)
    else:
        local = before._local_tensor
        local.copy_(cut(value, local.shape))
