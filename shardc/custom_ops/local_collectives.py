"""`shardc.local`: the collectives of a `local_map` region, with gradients.

On a mesh they are functional collectives over the group of an axis. Outside of a compiled model every axis has one
rank, and they return their argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardc.custom_ops.region import ranks
from shardc.errors import MeshError
from shardc.ir.comm import group_name

_ops = torch.ops._c10d_functional


def size(axis: str) -> int:
    """Return the number of ranks along ``axis``.

    Raises:
        MeshError: the mesh has no such axis.
    """
    region = ranks()
    if region is None:
        return 1
    if axis not in region.mesh.axes:
        raise MeshError(f"a local_map function uses the axis {axis!r}, and the mesh is {region.mesh}")
    return region.mesh.size(axis)


def index(axis: str) -> Tensor:
    """Return this rank's index along ``axis``: int64 [1]."""
    region = ranks()
    return torch.zeros(1, dtype=torch.int64) if size(axis) == 1 or region is None else region.indices[axis]


def all_reduce(x: Tensor, axis: str) -> Tensor:
    """Return the sum of ``x`` over all ranks along ``axis``."""
    return x if size(axis) == 1 else _apply(_sum, _sum, x, axis)


def all_gather(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """Return ``x`` of all ranks along ``axis``, concatenated along ``dim``."""
    return x if size(axis) == 1 else _apply(_gather, _scatter, x.movedim(dim, 0), axis).movedim(0, dim)


def reduce_scatter(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """Return this rank's shard, along ``dim``, of the sum of ``x`` over all ranks along ``axis``."""
    return x if size(axis) == 1 else _apply(_scatter, _gather, x.movedim(dim, 0), axis).movedim(0, dim)


def all_to_all(x: Tensor, axis: str, split: int, join: int) -> Tensor:
    """Send chunk r of ``x`` along dim ``split`` to rank r; concatenate the received chunks along dim ``join``."""
    n = size(axis)
    if n == 1:
        return x
    pieces = _apply(_exchange, _exchange, torch.cat([*x.movedim(split, 0).chunk(n)]), axis).chunk(n)
    return torch.cat([piece.movedim(0, split) for piece in pieces], join)


Collective = Callable[[Tensor, int, str], Tensor]


def _apply(forward_op: Collective, backward_op: Collective, x: Tensor, axis: str) -> Tensor:
    apply: Callable[..., Tensor] = _Differentiable.apply
    return apply(x.contiguous(), forward_op, backward_op, size(axis), group_name([axis]))


def _wait(started: Tensor) -> Tensor:
    done: Tensor = _ops.wait_tensor.default(started)
    return done


def _sum(x: Tensor, n: int, group: str) -> Tensor:
    return _wait(_ops.all_reduce.default(x, "sum", group))


def _gather(x: Tensor, n: int, group: str) -> Tensor:
    return _wait(_ops.all_gather_into_tensor.default(x, n, group))


def _scatter(x: Tensor, n: int, group: str) -> Tensor:
    return _wait(_ops.reduce_scatter_tensor.default(x, "sum", n, group))


def _exchange(x: Tensor, n: int, group: str) -> Tensor:
    sizes = [x.shape[0] // n] * n
    return _wait(_ops.all_to_all_single.default(x, sizes, sizes, group))


class _Differentiable(torch.autograd.Function):
    """A collective whose gradient is another collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_op: Collective, backward_op: Collective, n: int, group: str) -> Tensor:
        ctx.back, ctx.n, ctx.group = backward_op, n, group
        return forward_op(x, n, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grad.contiguous(), ctx.n, ctx.group), None, None, None, None
