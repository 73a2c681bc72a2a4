"""Unsharded values of sharded parameters: gathered tensors, full state dicts, and `summon_full_params`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.errors import LayoutError
from shardc.ir.inner import outer_tensors, rebuilt
from shardc.ir.layout import Layout
from shardc.runtime.groups import Groups
from shardc.runtime.owned import OwnedLayout
from shardc.runtime.shards import flat_index
from shardc.runtime.storage import cut, local_indices, parameter_spec, shard_tensor, unpadded_shape


def unshard(tensor: DTensor, storage: Layout) -> Tensor:
    """Returns the unsharded plain tensor of a parameter, gradient or optimizer state, without padding, in new memory.

    A collective: all ranks call it, for the same tensors in the same order.

    Args:
        tensor: DTensor whose local tensor is this rank's shard under ``storage``, without padding.
    """
    local = tensor._local_tensor.detach()
    kind, home = tensor.device_mesh.device_type, local.device
    # An offloaded tensor is gathered on the device, and moved back.
    source = local if local.device.type == kind else local.to(kind)
    # The tensor's own spec may come from an op, which treats strided placements differently.
    spec = parameter_spec(storage, tensor.shape, tensor.dtype, tensor.device_mesh)
    with torch.no_grad():
        full = DTensor(source, spec, requires_grad=False).full_tensor().to(home)
    return full.clone() if full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() else full


def unshard_on_first(tensor: DTensor, storage: Layout, groups: Groups) -> Tensor:
    """Gathers a parameter, without padding, to the CPU of the first rank; other ranks get a ``meta`` tensor.

    A collective. The first rank receives one shard at a time, in place if it is a contiguous block of the result.
    """
    local, shape = tensor._local_tensor.detach().contiguous(), tuple(tensor.shape)
    first, receiver = groups.first, groups.whole.everyone()[0]
    senders = groups.everyone()
    # Only ranks of the stage that stores the parameter have shards of it.
    if isinstance(storage, OwnedLayout):
        senders, storage = groups.of_stage(storage.owner), storage.on(storage.mesh)
    out = torch.empty(shape, dtype=tensor.dtype, device="cpu" if first else "meta")
    # Which shard each rank has: its index along the axes that split the storage.
    parts = [flat_index(storage.mesh, storage.bound, rank) for rank in range(storage.mesh.ranks)]
    for rank, (part, sender) in enumerate(zip(parts, senders, strict=True)):
        # Of replicas, only the first is sent, and empty shards are not.
        if parts.index(part) < rank or 0 in unpadded_shape(storage, shape, rank):
            continue
        if sender == dist.get_rank() and not first:
            dist.send(local, receiver)
        if first:
            _receive_shard(out, storage, rank, local, None if sender == receiver else sender)
    return out


def _receive_shard(out: Tensor, storage: Layout, rank: int, local: Tensor, sender: int | None) -> None:
    """Writes the shard of mesh rank ``rank`` into the unsharded tensor ``out``. Called on the first rank, which
    receives the shard if it is another rank's.

    Args:
        local: this (the first) rank's shard.
        sender: global rank of ``rank``; None for this one.
    """
    # Per dim, the indices of the shard; `view` has all elements between the first and the last.
    indices = [local_indices(storage, out.shape, dim, rank) for dim in range(out.dim())]
    view = out[tuple(slice(each[0], each[-1] + 1) for each in indices)]
    # A message can be received into `view`: the shard has all of its elements, in contiguous memory.
    is_block = view.is_contiguous() and local.device == out.device and tuple(map(len, indices)) == tuple(view.shape)
    piece = local if sender is None else view if is_block else local.new_empty([len(each) for each in indices])
    if sender is not None:
        dist.recv(piece, sender)
    if tuple(view.shape) == tuple(piece.shape):
        view.copy_(piece)
    else:
        # The shard is no box: its elements lie scattered in `view`.
        index = torch.meshgrid([torch.tensor(list(each)) for each in indices], indexing="ij")
        out[index] = piece.to(out.device)


def write(param: DTensor, value: Tensor, storage: Layout, rank: int) -> None:
    """Copies this rank's shard of the unsharded ``value``, under layout ``storage``, into ``param`` in place."""
    local = param._local_tensor
    with torch.no_grad():
        local.copy_(cut(shard_tensor(value, storage, rank), local.shape))


def full_state_dict(
    module: nn.Module, storages: Mapping[str, Layout], device: torch.device | str | None = None
) -> dict[str, Any]:
    """Returns the state dict of the unsharded module: plain tensors under the original names. A collective.

    Args:
        device: each tensor is moved there as soon as it is gathered; by default tensors stay where they are.
    """
    # By identity, as a state dict has all names of a tied parameter, and the layouts have one.
    storage_of = {id(param): storages[name] for name, param in module.named_parameters()}
    gathered: dict[int, Tensor] = {}  # tied parameters are gathered once
    out: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if id(value) not in gathered:
                storage = storage_of.get(id(value))
                full = unshard(value, storage) if isinstance(value, DTensor) and storage else value.detach().clone()
                gathered[id(value)] = full.to(device) if device is not None else full
            value = gathered[id(value)]
        out[name] = value
    return rebuilt(module, out)  # puts wrapper tensors in place of their inner tensors


