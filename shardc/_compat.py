"""Functions that behave the same on torch 2.11 to 2.13, and private names of torch that shardc uses."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed._composable.contract import REGISTRY_KEY as REGISTRY_KEY  # other keys in each process
from torch.distributed._composable.contract import STATE_KEY as STATE_KEY
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute, debug
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, _StridedShard
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn.modules.module import _WrappedHook
from torch.utils import _pytree
from torch.utils._functools import cache_method as cache_method
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardc.errors import MeshError

if TYPE_CHECKING:
    from torch._dynamo.convert_frame import GraphCaptureOutput

pytree = _pytree  # torch's pytrees
PyTree: TypeAlias = Any  # tensors and constants in nested lists, tuples, dicts and registered classes
AnyTensor = TypeVar("AnyTensor", bound=Tensor)
StridedShard = _StridedShard  # used by users, but exported with an underscore only
LazyGraphModule = _LazyGraphModule  # generates its code when first called or shown
WrappedHook = _WrappedHook
no_autocast: Any = torch._C._DisableAutocast  # context manager: autocast is off on all devices
is_in_transform: Any = torch._C._functorch.is_functorch_wrapped_tensor  # whether a tensor is wrapped by torch.func
COMPILED_OUT = "_torchdynamo_orig_callable"  # attribute with the original of a function that Dynamo skips
DYNAMIC_DIMS = "_dynamo_dynamic_indices"  # attribute set by ``torch._dynamo.mark_dynamic``


def new_fake_tensor(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """Return a new fake tensor of ``mode``. It equals that of ``torch.empty_strided`` and takes an eighth of
    the time.
    """
    return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def wrapper(cls: type[AnyTensor], like: Tensor, device: torch.device) -> AnyTensor:
    """Return a tensor of class ``cls`` without memory, with the metadata of ``like`` but for its ``device``."""
    return Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype,
        layout=like.layout, device=device,
    )  # fmt: skip


def is_wrapper(x: object) -> bool:
    """Whether ``x`` is a wrapper subclass (a quantised weight, say) other than a DTensor."""
    return is_traceable_wrapper_subclass(x) and not isinstance(x, DTensor | AsyncCollectiveTensor)


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Grouped matrix product: torch's public function, or the private one of older versions.

    Args:
        left: [r, k] with ``right`` [e, k, n], a matrix per group; or [k, r] with [r, n], summed per group.
        ends: int32 [e], the end of each group's rows.

    Returns:
        [r, n] or [e, k, n].
    """
    function: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm
    product = function(left, right, offs=ends)
    return product


