"""The global gradient norm, as on one device: without padding, replicas and tied parameters counted once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.errors import LayoutError
from shardc.ir.comm import group_name
from shardc.ir.layout import Layout
from shardc.runtime.groups import Groups

_SMALL = (torch.float16, torch.bfloat16)


def clip_grad_norm_(
    module: nn.Module,
    storages: Mapping[str, Layout],
    groups: Groups,
    device: torch.device,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips gradients like ``torch.nn.utils.clip_grad_norm_`` on one device, by one all-reduce of a scalar.

    Of replicas, the one whose other coordinates are 0 is counted.

    Returns:
        The norm before clipping: a plain scalar, the same on all ranks, in the gradients' widest dtype (at least
        float32).

    Raises:
        LayoutError: a gradient's layout is not its parameter's.
        RuntimeError: the norm is not finite, under ``error_if_nonfinite``; gradients are unchanged then.
    """
    mesh = groups.mesh
    norms, grads, dtype = [torch.zeros((), dtype=torch.float64, device=device)], [], torch.float32
    for name, param in module.named_parameters():
        if param.grad is None:
            continue
        local = local_grad(name, param)
        grads.append(local)
        dtype = torch.promote_types(dtype, local.dtype.to_real())  # a norm of complex numbers is real
        if local.numel() and groups.rank in mesh.group(storages[name].bound, 0):
            wide = torch.float32 if local.dtype in _SMALL else local.dtype
            norms.append(torch.linalg.vector_norm(local, norm_type, dtype=wide).double().to(device))
    largest = norm_type == float("inf")
    stacked = torch.stack(norms)
    total = stacked.max() if largest else stacked.pow(norm_type).sum()
    if mesh.ranks > 1:
        name = groups.add([mesh.axes])[group_name(mesh.axes)]
        with groups.consistency.reduces("clip_grad_norm_()"):
            reduced = torch.ops._c10d_functional.all_reduce(total, "max" if largest else "sum", name)
            total = torch.ops._c10d_functional.wait_tensor(reduced)
    total = total if largest else total.pow(1.0 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; "
            "to scale them all the same, pass error_if_nonfinite=False"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    factors = {(grad.device, grad.dtype): factor.to(grad.device, grad.dtype) for grad in grads}
    for grad in grads:
        grad.mul_(factors[grad.device, grad.dtype])
    return total.to(dtype)


def local_grad(name: str, param: nn.Parameter) -> Tensor:
    """Returns this rank's shard of the gradient of ``param``; raises LayoutError if it has other placements."""
    grad = param.grad
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor) or grad.placements != param.placements:
        raise LayoutError(
            f"the gradient of parameter {name!r} is not laid out as the parameter is",
            fix="leave the gradients that backward made, or assign DTensors with the parameter's placements",
        )
    return grad._local_tensor
