"""Parameters in their storage layout: padded local buffers, and the DTensors that users see.

A dim that does not divide is padded at its end, so a layout's global shape may exceed the parameter's. Compiled graphs
work on the padded local tensor. The DTensor's local tensor is a view of it without the padding, or a copy if the view
would not be contiguous (torch's fused optimizers compute wrong values on such). Sizes follow ``torch.chunk`` as in
DTensor: 10 elements over 4 ranks are 3, 3, 3, 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardc import _compat
from shardc.errors import LayoutError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime import dtensor_ops, gathered
from shardc.runtime.owned import OwnedLayout, stored_placements
from shardc.runtime.shards import flat_index

# Attribute of a DTensor's local tensor: the padded buffer that it views.
_PADDED = "shardc_padded"
Hook = Callable[[Tensor], Tensor | None]

dtensor_ops.install_pickling()  # when this is imported: a file may be read before any module is compiled


class GradHooks(OrderedDict[int, Hook]):
    """Gradient hooks of a tensor that a compiled program takes or returns: id -> hook. Hooks are not called with
    gradient None.

    Autograd sees the program as one function, which returns None for tensors without gradient, and would pass None to
    hooks.
    """

    def __setitem__(self, key: int, hook: Hook) -> None:
        super().__setitem__(key, lambda grad: None if grad is None else hook(grad))


def local_indices(storage: Layout, shape: Sequence[int], dim: int, rank: int) -> Sequence[int]:
    """Returns which indices along ``dim`` of a tensor of global ``shape`` the shard of ``rank`` has: ascending,
    without padding.

    They are a `range` if contiguous. The layout writes an index in digits, slowest first, each split by a mesh axis or
    local (axis None); ``storage.shape`` is the padded global shape.
    """
    if dim == 0 and isinstance(storage, OwnedLayout) and not storage.local:
        return range(0)  # another pipeline stage stores the tensor
    digits, size = storage.dims[dim], shape[dim]
    if all(digit.axis is not None for digit in digits[:-1]):
        # Axes, then at most one local digit: one block, at this rank's index along the axes.
        block = storage.shape[dim] // prod(storage.mesh.size(axis) for axis in storage.dim_axes(dim))
        number = flat_index(storage.mesh, storage.dim_axes(dim), rank)
        return range(min(number * block, size), min((number + 1) * block, size))
    index = storage.local_index(dim, rank)  # ascending: padding is at the end
    return index[: bisect_left(index, size)]  # those below the unpadded size


def unpadded_shape(storage: Layout, shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """Returns the local shape on ``rank`` without padding; a dim may be 0."""
    if storage.shape == tuple(shape):
        return storage.local_shape
    return tuple(len(local_indices(storage, shape, dim, rank)) for dim in range(len(shape)))


def take(tensor: torch.Tensor, dim: int, index: Sequence[int]) -> torch.Tensor:
    """Selects the elements at the ascending ``index`` along ``dim``: a view if they are contiguous, else a copy."""
    if not index or index[-1] - index[0] + 1 == len(index):
        return tensor.narrow(dim, index[0] if index else 0, len(index))
    return tensor.index_select(dim, torch.tensor(index, device=tensor.device))


def shard_tensor(whole: torch.Tensor, storage: Layout, rank: int) -> torch.Tensor:
    """Cuts the shard of ``rank`` out of the unsharded tensor ``whole``. Returns a contiguous copy, padded with zeros
    to ``storage.local_shape``.
    """
    _check_fits(storage, whole.shape)
    shard = whole.detach()
    for dim in range(whole.dim()):
        shard = take(shard, dim, local_indices(storage, whole.shape, dim, rank))
    # Zeros are needed for padding only.
    padded = (torch.empty if shard.shape == storage.local_shape else torch.zeros)(
        storage.local_shape, dtype=whole.dtype, device=whole.device
    )
    cut(padded, shard.shape).copy_(shard)
    return padded


def cut(padded: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns the view of ``padded`` with the first ``shape[dim]`` elements of each dim."""
    for dim, size in enumerate(shape):
        if padded.shape[dim] != size:
            padded = padded.narrow(dim, 0, size)
    return padded


