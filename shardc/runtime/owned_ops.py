"""Elementwise ops, copies and norms of DTensors some of which are `Owned` (stored whole on one coordinate of a mesh
axis).

DTensor takes `Owned` for a split of dim 0 and gives results an ordinary one, so these ops run on local tensors here:
optimizers and clipping. Others gather (`dtensor_ops.on_unsharded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardc import _compat
from shardc._compat import PyTree
from shardc.errors import LayoutError
from shardc.ir.op_traits import draws
from shardc.runtime.gathered import ReplicatedSpec, replicated, written
from shardc.runtime.owned import spec_like

aten = torch.ops.aten
pytree = _compat.pytree

# Copies, fills and factories: each element of the results depends on the one at its place, or on none.
COPIES = {
    aten.clone.default, aten._to_copy.default, aten.copy_.default, aten.fill_.Scalar, aten.zero_.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.detach.default, aten.alias.default,
}  # fmt: skip
_ELEMENTWISE = COPIES | {aten.lift_fresh.default}  # besides pointwise ops
_LISTS = ("aten::_foreach_", "aten::_fused_")  # ops that treat the tensors at one place of their lists together
_REDUCTIONS = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")


def computed(op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], mesh: DeviceMesh) -> PyTree:
    """Computes ``op`` from local tensors, where DTensors on ``mesh`` are `Owned` (stored whole on one coordinate).
    Returns NotImplemented if gathered tensors are needed.

    Raises:
        LayoutError: torch.compile traces the op. It would compile code for other local shapes.
    """
    local = [x._local_tensor for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
    if torch.compiler.is_compiling() or any(isinstance(x, FakeTensor) for x in local):
        raise LayoutError(
            f"torch.compile traces {op} on a parameter that lies on one stage of a pipeline, whose local shape differs "
            "between ranks in a way that it does not know",
            fix="call what uses parameters, as optimizer.step(), outside of torch.compile; shardc.optim.wrap runs "
            "optimizers by their fused kernels",
        )
    if op in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar):
        return _norms(mesh, *args, **kwargs)
    # Ranks would draw other numbers for their shards than for the whole tensor; other ops mix elements.
    if draws(op) or "out" in op._schema.overload_name or not _is_elementwise(op):
        return NotImplemented
    like = _operands(op, args, kwargs)
    return NotImplemented if like is None else _local(op, args, kwargs, like)


def _is_elementwise(op: OpOverload) -> bool:
    """Whether ``op`` computes each element of a result from the operands' elements at its position."""
    if op in _ELEMENTWISE or torch.Tag.pointwise in op.tags:
        return True
    return op._schema.name.startswith(_LISTS) and not op._schema.name.startswith(_REDUCTIONS)


def _operands(op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> list[Tensor] | None:
    """Returns, for each result, the operand whose layout it gets; None if the op's operands differ in layout.

    The i-th tensors in the lists of a ``foreach`` op belong together. Replicated tensors of one element fit any layout,
    unless the op writes to them.
    """
    values = [*args, *kwargs.values()]
    lists = [x for x in values if isinstance(x, list | tuple) and any(isinstance(y, Tensor) for y in x)]
    alone = [x for x in values if isinstance(x, Tensor)]
    # A column has the operands that give one result. Tensors beside the columns, such as a learning rate, must be
    # scalars.
    if op._schema.name.startswith(_LISTS):
        columns, beside = [list(column) for column in zip(*lists, strict=True)], alone
    else:
        columns, beside = [alone], [x for each in lists for x in each]
    writes, like = {id(x) for x in written(op, args, kwargs)}, []
    for column in columns:
        # The layout is that of a DTensor if possible, and not of a scalar, which fits any layout.
        first = min(column, key=lambda x: (_is_scalar(x), not isinstance(x, DTensor)))
        for x in column:
            fits = isinstance(x, DTensor) and (x.placements, x.shape) == (first.placements, first.shape)
            if not fits and (id(x) in writes or not _is_scalar(x)):
                return None
        like.append(first)
    return like if all(map(_is_scalar, beside)) else None


def _is_scalar(x: object) -> bool:
    """Whether ``x`` is a replicated tensor of one element."""
    if not isinstance(x, Tensor) or x.numel() != 1:
        return False
    return not isinstance(x, DTensor) or x._spec.is_replicated()


def _local(op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], like: Sequence[Tensor]) -> PyTree:
    """Runs ``op`` on the local tensors of its operands, and wraps each result as a DTensor. The result gets the
    layout of the operand at its position in ``like``.

    In place of an operand that the op wrote, the operand is returned.
    """
    # Local tensor -> its DTensor, which is returned in place of it if the op wrote to it.
    operands = {id(x._local_tensor): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensor)}
    local_args, local_kwargs = pytree.tree_map_only(DTensor, attrgetter("_local_tensor"), (args, kwargs))
    result = op(*local_args, **local_kwargs)

    def wrapped(x: Tensor, template: Tensor) -> Tensor:
        """Wraps a local result in the layout of ``template``; returns the operand itself if the op wrote it."""
        if id(x) in operands or not isinstance(template, DTensor):
            return operands.get(id(x), x)
        spec = spec_like(template, template.placements, x.dtype)
        ReplicatedSpec.mark(spec)  # a replicated result: DTensor's caches must not take it for a plain tensor
        return DTensor(x, spec, requires_grad=False)

    if isinstance(result, Tensor):
        out = wrapped(result, like[0])
        return return_and_correct_aliasing(op, args, kwargs, out) if op.is_view else out
    if isinstance(result, list | tuple) and len(result) == len(like):
        return [wrapped(x, template) for x, template in zip(result, like, strict=True)]
    return result


def _norms(
    mesh: DeviceMesh,
    x: Any,
    order: float = 2,
    dim: object = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> PyTree:
    """Computes the norm of all elements of each tensor, by one all-reduce for each mesh dim. Returns NotImplemented
    unless all tensors are DTensors, ``order`` is positive and the norm is over all dims.

    Of replicas, those at coordinate 0 count.
    """
    tensors: list[Any] = [x] if isinstance(x, Tensor) else list(x)
    if dim is not None or keepdim or not order > 0 or not all(isinstance(tensor, DTensor) for tensor in tensors):
        return NotImplemented
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    largest, terms = order == float("inf"), []
    for tensor in tensors:  # this rank's term of each norm; 0 changes neither a sum nor a maximum
        local = tensor._local_tensor
        # Each shard counts once: of its replicas, the one at coordinate 0 of every replicated mesh dim.
        counts = all(not at or not p.is_replicate() for at, p in zip(coordinate, tensor.placements, strict=True))
        wide = dtype or torch.promote_types(local.dtype, torch.float32)
        norm = torch.linalg.vector_norm(local, order, dtype=wide) if local.numel() and counts else torch.zeros(())
        terms.append(norm.to(mesh.device_type, torch.float64))
    # Powers of the norms of shards add up to that of the whole; largest elements are joined by a maximum.
    total = torch.stack(terms) if largest else torch.stack(terms).pow(order)
    for mesh_dim in range(mesh.ndim):
        if mesh.size(mesh_dim) > 1:
            dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, mesh.get_group(mesh_dim))
    total = total if largest else total.pow(1.0 / order)
    # A norm of complex numbers is real.
    norms = [
        replicated(norm.to(tensor.device, dtype or tensor.dtype.to_real()), mesh)
        for norm, tensor in zip(total.unbind(), tensors, strict=True)
    ]
    return norms[0] if isinstance(x, Tensor) else norms
