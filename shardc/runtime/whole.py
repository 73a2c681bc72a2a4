"""Whole views of sharded parameters: gathered tensors, state dicts, and a block in which a module holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.errors import LayoutError
from shardc.ir.layout import Layout
from shardc.runtime.storage import cut, parameter_spec, shard_tensor


def whole(tensor: DTensor, storage: Layout) -> Tensor:
    """The whole of a parameter, or of a gradient or optimizer state like it, without the pad; a tensor of its own.

    A collective call: all ranks of the mesh come here, for one tensor after the other in the same order.

    Args:
        tensor: whose local tensor is this rank's shard under ``storage``, without the pad.
    """
    local = tensor._local_tensor.detach()
    kind, home = tensor.device_mesh.device_type, local.device
    # What is kept on the host is gathered on the device, and goes back.
    there = local if local.device.type == kind else local.to(kind)
    # The tensor's own spec may have come from an op, which reads strided placements in another way.
    spec = parameter_spec(storage, tensor.shape, tensor.dtype, tensor.device_mesh)
    with torch.no_grad():
        full = DTensor(there, spec, requires_grad=False).full_tensor().to(home)
    return full.clone() if full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() else full


def write(param: DTensor, value: Tensor, storage: Layout, rank: int) -> None:
    """Copies this rank's shard of the whole tensor ``value`` into ``param``, which keeps its memory."""
    local = param._local_tensor
    with torch.no_grad():
        local.copy_(cut(shard_tensor(value, storage, rank), local.shape))


def full_state_dict(
    module: nn.Module, storages: Mapping[str, Layout], device: torch.device | str | None = None
) -> dict[str, Any]:
    """The state dict of the unsharded module: plain whole tensors under the original names.

    A collective call; every rank gets all of it.

    Args:
        device: where the tensors go, one after the other as they are gathered; by default where they are.
    """
    storage_of = {id(param): storages[name] for name, param in module.named_parameters()}
    gathered: dict[int, Tensor] = {}  # a tied parameter once
    out: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if id(value) not in gathered:
                storage = storage_of.get(id(value))
                full = whole(value, storage) if isinstance(value, DTensor) and storage else value.detach().clone()
                gathered[id(value)] = full.to(device) if device is not None else full
            value = gathered[id(value)]
        out[name] = value
    return out


@contextmanager
def summon_full_params(
    module: nn.Module, storages: Mapping[str, Layout], rank: int, writeback: bool = True
) -> Iterator[None]:
    """A block in which ``module`` holds plain whole parameters; afterwards the sharded ones are back, same objects.

    A collective call at entry; leaving it communicates nothing. Parameters have no ``.grad`` inside, tied ones are
    tied, and the module does not run.

    Args:
        writeback: each rank copies its shard of what it left in the whole parameters into the sharded ones, an
            exception in the block or not. Ranks must have made the same changes.

    Raises:
        LayoutError: at the end, a parameter was replaced by a tensor of another shape, or tied ones by several;
            nothing is written then.
    """
    named = {id(param): (name, param) for name, param in module.named_parameters()}
    wholes = {
        key: nn.Parameter(whole(param, storages[name]), requires_grad=param.requires_grad)  # type: ignore[arg-type]
        for key, (name, param) in named.items()
    }
    slots = [
        (held, key, param)
        for one in module.modules()
        for held in (one._parameters,)
        for key, param in held.items()
        if param is not None
    ]
    for held, key, param in slots:
        held[key] = wholes[id(param)]
    try:
        yield
    finally:
        left: dict[int, list[Tensor | None]] = {}
        for held, key, param in slots:
            left.setdefault(id(param), []).append(held.get(key))
            held[key] = param
        if writeback:
            changed = [(*named[key], _one(named[key], found)) for key, found in left.items()]
            for name, param, value in changed:
                write(param, value, storages[name], rank)  # type: ignore[arg-type]


def _one(named: tuple[str, Tensor], found: list[Tensor | None]) -> Tensor:
    """What the block left of one parameter, at all the places that it has."""
    name, param = named
    first = found[0]
    if any(value is not first for value in found):
        raise LayoutError(
            f"parameter {name!r} is tied, and was replaced at some of its places only",
            fix="change it in place, or replace it everywhere",
        )
    if first is None or first.shape != param.shape:
        became = "nothing" if first is None else f"a tensor of shape {list(first.shape)}"
        raise LayoutError(
            f"parameter {name!r} of shape {list(param.shape)} was replaced by {became}; nothing is written back",
            fix="keep its shape, or change the model and compile it again",
        )
    return first
