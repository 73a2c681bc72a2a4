"""Ops and methods of DTensor parameters and gradients of compiled modules, with the results of one device; pickling.

DTensor gets some of these wrong or refuses them: reading a partial sum gives a rank's own term, the mean of uneven
shards is not the mean, writes to a gathered view are lost, and plain tensors cannot be mixed in. `install` adds a rule
before DTensor's, for meshes of compiled modules. Ops that DTensor is known to get right are left to it and cached as
usual. Others run on unsharded tensors (`gathered.py`), which costs a gather. A plain tensor counts as replicated, and
ranks compare it.

`METHODS` replace methods and attributes of the class DTensor that are no ops, for the same meshes.

`install_pickling` makes DTensors store their position on the mesh. Otherwise, a rank that reads the first rank's file
would take that shard for its own.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from math import prod
from typing import Any, SupportsIndex
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OutputSharding
from torch.distributed.tensor._ops.utils import is_tensor_evenly_shardable
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardc import _compat
from shardc._compat import PyTree
from shardc.errors import LayoutError, ShardcWarning
from shardc.ir.op_traits import draws
from shardc.runtime import owned_ops
from shardc.runtime.gathered import (
    ReplicatedSpec,
    broadcast,
    check_equal,
    gather,
    reduce_pending,
    replicated,
    replicated_spec,
    scatter_into,
    scattered_like,
    view_of,
    written,
)
from shardc.runtime.owned import has_owner, redistribute

_PICKLED_PART = "shardc_part"  # key in the state of a pickled DTensor
_pickle = DTensor.__reduce_ex__

Part = list[tuple[str, int, int]]  # (name, size, coordinate) of each mesh dim that shards a tensor


def install_pickling() -> None:
    """Makes DTensors store which shard they are when pickled, and check it when unpickled."""
    DTensor.__reduce_ex__ = _reduce  # type: ignore[assignment]
    DTensor.__setstate__ = _set_state  # type: ignore[assignment]


def _part(tensor: DTensor) -> Part | None:
    """Returns (name, size, this rank's index) of each mesh dim that splits ``tensor``; None for a rank off the mesh."""
    mesh: DeviceMesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    # A pickled mesh keeps the coordinate of the writing rank.
    coordinates = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    if not coordinates or int(mesh.mesh.max()) >= dist.get_world_size():
        return None
    dims = zip(names, mesh.mesh.shape, coordinates[0], tensor.placements, strict=True)
    return [(name, size, at) for name, size, at, placement in dims if not placement.is_replicate()]


def _reduce(self: DTensor, protocol: SupportsIndex) -> tuple[object, ...]:
    """Implements ``DTensor.__reduce_ex__``: DTensor's own state and the shard's mesh position (`_part`)."""
    # Torch's form: a function and its arguments, the last of which is the state (`vars`, slots).
    build, (func, cls, args, (attributes, slots)) = _pickle(self, protocol)
    if isinstance(slots["_spec"], ReplicatedSpec):
        slots = {**slots, "_spec": slots["_spec"].plain()}
    if dist.is_initialized():
        attributes = {**(attributes or {}), _PICKLED_PART: _part(self)}
    return build, (func, cls, args, (attributes, slots))


def _set_state(self: DTensor, state: object) -> None:
    """Implements ``DTensor.__setstate__``; LayoutError if the unpickled shard is another rank's."""
    torch._utils._set_obj_state(self, state)
    part = vars(self).pop(_PICKLED_PART, None)
    if not part or not dist.is_initialized():  # replicated, or read without a process group
        return
    current = _part(self)
    if part == current:
        return
    raise LayoutError(
        f"a tensor of shape {list(self.shape)} in this file is shard {_part_text(part)}, and rank {dist.get_rank()} "
        f"has shard {_part_text(current)}",
        fix="save module.full_state_dict(rank0_only=True) on the first rank, which every rank can load; or save and "
        "load with torch.distributed.checkpoint on all ranks; or let each rank load the file that it saved",
    )


def _part_text(part: Part | None) -> str:
    """Returns a mesh position as text: ``0 of 2 along dp, 1 of 4 along tp``, or "none"."""
    return "none" if part is None else ", ".join(f"{at} of {size} along {name}" for name, size, at in part)


meshes: WeakSet[DeviceMesh] = WeakSet()  # of compiled modules


def _is_ours(x: DTensor) -> bool:
    """Whether ``x`` is on the mesh of a compiled module."""
    return x.device_mesh in meshes


def _tolist(self: DTensor) -> object:
    return gather(self).tolist() if _is_ours(self) else Tensor.tolist(self)


def _numpy(self: DTensor, *, force: bool = False) -> object:
    """Implements ``DTensor.numpy``: returns the gathered values as a read-only array."""
    if not _is_ours(self):
        return Tensor.numpy(self, force=force)
    torch.empty(0, requires_grad=self.requires_grad).numpy(force=force)  # raises torch's error
    detached: Any = self.detach()
    out = gather(detached).cpu().numpy().copy()
    out.flags.writeable = False  # a write to it would not reach the shards
    return out


def _format(self: DTensor, spec: str) -> str:
    return format(self.item(), spec) if self.dim() == 0 and _is_ours(self) else Tensor.__format__(self, spec)


def _str(self: DTensor) -> str:
    """Returns a scalar's gathered value as text; for other DTensors their `repr`, with pending sums reduced."""
    if not _is_ours(self):
        return repr(self)
    detached: Any = self.detach()
    return str(gather(detached)) if self.dim() == 0 else repr(reduce_pending(detached))


def _deepcopy(self: DTensor, memo: dict[int, object]) -> object:
    """Copies a leaf of autograd with its ``.grad``, in the same layout. Torch's own method fails on DTensors."""
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf or not _is_ours(self):
        return _torch_deepcopy(self, memo)
    out: Any = DTensor(self._local_tensor.detach().clone(), self._spec, requires_grad=self.requires_grad)
    if isinstance(self, nn.Parameter):
        out = nn.Parameter(out.detach(), requires_grad=self.requires_grad)
    memo[id(self)] = out
    if self.grad is not None:
        out.grad = deepcopy(self.grad, memo)
    return out


def _set_data(self: DTensor, value: Tensor) -> None:
    """Implements ``x.data = value`` by a copy to the shards; a plain ``value`` must be the same on all ranks."""
    if not _is_ours(self) or not isinstance(value, Tensor):
        return _torch_data.__set__(self, value)
    local = value._local_tensor if isinstance(value, DTensor) else value
    if local is self._local_tensor:  # `x.data = x.data`
        return
    for name in ("shape", "dtype", "device"):
        old, new = getattr(self, name), getattr(value, name)
        if old != new:
            raise LayoutError(
                f".data = would make a DTensor of {name} {old} one of {name} {new}; the compiled module takes no such",
                fix=f"assign a tensor of {name} {old}, or change the model and compile it again",
            )
    if torch._C._storage_Use_Count(local.untyped_storage()._cdata) > 2:  # its own, and the one asked for here
        warnings.warn(
            ".data = copied values to a sharded parameter, as it cannot use the memory of another tensor: what is "
            "later written to that tensor does not reach the parameter",
            ShardcWarning,
            stacklevel=2,
        )
    with torch.no_grad():
        self.detach().copy_(value)


def _redistribute(
    self: DTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
) -> DTensor:
    """Replaces `DTensor.redistribute`, which is wrong for tensors with an `owned.Owned` placement (whole on one
    coordinate of a mesh dim).
    """
    if placements is None or not _is_ours(self) or not has_owner((*self.placements, *placements)):
        return _torch_redistribute(self, device_mesh, placements, **options)
    return redistribute(_torch_redistribute, self, device_mesh, tuple(placements), **options)


def _refusing_memory(name: str, fix: str) -> Callable[..., object]:
    """Returns a method in place of ``name``, which gives out memory: on meshes of compiled modules it raises
    LayoutError with ``fix``.

    ``data_ptr`` still works for torch's own code, which uses it to compare tensors.
    """
    torch_method = getattr(Tensor, name)

    def method(self: DTensor, *args: object, **kwargs: object) -> object:
        caller = sys._getframe(1).f_globals.get("__name__", "")  # name of the module that calls
        if not _is_ours(self) or (name == "data_ptr" and caller.partition(".")[0] == "torch"):
            return torch_method(self, *args, **kwargs)
        raise LayoutError(f"{name} of a sharded parameter or gradient: no memory of this rank has all of it", fix=fix)

    return method


_PART = "use this rank's part, p.to_local(), or a copy of all of it, p.full_tensor()"
_torch_deepcopy, _torch_redistribute = DTensor.__deepcopy__, DTensor.redistribute
_torch_data: Any = Tensor.data
METHODS: dict[str, object] = {
    "tolist": _tolist,
    "numpy": _numpy,
    "__format__": _format,
    "__str__": _str,
    "__deepcopy__": _deepcopy,
    "redistribute": _redistribute,
    "data": property(_torch_data.__get__, _set_data),
    "data_ptr": _refusing_memory("data_ptr", f"{_PART}; to tell parameters apart, use id(p)"),
    **{name: _refusing_memory(name, _PART) for name in ("storage", "share_memory_", "__dlpack__")},
}


aten = torch.ops.aten
pytree = _compat.pytree

# Correct for `_StridedShard`, besides pointwise ops.
_STRIDED = owned_ops.COPIES | {
    aten._fused_adam_.default, aten._fused_adamw_.default, aten._fused_sgd_.default, aten._fused_adagrad_.default,
}  # fmt: skip
# Correct for any shards, also uneven and empty ones.
_ANY_SHARDS = _STRIDED | {
    aten.sum.default, aten.sum.dim_IntList, aten.linalg_vector_norm.default, aten._foreach_norm.Scalar,
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.t.default, aten.transpose.int, aten.permute.default,
    aten.unsqueeze.default, aten.stack.default, aten.select.int, aten.slice.Tensor, aten.expand.default,
    aten._fused_adam_.tensor_lr, aten._fused_adamw_.tensor_lr, aten._fused_sgd_.tensor_lr,
}  # fmt: skip
# Sums over a split dim are rounded once per rank and once more in their sum. Iterations such as Muon's enlarge that.
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_LOW_PRECISION = (torch.float16, torch.bfloat16)
_NORMS = (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar)  # of positive finite order
# Correct if all shards have the same size.
_EVEN_SHARDS = {
    aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, aten.any.default, aten.all.default,
    aten.any.dim, aten.all.dim, aten.prod.default, aten.view.default, aten._unsafe_view.default,
}  # fmt: skip
# Correct if all operands have the same pending reduction.
_PENDING = {aten.stack.default, aten.add.Tensor, aten.sum.default}
# Ops with DTensor handlers that run before any rule.
_HANDLED = (
    aten.argmin.default, aten.argmax.default, aten.as_strided.default, aten.copy_.default, aten.convolution.default,
    aten.convolution_backward.default, aten._amp_foreach_non_finite_check_and_unscale_.default,
)  # fmt: skip


def install(device_mesh: DeviceMesh) -> None:
    """Patches DTensor, so that ops on DTensors on ``device_mesh`` return what one device returns."""
    if device_mesh in meshes:
        return
    dispatcher, table = DTensor._op_dispatcher, DTensor._op_dispatcher._custom_op_handlers
    if not meshes:  # the first one: the patches serve all meshes, and look at `meshes` when they run
        of_dtensor = dispatcher._propagate_op_sharding_dispatch_slow_path
        dispatcher._propagate_op_sharding_dispatch_slow_path = _propagation(of_dtensor)  # type: ignore[method-assign]
        _accept_plain_tensors()
        for op in _HANDLED:
            table[op] = _handler(table.get(op))
        for name, method in METHODS.items():
            setattr(DTensor, name, method)
    meshes.add(device_mesh)
    torch._C._clear_DTensor_sharding_propagator_cache()  # cached decisions, for which the patches are not asked


def _accept_plain_tensors() -> None:
    """Makes DTensor accept plain tensors beside DTensors, on meshes of compiled modules (see `_corrected_result`)."""
    dispatcher: Any = DTensor._op_dispatcher
    of_dtensor = dispatcher._try_replicate_spec_for_scalar_tensor

    def spec_of(op: OpOverload, x: Tensor, mesh: DeviceMesh) -> DTensorSpec:
        """Returns the spec of the plain tensor ``x``: replicated. Raises torch's error on other meshes and in traces,
        unless ``x`` has one element, as without shardc.
        """
        if x.numel() != 1 and (mesh not in meshes or _is_traced(x)):
            dispatcher._allow_implicit_replication = False  # the flag is for all meshes, so it is switched per op
            try:
                return of_dtensor(op, x, mesh)
            finally:
                dispatcher._allow_implicit_replication = True
        return of_dtensor(op, x, mesh)

    dispatcher._try_replicate_spec_for_scalar_tensor = spec_of
    dispatcher._allow_implicit_replication = True


def _propagation(of_dtensor: Callable[..., object]) -> Callable[..., object]:
    """Wraps ``of_dtensor``, DTensor's sharding propagation, so that ops on meshes of compiled modules give one device's
    result.

    It returns the op's sharding, by which DTensor then runs it, or the op's result, if `_corrected_result` gives one.
    """

    def propagate(
        op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], info: Any, try_cache: bool
    ) -> object:
        """Replaces DTensor's method of these arguments; ``info`` describes the operands (`OpInfo`)."""
        mesh = info.compute_mesh
        # Layouts of the operands, plain tensors included.
        specs = [x for x in (*info.flat_args_schema, *info.schema.kwargs_schema.values()) if isinstance(x, DTensorSpec)]
        # First, and in traces too: DTensor would take the owner's tensor for a shard of dim 0.
        if mesh in meshes and any(has_owner(spec.placements) for spec in specs):
            if (result := owned_ops.computed(op, args, kwargs, mesh)) is not NotImplemented:
                return result
        if mesh not in meshes or _is_traced(args):
            return of_dtensor(op, args, kwargs, info, try_cache)
        if (result := _corrected_result(op, args, kwargs, specs, mesh)) is not NotImplemented:
            return result
        try:
            sharding = of_dtensor(op, args, kwargs, info, try_cache)
        except (NotImplementedError, RuntimeError):  # DTensor has no rule for the op, or not for these layouts
            return on_unsharded(op, args, kwargs, mesh)
        # DTensor would write to a redistributed copy of the operand, or view it.
        if isinstance(sharding, OutputSharding) and not _is_in_place(op, info, sharding):
            return on_unsharded(op, args, kwargs, mesh)
        # So that results do not share cache entries with plain tensors (`ReplicatedSpec`).
        for spec in pytree.tree_leaves(getattr(sharding, "output_spec", None)):
            ReplicatedSpec.mark(spec)
        return sharding

    return propagate


