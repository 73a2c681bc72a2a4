"""`shardc.compile` and `shardc.shard`, which turn a model into a module that is sharded over a mesh."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.build import Build
from shardc.capture import as_module, input_names, register_caches, target_names
from shardc.checks import Arguments
from shardc.cost.hardware import Hardware
from shardc.dynamic import DynamicDims, check_dynamic
from shardc.errors import CaptureError, ShardcWarning
from shardc.integrations import classes_for
from shardc.ir.clone import clone_tree, replace_tensors, subclass
from shardc.ir.deferred import replicated
from shardc.ir.executable import Compiled
from shardc.ir.inner import flattened, outer_names
from shardc.ir.mesh import Mesh
from shardc.lower import lower
from shardc.lower.kernels import begin_check
from shardc.passes.layout.objective import unit_of
from shardc.passes.options import Options
from shardc.plan.constructors import fsdp
from shardc.plan.from_dtensor import check_kept, drop_style_hooks, dtensor_entries
from shardc.plan.pipeline_stages import PipelineStages
from shardc.plan.ports import batch_axes, resolve_activations, resolve_inputs
from shardc.plan.resolve import Sizes, check_axes
from shardc.plan.value import Plan
from shardc.precompiled import Precompiled, load
from shardc.report.inspected import InspectedProgram, InspectedSizedProgram
from shardc.runtime.gradients import Sync
from shardc.runtime.groups import Groups
from shardc.runtime.host import ParamLocation, cheap_garbage_collection
from shardc.runtime.initialize import initializers
from shardc.runtime.module import BehindModel
from shardc.runtime.originals import note_original
from shardc.runtime.replicas import Sources, note_source
from shardc.runtime.sharding_spec import ShardingSpec
from shardc.runtime.shards import bytes_of
from shardc.runtime.storage import shard_tensor, to_parameter
from shardc.search.request import Auto, search_once

M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")
T = TypeVar("T")


def _shares_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator for functions that all ranks of a mesh call. An error on this rank is raised on the other ranks too."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        mesh = kwargs.get("mesh", args[1] if len(args) > 1 else None)
        if not isinstance(mesh, DeviceMesh):
            return function(*args, **kwargs)
        consistency = Groups.of(mesh).consistency
        with consistency.shares_errors(), consistency.compiles():
            return function(*args, **kwargs)

    return call


@_shares_errors
@cheap_garbage_collection()
def compile(
    model: nn.Module | Callable[..., Any],
    mesh: DeviceMesh | Mesh,
    plan: Plan | Auto | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    backend: str = "inductor",
    options: Options | None = None,
    precompiled: str | Path | Precompiled | Sequence[str | Path | Precompiled] = (),
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    init_sync: bool = False,
) -> Any:
    """Compiles ``model`` to a module that is sharded over ``mesh`` by ``plan``; ``model`` is not changed.

    Results are those of one device. For a given seed, random draws (dropout, ``torch.rand``) are the same on every
    mesh, but not those of torch's own generator.

    Args:
        model: a single-device module (or a function of tensors), on a device, on ``meta`` or fake. DTensor parameters
            on ``mesh``, or on some of its axes, keep their placements. Hooks of ``parallelize_module`` are not run.
        mesh: a `DeviceMesh` with named dims, or an abstract `Mesh` for everything except running.
        plan: layouts of parameters, inputs and activations; or `shardc.auto` with example inputs, which searches for a
            plan. None: `shardc.fsdp` over the mesh's only axis.
        loss: ``loss(output, *targets)``, traced into the graph. ``module(*inputs, *targets)`` is then the global loss.
        backend: "inductor" or "eager".
        options: see `Options`.
        precompiled: saved programs or their folders (from a folder, Inductor's artifacts are not read; see
            `shardc.load`), for the calls that they were compiled for. Other calls are captured as usual.
        dynamic: input -> dim -> a name for its size. One program then runs all sizes that meet its conditions
            (``module.lower(...).conditions``); others are compiled separately. The loss's arguments are named
            ``target``, or ``target0`` and so on. Dims marked by ``torch._dynamo.mark_dynamic`` are dynamic too.
        init_sync: broadcast parameters and buffers from the mesh's first rank. By default all ranks must have the same
            values, which the first call checks.

    Returns:
        A module of the model's class with DTensor parameters in storage layout. It is captured at its first call, or by
        ``module.lower(*global_examples)``.

    Raises:
        InputError: an argument of the wrong kind, DTensors on other ranks, a model of ``fully_shard``, `shardc.auto`
            without example inputs.
        MeshError: a mesh without names, or larger than the world.
        CaptureError: a model on several devices.
        PlanError, LayoutError: the plan does not fit the mesh or the model.
        PrecompiledError: a saved program is for another torch, mesh, plan, model or device. Errors leave everything
            unchanged.

    >>> import shardc, torch
    >>> module = shardc.compile(torch.nn.Linear(8, 4), shardc.Mesh(dp=2), shardc.fsdp("dp"))
    >>> print(module.lower(torch.empty(4, 8)).text("collectives").splitlines()[0])
    mesh dp=2
    """
    return _compile(Arguments(model, mesh, plan, loss, backend, options, precompiled, dynamic, init_sync))


@_shares_errors
@cheap_garbage_collection()
def shard(
    model: M,
    mesh: DeviceMesh | Mesh,
    plan: Plan | Auto | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    backend: str = "inductor",
    options: Options | None = None,
    precompiled: str | Path | Precompiled | Sequence[str | Path | Precompiled] = (),
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    init_sync: bool = False,
) -> M:
    """Compiles ``model`` in place: like `compile`, but ``model`` itself becomes the compiled module, and is returned.

    References to the model (in a logger, a callback) then are to the compiled module. Its parameters are new tensors.
    An optimizer of the old ones gets the new ones at its next step, or raises if it has state. Other uses of an old one
    (clipping, a penalty, another model that shares it) are forwarded to the new one. Earlier copies, such as an average
    of the weights, stay unsharded. Arguments are those of `compile`.

    Raises:
        InputError: ``model`` is a function, or has gradients or wrapper subclass tensors; others as for `compile`.
    """
    arguments = Arguments(model, mesh, plan, loss, backend, options, precompiled, dynamic, init_sync)
    return cast(M, _compile(arguments, in_place=True))


def _compile(arguments: Arguments, in_place: bool = False) -> Any:
    """Implements `compile` and, with ``in_place``, `shard`."""
    arguments.check(in_place)
    model, mesh, loss, dynamic = arguments.model, arguments.mesh, arguments.loss, arguments.dynamic or {}
    options = _options_for(mesh, arguments.options or Options())
    register_caches()
    original = model if isinstance(model, nn.Module) else as_module(model)
    module = flattened(original)
    abstract, device = Mesh.of(mesh), _device(module, mesh)
    groups = Groups.of(mesh) if isinstance(mesh, DeviceMesh) else None
    entries = dtensor_entries(module, mesh)
    template = clone_tree(module, lambda _, x: _empty_like(x, torch.device("meta")))
    drop_style_hooks(template)

    plan = Plan.of(entries) | (fsdp() if arguments.plan is None else arguments.plan)
    search_result = None
    if isinstance(plan, Auto):
        search_result = search_once(plan, template, mesh, loss, device, options, groups)
        plan = search_result.plan
    plan = plan.on(abstract)
    check_axes(plan, abstract)
    check_dynamic(dynamic, module)
    if (pp := PipelineStages.of(plan, abstract, template)) is not None:
        abstract = abstract.of_stage(pp.entry.axis)
        groups = Groups.of(mesh, stages=pp.entry.axis) if isinstance(mesh, DeviceMesh) else None
    compiles = groups is not None and arguments.backend == "inductor"
    build = Build(
        plan, abstract, _sizes(module), device, loss, options, groups if compiles else None, DynamicDims(dynamic),
        runs=groups is not None,
        warns=search_result is None,  # a search knows of repeated work, and warns of an axis that it leaves unused
        kinds=(InspectedProgram, InspectedSizedProgram), pp=pp,
    )  # fmt: skip
    check_kept(entries, build.params)
    resolve_activations(plan, [name for name, _ in module.named_modules()])
    if compiles and device.type == "cpu":
        begin_check()
    spec = _spec(build, mesh, groups, template, partial(lower, backend=arguments.backend, by=options.compile_regions))
    for program in (saved := _loaded(arguments.precompiled)):
        program.check(Mesh.of(mesh), plan, template, loss, device)

    # The module: the model's class and code, with its parameters in storage layout.
    sources: Sources = {}
    before = dict(original.named_parameters())
    copy = replace_tensors if in_place else clone_tree
    sharded = copy(module, partial(_to_storage, spec, sources, arguments.init_sync))
    drop_style_hooks(sharded)
    for name, param in sharded.named_parameters():
        if (grad_dtype := plan.precision.of_param(name).grads) is not None:
            param.grad_dtype = grad_dtype
    front, namespace = classes_for(model)
    subclass(sharded, front, BehindModel, initializers(type(sharded)))
    state = namespace(sharded, spec, build, _sync(build, spec), sources, search_result)
    if groups is not None:
        note_original(original, sharded, before)
    state.cache.add_saved(saved)
    return sharded


def _options_for(mesh: DeviceMesh | Mesh, options: Options) -> Options:
    """Return ``options`` with the defaults that depend on the mesh. Warns if ``skip_comm`` makes results wrong on
    purpose.
    """
    if options.silent() != frozenset():
        text = f"skip_comm={options.skip_comm!r}: collectives are local copies, and values are WRONG; for timing alone"
        warnings.warn(ShardcWarning(text), stacklevel=6)
    if isinstance(options.cost, Hardware):
        options = replace(options, cost=options.cost.at(torch.get_float32_matmul_precision()))
    if options.p2p_collectives is None:
        return replace(options, p2p_collectives=isinstance(mesh, DeviceMesh) and mesh.device_type == "cpu")
    return options


def _spec(
    build: Build,
    mesh: DeviceMesh | Mesh,
    groups: Groups | None,
    template: nn.Module,
    lower_half: Callable[..., list[Compiled]],
) -> ShardingSpec:
    """Return the runtime's description of the mesh, the layouts and the device that ``build`` compiles for."""
    plan, storages = build.plan, {name: p.storage for name, p in build.params.items()}
    axes = batch_axes(plan, build.mesh)
    return ShardingSpec(
        mesh=build.mesh,
        device_mesh=groups.whole.device_mesh if groups is not None else None,
        param_mesh=groups.view(storages.values()) if groups is not None else None,
        groups=groups,
        template=template,
        storages=storages,
        homes={name: ParamLocation(build.device, p.host, p.pinned) for name, p in build.params.items()},
        device=build.device,
        global_shapes=partial(_global_shapes, plan, build.mesh),
        input_names=input_names,
        targets=None if build.loss is None else target_names(build.loss),
        lower_half=lower_half,
        unit=partial(unit_of, axes, plan.setting("reduce"), not plan.setting("dtensor_outputs")),
        dtensor_outputs=plan.setting("dtensor_outputs"),
        uneven=build.options.uneven,
        stages="" if build.pp is None else build.pp.entry.axis,
        owners={} if build.pp is None else build.pp.owners,
    )