def new_group(ranks: Sequence[int], members_only: bool = False) -> dist.ProcessGroup:
    """Creates a process group of ``ranks`` in this order.

    All ranks of the world call this, in the same order of calls. With ``members_only`` its members do; each must have
    created as many groups before as the others (torch derives the group's name from that).

    Raises:
        MeshError: ``ranks`` is not ascending, and this torch always sorts them.
    """
    ordered = list(ranks) == sorted(ranks)
    keeps_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
    if not ordered and not keeps_order:
        raise MeshError(
            f"the ranks {list(ranks)} of a group are not ascending, and torch {torch.__version__} sorts them",
            fix="build the DeviceMesh with ascending ranks along every axis",
        )
    options: dict[str, Any] = {"sort_ranks": ordered} if keeps_order else {}
    world = dist.group.WORLD
    if world is not None and (timeout := timeout_of(world)):  # else torch's 30 minutes, whatever the world has
        options["timeout"] = timeout
    return dist.new_group(list(ranks), use_local_synchronization=members_only, **options)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns the timeout to pass to ``Work.wait``. For a gloo group it is the group's timeout; for other backends 0,
    so that they use their own.
    """
    if dist.get_backend(group) != "gloo":
        return timedelta(0)
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def take_timeout_of_world(group: dist.ProcessGroup) -> None:
    """Gives a gloo group the timeout of the world's group, if the group has torch's default of 30 minutes.

    A DeviceMesh makes its groups with the default, whatever the world has. Only collectives follow the new one: each
    wait for a message needs `timeout_of` the group.
    """
    world = dist.group.WORLD
    if world is not None and timeout_of(group) == dist.distributed_c10d.default_pg_timeout:
        if timeout := timeout_of(world):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def forget_specs_of_dtensors() -> None:
    """Clears DTensor's caches of how layouts propagate through ops: they have meshes of a world that may have ended.

    Such a mesh equals that of a new world, so a cached result would be used. Its groups' names are numbers, which in
    the new world belong to other groups.
    """
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


@contextmanager
def dynamo_captures() -> Iterator[None]:
    """Context manager in which Dynamo of torch before 2.13 captures what torch 2.13 does: code that calls Python
    builtins, under a config that holds functions.

    Before 2.13, its bytecode needs each builtin passed in, and it fails to log such a config.
    """
    from torch._dynamo import convert_frame, utils

    names_in = convert_frame.GraphCaptureOutput._get_external_refs

    def needed(bytecode: CodeType) -> set[str]:
        return {name for name in names_in(bytecode) if not hasattr(builtins, name)}

    with (
        patch.object(convert_frame.GraphCaptureOutput, "_get_external_refs", staticmethod(needed)),
        patch.object(utils, "_get_dynamo_config_for_logging", lambda: None),
    ):
        yield


def traced_code(capture: GraphCaptureOutput) -> list[CodeType]:
    """Returns the code objects that Dynamo traced for a graph; one placeholder if this torch does not record them."""
    unknown = compile("", "<unknown>", "exec")
    return getattr(capture, "traced_code", None) or getattr(capture.output_graph, "traced_code", None) or [unknown]


def is_called_by_trace(function: Callable[..., object]) -> bool:
    """Whether Dynamo calls ``function`` instead of tracing it (``allow_in_graph``, ``nonstrict_trace``)."""
    predicates = ("is_callable_allowed", "is_nonstrict_trace_callable", "is_leaf_function")
    return any(getattr(trace_rules, name)(function) for name in predicates if hasattr(trace_rules, name))


def custom_op(value: object) -> tuple[str, dict[str, object]] | None:
    """Returns (name, {part: function}) of a `torch.library.custom_op`; the parts are ``abstract_fn``, ``backward_fn``
    and so on. None for another value, or if the op has dispatch functions or Triton kernels.
    """
    if isinstance(value, torch._ops.OpOverloadPacket):
        value = getattr(value, "default", None)
    name = value if isinstance(value, str) else getattr(value, "_qualname", getattr(value, "_name", ""))
    definition = OPDEFS.get(name) if isinstance(value, str | CustomOpDef | torch._ops.OpOverload) else None
    if definition is None or definition._torch_dispatch_fns or getattr(definition, "_used_triton_kernels", None):
        return None
    parts = ("_init_fn", "_abstract_fn", "_setup_context_fn", "_backward_fn")
    parts_by_name = {part.strip("_"): getattr(definition, part) for part in parts}
    return name, parts_by_name | {"autocast": dict(getattr(definition, "_autocast_dtype", {}))}


def trunc_normal_rejects() -> bool:
    """Whether ``nn.init.trunc_normal_`` samples by rejection, as in 2.13; older versions invert the distribution in
    place.
    """
    return "erfinv_" not in nn.init._no_grad_trunc_normal_.__code__.co_names


def dtensor_spec(device_mesh: DeviceMesh, placements: tuple[Placement, ...], meta: TensorMeta) -> DTensorSpec:
    """Returns a DTensorSpec whose placements, also strided ones, apply from the first mesh dim to the last.

    By default torch 2.13 reads strided placements as an order of mesh dims. If they are not (two within one sub-dim),
    it gathers elements in a wrong order.
    """
    options: dict[str, Any] = {}
    if "use_strided_shard_as_shard_order" in {field.name for field in fields(DTensorSpec)}:
        options["use_strided_shard_as_shard_order"] = False
        if torch.__version__ < "2.13":
            _keep_strides(device_mesh)
    return DTensorSpec(device_mesh, placements, meta, **options)


_keeping: WeakSet[DeviceMesh] = WeakSet()


def _keep_strides(device_mesh: DeviceMesh) -> None:
    """Makes DTensor ops on ``device_mesh`` read strided placements as `dtensor_spec` does, in torch before 2.13."""
    first, read = not _keeping, DTensorSpec.__post_init__
    _keeping.add(device_mesh)

    def as_operands(spec: DTensorSpec) -> None:
        if spec.use_strided_shard_as_shard_order is None and spec.mesh in _keeping:
            spec.use_strided_shard_as_shard_order = False
        read(spec)

    if first and read.__name__ != as_operands.__name__:
        DTensorSpec.__post_init__ = as_operands  # type: ignore[method-assign, assignment]


def has_single_dim_table(op: OpOverload) -> bool:
    """Whether torch has a table of strategies for sharding ``op`` over one mesh dim."""
    return op in getattr(DTensor._op_dispatcher.sharding_propagator, "op_single_dim_strategy_funcs", {})


def single_dim_table(op: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> list[list[object]]:
    """Returns torch's strategies for sharding ``op`` over one mesh dim, one list of placements each.

    Args:
        args, kwargs: the op's, with meta tensors for tensors.

    Returns:
        Per strategy, an entry for each result, then each operand: an int is the sharded dim, a str the reduce op of a
        partial, ``...`` is replicated, None a result that is not computed.

    Raises:
        NotImplementedError: a placement of another kind. Torch may raise others, depending on the op.
    """
    strategy = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs[op]
    metas = [
        pytree.tree_map_only(torch.Tensor, lambda x: TensorMeta(x.shape, x.stride(), x.dtype), arguments)
        for arguments in (args, kwargs)
    ]
    return [
        [_one_dim_placement(placement) for placement in row] for row in getattr(strategy, "func", strategy)(op, *metas)
    ]


def _one_dim_placement(placement: Placement | None) -> object:
    """Return ``placement`` as `single_dim_table` writes it: the dim that it splits, the reduce op of a Partial, ``...``
    for Replicate, None for None. Raises NotImplementedError for another kind.
    """
    if placement is None or isinstance(placement, Replicate):
        return None if placement is None else ...
    if type(placement) is Partial:
        return placement.reduce_op
    if hasattr(placement, "dim"):
        return placement.dim
    raise NotImplementedError(f"placement {placement!r}")


@contextmanager
def differentiable() -> Iterator[None]:
    """Context manager in which ops record gradients, even inside an op's kernel, where torch may have turned autograd
    off.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        yield