def _corrected_result(
    op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], specs: list[DTensorSpec], mesh: DeviceMesh
) -> object:
    """Computes an op that DTensor may get wrong, and returns its result. NotImplemented if DTensor gets it right.

    Args:
        specs: layouts of the DTensors among the arguments.
    """
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    tensors = [x for x in leaves if isinstance(x, DTensor)]
    # Calls of `op` below come back here, with other arguments.
    if len(tensors) < len(leaves):
        writes = list(written(op, args, kwargs))
        # DTensor itself takes plain tensors of one element, as replicated.
        if any(x.numel() != 1 or _is_in(x, writes) for x in leaves if not isinstance(x, DTensor)):
            return _with_plain_tensors(op, args, kwargs, mesh, writes)
    if any([ReplicatedSpec.mark(x._spec) for x in tensors]):  # a list, so that all are marked; DTensor then starts anew
        return op(*args, **kwargs)
    if any(x.is_partial() for spec in specs for x in spec.placements):
        if op is aten.add.Tensor and isinstance(args[1], int) and args[1] == 0:  # the start of Python's `sum`
            return args[0].clone()
        if not (op in _PENDING and _keeps_pending(specs, op, kwargs)):
            for x in tensors:
                reduce_pending(x)
            return op(*args, **kwargs)
    if op is aten.equal.default:  # False for different shapes, which `eq` would broadcast or refuse
        return bool(torch.eq(*args).all()) if args[0].shape == args[1].shape else False
    if op in _MEANS:
        return _mean(*args, **kwargs)
    if op in _NORMS and any(x.dtype in _LOW_PRECISION for x in tensors):
        return _norm_in_float32(op, args, kwargs)
    if (  # a sum over a split dim would be rounded more than once (see `_PRODUCTS`)
        op in _PRODUCTS
        and any(x.dtype in _LOW_PRECISION for x in tensors)
        and not all(spec.is_replicated() for spec in specs)
    ):
        return on_unsharded(op, args, kwargs, mesh)
    return NotImplemented if _dtensor_is_right(op, specs, args) else on_unsharded(op, args, kwargs, mesh)