def first_state_dict(
    module: nn.Module, storages: Mapping[str, Layout], groups: Groups, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Returns `full_state_dict` on the mesh's first rank only, on the CPU by default; an empty dict on other ranks."""
    # By identity: a state dict has all names of a tied parameter, which is gathered once.
    storage_of = {id(param): storages[name] for name, param in module.named_parameters()}
    gathered: dict[int, Tensor] = {}
    out: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, DTensor) and id(value) in storage_of:
            if id(value) not in gathered:
                full_param = unshard_on_first(value, storage_of[id(value)], groups)
                gathered[id(value)] = full_param.to(device) if device is not None and groups.first else full_param
            out[name] = gathered[id(value)]
        elif isinstance(value, Tensor):  # without a storage layout, such as a buffer
            full = value.full_tensor() if isinstance(value, DTensor) else value
            out[name] = full.detach().clone().to(device or "cpu") if groups.first else None
        else:
            out[name] = value
    return rebuilt(module, out) if groups.first else {}  # wrapper tensors in place of their inner tensors


@contextmanager
def summon_full_params(
    module: nn.Module, storages: Mapping[str, Layout], rank: int, writeback: bool = True, with_grads: bool = False
) -> Iterator[None]:
    """Context manager in which ``module`` has unsharded plain parameters; at exit the sharded ones are restored.

    A collective at entry; exit communicates nothing. Tied parameters stay tied. The module cannot run inside.

    Args:
        writeback: at exit, also after an exception, each rank copies its shard of the unsharded parameters back. Ranks
            must have made the same changes.
        with_grads: also unshard ``.grad``, and write it back with ``writeback``; otherwise ``.grad`` is None inside.

    Raises:
        LayoutError: at exit, if a parameter was replaced by a tensor of another shape, or tied ones by several; nothing
            is written then.
    """
    # By the id of the sharded parameter: its name and itself, and its unsharded stand-in.
    named = {id(param): (name, param) for name, param in module.named_parameters()}
    wholes = {
        param_id: nn.Parameter(unshard(param, storages[name]), requires_grad=param.requires_grad)  # type: ignore[arg-type]
        for param_id, (name, param) in named.items()
    }
    for param_id, (name, param) in named.items():
        if with_grads and param.grad is not None:
            wholes[param_id].grad_dtype = None  # allow any dtype
            wholes[param_id].grad = unshard(param.grad, storages[name])  # type: ignore[arg-type]
    # Each place of a parameter in the module, several for a tied one: (table of a submodule, key, parameter).
    slots = [
        (table, key, param)
        for submodule in module.modules()
        for table in (submodule._parameters,)
        for key, param in table.items()
        if param is not None
    ]
    for table, key, param in slots:
        table[key] = wholes[id(param)]
    try:
        # Where the user's parameters wrap other tensors (a quantised weight), the user sees the wrappers.
        with outer_tensors(module):
            yield
    finally:
        values_left: dict[int, list[Tensor | None]] = {}  # id of a parameter -> what the block left at its places
        for table, key, param in slots:
            values_left.setdefault(id(param), []).append(table.get(key))
            table[key] = param
        if writeback:
            # All are checked before the first is written.
            changed = [
                (*named[param_id], _replaced_value(named[param_id], values)) for param_id, values in values_left.items()
            ]
            for name, param, value in changed:
                write(param, value, storages[name], rank)  # type: ignore[arg-type]
                if with_grads:
                    _write_grad(param, value.grad, storages[name], rank)  # type: ignore[arg-type]


def _write_grad(param: DTensor, value: Tensor | None, storage: Layout, rank: int) -> None:
    """Sets the gradient of ``param`` to this rank's shard of ``value``, an unsharded gradient. Clears the gradient if
    ``value`` is None.
    """
    if value is None:
        param.grad = None
        return
    if param.grad is None:  # the user set a gradient in the block
        local = torch.empty_like(param._local_tensor, dtype=value.dtype)
        spec = parameter_spec(storage, param.shape, value.dtype, param.device_mesh)
        param.grad = DTensor(local, spec, requires_grad=False)
    write(param.grad, value, storage, rank)  # type: ignore[arg-type]


def _replaced_value(named: tuple[str, Tensor], values: list[Tensor | None]) -> Tensor:
    """Returns the unsharded tensor that replaces a parameter at the end of `summon_full_params`, as the user assigned
    it inside the context.

    Args:
        named: name and parameter.
        values: value at each of its places in the module.

    Raises:
        LayoutError: the values are several tensors, or of another shape.
    """
    name, param = named
    first = values[0]
    if any(value is not first for value in values):
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