def is_fake(x: torch.Tensor) -> bool:
    """Whether ``x`` is a fake tensor, or a wrapper of one: it has a type and no values."""
    return torch._subclasses.fake_tensor.is_fake(x)


def is_dispatched(op: OpOverload) -> bool:
    """Whether torch's dispatcher has a kernel for an op overload; TorchScript's own ops have none."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def is_inplace(op: OpOverload) -> bool:
    """Whether ``op`` writes its first argument, by its schema; torch before 2.13 has no tag for in-place ops."""
    first = op._schema.arguments[:1]
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in first)


def spec_children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """Returns the children of a pytree spec, under this torch's attribute name."""
    return spec.children() if hasattr(spec, "children") else spec.children_specs


def aten_overloads() -> list[OpOverload]:
    """Returns every overload of the aten ops, sorted by name."""
    overloads = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, qualified = name.partition("::")
        packet, _, overload = qualified.partition(".")
        op = (
            getattr(getattr(torch.ops.aten, packet, None), overload or "default", None) if namespace == "aten" else None
        )
        if op is not None:
            overloads.append(op)
    return overloads


def pipeline_order(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[tuple[str, int, int]]]:
    """Returns the order of each rank's computations in a pipeline schedule of ``torch.distributed.pipelining``. It
    needs no process group.

    Args:
        name: the schedule's, as `torch.distributed.pipelining.schedules.get_schedule_class` takes it.

    Returns:
        For each rank, (kind, stage, microbatch) of each computation. The kind is F (forward), B (backward), I (backward
        for the stage's input) or W (for its parameters). Two that torch overlaps are in the order of torch's pair.

    Raises:
        ValueError: the schedule does not have these numbers.
    """
    from torch.distributed.pipelining import schedules

    kind = schedules.get_schedule_class(name)
    stage = SimpleNamespace(
        num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0, stage_index=0, is_last=False, submod=None
    )
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    order = kind(stage if single else [stage] * stages_per_rank, microbatches).pipeline_order
    return [
        [
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
            if part.computation_type.value in ("F", "B", "I", "W")
        ]
        for rank in range(ranks)
    ]