def to_parameter(
    padded: torch.Tensor,
    storage: Layout,
    shape: Sequence[int],
    device_mesh: DeviceMesh,
    rank: int,
    requires_grad: bool = True,
) -> nn.Parameter:
    """Makes the DTensor parameter of global ``shape`` whose local tensor is ``padded`` without its padding.

    Args:
        padded: local tensor of shape ``storage.local_shape``.
        rank: rank on the mesh (`Groups.rank`).

    Raises:
        LayoutError: DTensor placements cannot express this layout at this shape.
    """
    spec = parameter_spec(storage, shape, padded.dtype, device_mesh)
    local = cut(padded, unpadded_shape(storage, shape, rank)).contiguous()
    expected, _ = compute_local_shape_and_global_offset(tuple(shape), device_mesh, spec.placements, skip_offset=True)
    if tuple(local.shape) != tuple(expected):
        # Axes that split a padded dim: over several, DTensor cuts in another way.
        axes = {axis for dim, size in enumerate(shape) if storage.shape[dim] != size for axis in storage.dim_axes(dim)}
        fix = f"split the dim that does not divide over one axis only, not over {sorted(axes)}"
        if Mesh.of(device_mesh) != storage.mesh:
            fix = "in overrides, give it a shard size that divides it, or the one that other parameters have"
        raise LayoutError(
            f"{list(shape)} stored as {storage} is {list(local.shape)} on rank {rank} of {device_mesh}, where DTensor "
            f"would cut to {list(expected)}",
            fix=fix,
        )
    # DTensor's own hooks for checkpoints take a shard for one box of the tensor.
    if not all(isinstance(local_indices(storage, shape, dim, rank), range) for dim in range(len(shape))):
        gathered.install_checkpointing()
    dtensor_ops.install(device_mesh)
    # nn.Parameter detaches, which creates a new local tensor: mark that one.
    param = nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=requires_grad)
    param._backward_hooks = GradHooks()
    # `padded_local` then returns the buffer without a copy.
    if local is not padded and _views(local, padded):
        setattr(param._local_tensor, _PADDED, padded)  # type: ignore[attr-defined]
    return param


def parameter_spec(storage: Layout, shape: Sequence[int], dtype: torch.dtype, device_mesh: DeviceMesh) -> DTensorSpec:
    """Returns the DTensorSpec of a contiguous tensor of global ``shape`` stored as ``storage``.

    Raises LayoutError if ``shape`` does not fit the layout, or DTensor placements cannot express it.
    """
    _check_fits(storage, shape)
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    placements = stored_placements(storage, Mesh.of(device_mesh))
    return _compat.dtensor_spec(device_mesh, placements, TensorMeta(torch.Size(shape), stride, dtype))


def padded_local(param: torch.Tensor, storage: Layout) -> torch.Tensor:
    """Returns the local tensor of ``param`` with padding, as compiled graphs take it.

    No copy while the parameter views its padded buffer. A copy, padded with zeros, if it cannot view one (padding not
    in the outermost dim) or if its local tensor was replaced.

    Raises:
        LayoutError: ``param`` is not a DTensor, or its local tensor is larger than the layout's shard.
    """
    if not isinstance(param, DTensor):
        raise LayoutError(
            f"a parameter of shape {list(param.shape)} is a {type(param).__name__}, not a DTensor",
            fix="load values into the module's own parameters instead of replacing them",
        )
    local = param._local_tensor
    if local.shape == storage.local_shape:
        return local.contiguous()
    padded = getattr(local, _PADDED, None)
    if padded is not None and _views(local, padded):  # else ``param.data`` or the like has replaced the memory
        return padded
    if any(have > room for have, room in zip(local.shape, storage.local_shape, strict=True)):
        raise LayoutError(f"a parameter's local tensor is {list(local.shape)}, larger than its shard of {storage}")
    padded = local.new_zeros(storage.local_shape)
    cut(padded, local.shape).copy_(local)
    return padded


def refill(param: nn.Parameter, padded: torch.Tensor, storage: Layout, rank: int) -> None:
    """Gives ``param``, a DTensor, the values of the padded local tensor ``padded``. The DTensor stays the same
    object.
    """
    # Swapped, so that optimizers and users that hold the parameter see the values.
    new = to_parameter(padded, storage, param.shape, param.device_mesh, rank, param.requires_grad)  # type: ignore[attr-defined]
    torch.utils.swap_tensors(param, new)


def grad_from_padded(padded: torch.Tensor, param: DTensor) -> DTensor:
    """Wraps a padded local gradient as a DTensor like ``param``, without the padding; a view if contiguous."""
    return DTensor(cut(padded, param._local_tensor.shape).contiguous(), param._spec, requires_grad=False)


def like_parameter(local: torch.Tensor, param: torch.Tensor) -> DTensor:
    """Wraps ``local`` as a DTensor with the mesh, placements and global shape of ``param``."""
    spec = param._spec  # type: ignore[attr-defined]
    # The spec has the parameter's dtype; optimizer state may have another.
    if local.dtype != param.dtype:
        spec = _compat.dtensor_spec(spec.mesh, spec.placements, TensorMeta(param.shape, param.stride(), local.dtype))
    return DTensor(local, spec, requires_grad=False)


def _views(local: torch.Tensor, padded: torch.Tensor) -> bool:
    """Whether ``local`` lies in the memory of ``padded``: the same first element, strides and dtype."""
    return (
        local.untyped_storage().data_ptr() == padded.untyped_storage().data_ptr()
        and local.storage_offset() == padded.storage_offset()
        and local.stride() == padded.stride()
        and local.dtype == padded.dtype
    )


def _check_fits(storage: Layout, shape: Sequence[int]) -> None:
    """Raises LayoutError if a tensor of global ``shape`` does not fit into the (padded) shape of ``storage``."""
    if len(shape) != storage.ndim or any(size > room for size, room in zip(shape, storage.shape, strict=True)):
        raise LayoutError(f"a tensor of shape {list(shape)} does not fit the storage layout {storage}")
