"""Outputs of a program as DTensors on the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardc.ir.graph import Role
from shardc.runtime.border import follow
from shardc.runtime.storage import parameter_spec


def as_dtensors(outputs: Sequence[Any], roles: Sequence[Role], device_mesh: DeviceMesh) -> list[Any]:
    """Wraps local output tensors as DTensors of the compiled layout; other values are returned as they are.

    A DTensor gradient is brought to the output's layout in the backward, pending sums reduced. It is the gradient of
    one global loss, so the plan's ``reduce`` (for losses that each rank computes) does not apply.

    Args:
        outputs: flat outputs of a call, at the local shapes of ``roles``, which are of kind "output".

    Raises:
        LayoutError: DTensor placements cannot express a layout.
    """
    out: list[Any] = []
    wrapped: dict[int, Any] = {}
    for value, role in zip(outputs, roles, strict=True):
        if isinstance(value, Tensor) and id(value) not in wrapped:
            assert role.layout is not None
            spec = parameter_spec(role.layout, role.layout.shape, value.dtype, device_mesh)
            wrapped[id(value)] = _ToDTensor.apply(value, spec)
            follow(value, wrapped[id(value)], role.index)
        out.append(wrapped.get(id(value), value))
    return out


class _ToDTensor(torch.autograd.Function):
    """Wraps a local tensor as a DTensor; its backward turns a DTensor gradient into a local tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> Tensor:
        ctx.spec = spec
        if not (local.is_floating_point() or local.is_complex()):
            out = DTensor(local.view_as(local), spec, requires_grad=False)
            ctx.mark_non_differentiable(out)
            return out
        out = DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)
        return out.view_as(out) if local._is_view() else out  # a view cannot be changed in place here

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        placements = [Replicate() if p.is_partial() else p for p in ctx.spec.placements]
        return grad.redistribute(placements=placements).to_local(), None