def _sync(build: Build, spec: ShardingSpec) -> Sync:
    """Return the `Sync` of a module, which says which gradients its backwards reduce, with the settings of the plan."""
    return Sync(
        {name: p.level for name, p in build.params.items()},
        unsynced=frozenset(build.params if build.plan.setting("accumulate") else ()),
        replicated=replicated(spec.storages, batch_axes(build.plan, build.mesh)),
    )


def _loaded(programs: str | Path | Precompiled | Sequence[str | Path | Precompiled]) -> list[Precompiled]:
    """Return the saved ``programs`` as a list. A program given as the path of its folder is loaded."""
    several = [programs] if isinstance(programs, str | Path | Precompiled) else programs
    return [program if isinstance(program, Precompiled) else load(program) for program in several]


def _global_shapes(plan: Plan, mesh: Mesh, local: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Returns the global shape of each input. ``local`` has (input name, its shape on this rank)."""
    # The number of shards of each dim does not depend on its size, if the size divides.
    guess = [(name, tuple(max(size, 1) * mesh.ranks for size in shape)) for name, shape in local]
    layouts = [found.layout for found in resolve_inputs(plan, mesh, guess)]
    return [
        tuple(
            size * (whole // part) if part else 0
            for size, whole, part in zip(shape, layout.shape, layout.local_shape, strict=True)
        )
        for (_, shape), layout in zip(local, layouts, strict=True)
    ]


def _device(module: nn.Module, mesh: DeviceMesh | Mesh) -> torch.device:
    """Returns the device that the program runs on; raises CaptureError if the model is on several."""
    devices = {t.device for t in [*module.parameters(), *module.buffers()] if t.device.type != "meta"}
    if len({(d.type, d.index) for d in devices}) > 1:
        where = {str(t.device): n for n, t in [*module.named_parameters(), *module.named_buffers()]}
        listed = ", ".join(f"{name!r} on {device}" for device, name in where.items())
        raise CaptureError(
            f"the model is on several devices: {listed}", fix="move it to one device, or build it on meta"
        )
    if isinstance(mesh, DeviceMesh):
        return torch.empty(0, device=mesh.device_type).device  # with its index
    return devices.pop() if devices else torch.device("cpu")


def _sizes(module: nn.Module) -> tuple[Sizes, dict[str, str]]:
    """Return two tables: parameter -> (shape, bytes per element), and further name -> name in the first table. Further
    names are those of tied parameters, and of wrapper tensors whose inner tensors are the parameters.
    """
    first: dict[int, str] = {}
    names = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name:
            names[name] = first[id(p)]
    sizes = {name: (tuple(p.shape), p.element_size()) for name, p in module.named_parameters()}
    return sizes, names | outer_names(module)


def _empty_like(x: Tensor, device: torch.device) -> Tensor:
    """Return an empty tensor, or parameter, with the metadata of ``x`` on ``device``."""
    return _as_kind(x, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device))


def _as_kind(x: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` as a parameter if ``x`` is one, else as it is."""
    return nn.Parameter(value, x.requires_grad) if isinstance(x, nn.Parameter) else value


def _to_storage(spec: ShardingSpec, sources: Sources, init_sync: bool, name: str, x: Tensor) -> Tensor:
    """Return ``x``, a parameter or buffer, as the compiled module stores it: a parameter as a DTensor in storage
    layout, a buffer whole. Without a device mesh it stays as it is (a DTensor becomes an empty tensor on ``meta``).

    Args:
        sources: extended by the tensor that the shard was cut from.
        init_sync: broadcast it from the mesh's first rank.
        name: qualified name of ``x``.
    """
    mesh, groups = spec.param_mesh, spec.groups
    source = x
    if groups is None or mesh is None:
        return _empty_like(x, torch.device("meta")) if isinstance(x, DTensor) else x
    if isinstance(x, DTensor) and x.device.type != "meta":  # gathers one tensor at a time
        with groups.consistency.waits():
            x = _as_kind(x, cast(DTensor, x.detach()).full_tensor())
    if init_sync and x.device.type != "meta":
        value = x.detach().to(spec.device, copy=True).contiguous()
        groups.of_first(bytes_of(value))
        x = _as_kind(x, value)
    if not isinstance(x, nn.Parameter):
        return _empty_like(x, x.device) if x.device.type == "meta" else x.detach().to(spec.device, copy=True)
    storage = spec.stored[name]
    if x.device.type == "meta":
        padded = torch.empty(storage.local_shape, dtype=x.dtype, device="meta")
    else:
        padded = spec.homes[name].keep(shard_tensor(x.detach(), storage, groups.rank))
    hooks, post_hooks = source._backward_hooks or {}, source._post_accumulate_grad_hooks or {}
    takes_hooks = x.requires_grad or bool(hooks or post_hooks)  # keep the hooks of a frozen parameter
    stored = to_parameter(padded, storage, x.shape, mesh, groups.rank, takes_hooks)
    for hook in hooks.values():
        stored.register_hook(hook)
    for hook in post_hooks.values():
        stored.register_post_accumulate_grad_hook(hook)
    stored.requires_grad_(x.requires_grad)
    if x.device.type != "meta" and not groups.consistency.alone:
        note_source(sources, name, storage, x, stored)
    return stored