def _with_plain_tensors(
    op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], mesh: DeviceMesh, writes: list[Tensor]
) -> PyTree:
    """Runs ``op`` on DTensors and plain tensors; LayoutError if a plain one that it only reads differs among ranks."""
    if any(not isinstance(x, DTensor) for x in writes):  # a plain tensor gets the whole result
        return on_unsharded(op, args, kwargs, mesh)
    leaves = pytree.tree_leaves((args, kwargs))
    check_equal([x for x in leaves if isinstance(x, Tensor) and not isinstance(x, DTensor)], mesh, op)

    def whole(x: object) -> object:
        return replicated(x, mesh) if isinstance(x, Tensor) and not isinstance(x, DTensor) else x

    return op(*pytree.tree_map(whole, args), **pytree.tree_map(whole, kwargs))


def _is_in(x: object, tensors: Sequence[Tensor]) -> bool:
    """Whether one of ``tensors`` is the object ``x`` itself."""
    return any(x is y for y in tensors)


def _handler(of_dtensor: Callable[..., PyTree] | None) -> Callable[..., PyTree]:
    """Returns a handler of an op for DTensor's table of handlers: it runs shardc's on meshes of compiled modules, on
    others DTensor's own (``of_dtensor``) or, if that is None, the op by DTensor's rules.
    """

    def handler(op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        mesh = next(x.device_mesh for x in pytree.tree_leaves(args) if isinstance(x, DTensor))
        if mesh in meshes and not _is_traced(args):
            return _OURS[op](*args) if op in _OURS else on_unsharded(op, args, kwargs, mesh)
        if of_dtensor is not None:
            return of_dtensor(op, args, kwargs)
        table = DTensor._op_dispatcher._custom_op_handlers
        shardc_handler = table.pop(op)  # taken out meanwhile, since DTensor would call it again
        try:
            return op(*args, **kwargs)
        finally:
            table[op] = shardc_handler

    return handler


def _copy(target: Tensor, value: Any, *_: object) -> Tensor:
    """Implements ``target.copy_(value)`` for DTensors in any layouts and plain replicated tensors."""
    if not isinstance(target, DTensor):
        return target.copy_(gather(value))
    reduce_pending(target)
    if isinstance(value, DTensor) and value.shape == target.shape and value.placements == target.placements:
        target._local_tensor.copy_(value._local_tensor)  # shard to shard
        return target
    if not isinstance(value, DTensor):
        check_equal([value], target.device_mesh, aten.copy_.default)
    whole = gather(value) if isinstance(value, DTensor) else value  # layouts or shapes differ: through whole values
    scatter_into(target, whole.expand(target.shape))
    return target


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Implements the op of `GradScaler.unscale_` on shards, in place; ``found_inf`` is set on all ranks if it is on
    one.
    """
    local = [reduce_pending(x)._local_tensor if isinstance(x, DTensor) else x for x in grads]
    aten._amp_foreach_non_finite_check_and_unscale_.default(local, found_inf, inverse)
    # (mesh, mesh dim, placement): ranks have different elements along the dims that split a gradient.
    split = ((x.device_mesh, dim, p) for x in grads if isinstance(x, DTensor) for dim, p in enumerate(x.placements))
    for mesh, dim in dict.fromkeys((mesh, dim) for mesh, dim, p in split if not p.is_replicate()):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, mesh.get_group(dim))


_OURS: dict[OpOverload, Callable[..., Tensor | None]] = {
    aten.copy_.default: _copy,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}


def _is_traced(args: PyTree) -> bool:
    """Whether an op is traced: ``args`` have meta or fake tensors, or torch.compile is running."""
    from torch._subclasses.fake_tensor import FakeTensor

    leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
    local = [x._local_tensor if isinstance(x, DTensor) else x for x in leaves]
    return any(x.is_meta or isinstance(x, FakeTensor) for x in local) or torch.compiler.is_compiling()


def _keeps_pending(specs: list[DTensorSpec], op: OpOverload, kwargs: dict[str, PyTree]) -> bool:
    """Whether ``op`` (one of `_PENDING`) may run on pending terms as they are, giving pending terms of its result."""
    if op is aten.stack.default:
        return all(spec.placements == specs[0].placements for spec in specs)
    if op is aten.add.Tensor and (kwargs or len(specs) < 2):  # alpha, or a number, which each rank would add
        return False
    # Sums commute with `add` and `sum`; a pending maximum does not.
    sums = all(x.is_partial("sum") or x.is_replicate() for x in specs[0].placements)
    return sums and all(spec.placements == specs[0].placements for spec in specs)


def _is_foreach(op: OpOverload) -> bool:
    """Whether ``op`` is one of torch's ``_foreach_`` ops, which apply an operation to each tensor of a list."""
    return op._schema.name.startswith("aten::_foreach_")


def _is_pointwise(op: OpOverload) -> bool:
    """Whether each element of the result depends on the operands' elements at its position only."""
    if torch.Tag.pointwise in op.tags:
        return True
    return _is_foreach(op) and not any(x in op._schema.name for x in ("norm", "max", "copy"))


def _dtensor_is_right(op: OpOverload, specs: list[DTensorSpec], args: tuple[PyTree, ...]) -> bool:
    """Whether DTensor is known to compute ``op`` correctly on operands of layouts ``specs``."""
    if draws(op) or "out" in op._schema.overload_name:
        return False  # seeds may differ; `out=` would take the result's layout
    if all(spec.is_replicated() for spec in specs):
        return True
    if any(has_owner(spec.placements) for spec in specs):  # DTensor does not know this placement
        return False
    if any(isinstance(x, _StridedShard) for spec in specs for x in spec.placements):
        # Only ops that run on each shard by itself, on shards of the same elements. Replicated scalars fit any layout.
        layouts = {spec.placements for spec in specs if not spec.is_replicated() or spec.ndim}
        shapes = {spec.shape for spec in specs if spec.ndim}
        return len(layouts) == 1 and len(shapes) == 1 and (op in _STRIDED or _is_pointwise(op))
    if op in _NORMS and len(args) > 1 and not 0 < args[1] < float("inf"):  # the order of the norm
        return False
    if _is_pointwise(op) or op in _ANY_SHARDS:
        return True
    return op in _EVEN_SHARDS and all(is_tensor_evenly_shardable(spec.shape, spec) for spec in specs)


def _is_in_place(op: OpOverload, info: OpInfo, sharding: OutputSharding) -> bool:
    """Whether ``op``, if it writes or views an operand, does so on the operand itself: DTensor's decision
    (``sharding``) does not redistribute it first, to a copy. True for ops that neither write nor view.
    """
    aliases = any(x.alias_info is not None for x in op._schema.arguments)
    redistributed = sharding.redistribute_schema
    if not aliases or not sharding.needs_redistribute or redistributed is None:
        return True
    new = pytree.tree_leaves(redistributed.args_schema)
    # Of each DTensor operand, whether it is redistributed.
    moved = [
        old.placements != now.placements
        for old, now in zip(info.flat_args_schema, new, strict=False)
        if isinstance(old, DTensorSpec) and isinstance(now, DTensorSpec)
    ]
    # The operand that is written or viewed is the first; a foreach op writes a list of them.
    return not (moved[0] if op.is_view or not _is_foreach(op) else any(moved))


def on_unsharded(op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], mesh: DeviceMesh) -> PyTree:
    """Runs ``op`` on unsharded tensors on every rank, and copies written ones back to the shards. All ranks call it.

    Random draws are those of the mesh's first rank. Results of random ops with the shape of the first argument
    (`torch.randn_like`) get its layout; other results are replicated.
    """
    first = args[0] if args else None
    if op.is_view and isinstance(first, DTensor):  # later writes to the view must reach the shards
        return view_of(first, op, args, kwargs)
    writes = list(written(op, args, kwargs))  # arguments that `op` changes in place, or `out=`
    plain = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not isinstance(x, DTensor)]
    check_equal([x for x in plain if not _is_in(x, writes)], mesh, op)
    wholes: dict[int, Tensor] = {}  # id of a DTensor -> its gathered values

    def whole(x: object) -> object:  # an argument -> what `op` gets for it; once per DTensor, for `originals` below
        if not isinstance(x, DTensor):
            return x
        if id(x) not in wholes:
            wholes[id(x)] = gather(reduce_pending(x))
        return wholes[id(x)]

    result = op(*pytree.tree_map(whole, args), **pytree.tree_map(whole, kwargs))
    if draws(op):
        # An op in place has drawn values in what it wrote, another in its results.
        drawn = [wholes.get(id(y), y) for y in writes] or pytree.tree_leaves(result)
        for x in drawn:
            if isinstance(x, Tensor):
                broadcast(x, mesh)
    written_shards = [x for x in writes if isinstance(x, DTensor)]
    for x in written_shards:
        if torch.Tag.inplace_view in op.tags and x._spec.is_replicated():  # such as `x.t_()`
            x._local_tensor, x._spec = wholes[id(x)], replicated_spec(wholes[id(x)], mesh)
            return return_and_correct_aliasing(op, args, kwargs, x)  # which changes the shape of `x` in place
        scatter_into(x, wholes[id(x)])
    # Id of the tensor that was written -> the argument that it stands for, which an op in place returns.
    originals = {id(wholes.get(id(x), x)): x for x in writes}
    like = first if draws(op) and isinstance(first, DTensor) else None

    def wrap(x: object) -> object:  # a result of `op` -> what is returned for it
        if not isinstance(x, Tensor) or id(x) in originals:
            return originals.get(id(x), x)
        return scattered_like(like, x) if like is not None and x.shape == like.shape else replicated(x, mesh)

    return pytree.tree_map(wrap, result)


_MEANS = (aten.mean.default, aten.mean.dim)


def _mean(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Computes a mean as sum / count: a mean of the shards' means is wrong for uneven shards, and gloo has no mean."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    kind = dtype or x.dtype
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind  # the sum may overflow
    total = x.sum(dims, keepdim=keepdim, dtype=wide) if x.dim() else x.to(wide)
    count = prod(x.shape[at] for at in dims if x.dim())  # elements per mean; 1 for a scalar
    return (total / count).to(kind)


def _norm_in_float32(op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    """Computes norms of 16-bit floats in float32: sums of squares over ranks would be rounded, and could overflow.

    A ``dtype`` argument would not do: DTensor's cache does not distinguish dtypes.
    """
    dtype = kwargs.get("dtype") or next((x for x in args if isinstance(x, torch.dtype)), None)
    tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, DTensor)]
    wide = pytree.tree_map_only(DTensor, lambda x: x.to(torch.promote_types(x.dtype, torch.float32)), args)
    norms, structure = pytree.tree_flatten(op(*wide, **kwargs))  # one, or a list of a foreach op's
    return pytree.tree_unflatten(
        [reduce_pending(norm).to(dtype or x.dtype) for norm, x in zip(norms, tensors, strict=True)], structure
    )
