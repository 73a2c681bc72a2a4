"""Reads plans of ``torch.distributed.tensor``: parameters that are DTensors, and styles of ``parallelize_module``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, parallel
from torch.distributed.tensor.placement_types import Placement

from shardc.errors import InputError, PlanError
from shardc.ir.mesh import Mesh
from shardc.plan.entries import Entry, Param
from shardc.plan.entries.entry import in_order
from shardc.plan.from_hf import pin, split_module
from shardc.plan.layout_spec import OnAxes, quote
from shardc.plan.match import by_part, matching
from shardc.plan.placed import ParamPlan

STYLES = parallel.ColwiseParallel.__module__  # torch's module of styles


def dtensor_entries(model: nn.Module, mesh: DeviceMesh | Mesh) -> list[Param]:
    """Return an entry for each parameter of ``model`` that is a DTensor, with its placements on the axes that split it.

    Axes on which it is replicated are left to the plan.

    Raises:
        InputError: a DTensor is on other ranks than ``mesh``, or is a partial sum; a module is wrapped by
            ``fully_shard``.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            what = f"module {name!r}" if name else f"the model {type(module).__name__}"
            fix = 'pass the plain model, and write shardc.fsdp("dp") in place of fully_shard'
            raise InputError(f"{what} is wrapped by fully_shard", fix=fix)
    entries = []
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            continue
        placements = dict(zip(_axes(name, param, mesh), param.placements, strict=True))
        if any(placement.is_partial() for placement in placements.values()):
            raise InputError(
                f"parameter {name!r} is a DTensor with a partial sum: {param.placements}",
                fix="redistribute it to Shard or Replicate before shardc.compile",
            )
        if split := tuple((axis, placement) for axis, placement in placements.items() if not placement.is_replicate()):
            entries.append(Param(name, OnAxes(split)))
    return entries


def check_kept(entries: Sequence[Param], stored: Mapping[str, ParamPlan]) -> None:
    """Raise PlanError if a parameter is a DTensor that is split over an axis at one dim, and the plan stores it split
    over that axis at another dim or not at all.

    Args:
        entries: the result of `dtensor_entries`.
        stored: parameter -> its layouts by the plan.
    """
    for entry in entries:
        assert isinstance(entry.spec, OnAxes)
        param_plan = stored[entry.glob]
        for axis, placement in entry.spec.placements:
            mesh, dim = param_plan.storage.mesh, _dim(placement)
            if mesh.size(axis) > 1 and param_plan.storage.dim_of(axis) != dim:
                raise PlanError(
                    f"parameter {entry.glob!r} is a DTensor whose dim {dim} is split over {axis!r}; the plan stores it "
                    f"as {param_plan.storage}",
                    plan_entry=param_plan.storage_cause,
                    fix="leave the parameter out of the plan, or redistribute it to what the plan says first",
                )


def drop_style_hooks(model: nn.Module) -> None:
    """Remove the hooks with which ``parallelize_module`` redistributes inputs and outputs, since the compiled program
    does that itself.

    Raises:
        InputError: a hook is from ``distribute_module`` or from a style that is not torch's own: it may do anything.
    """
    for name, module in model.named_modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
                functions = (hook, *(getattr(x, "func", x) for x in cells))
                makers = {getattr(function, "__module__", None) for function in functions}
                if STYLES in makers:
                    del hooks[key]
                elif distribute_module.__globals__["__name__"] in makers:
                    raise InputError(
                        f"module {name!r} has a hook by distribute_module, which may run any code",
                        fix="pass the plain model; write where tensors lie as Plan(activations=...), and what the hook "
                        "computes in forward",
                    )


def _axes(name: str, param: DTensor, mesh: DeviceMesh | Mesh) -> tuple[str, ...]:
    """Return the axes of ``mesh`` on which the DTensor ``param``, the parameter ``name``, is placed. Raises InputError
    if it is on another mesh.
    """
    names = param.device_mesh.mesh_dim_names or ()
    sizes = dict(zip(names, param.device_mesh.shape, strict=False))
    wanted = Mesh.of(mesh)
    same = bool(names) and all(axis in wanted and wanted.size(axis) == size for axis, size in sizes.items())
    if same and isinstance(mesh, DeviceMesh) and param.device_mesh != mesh:
        same = param.device_mesh == mesh[names]
    if not same:
        raise InputError(
            f"parameter {name!r} is a DTensor on {param.device_mesh}, the model is compiled for {mesh}",
            fix="compile for the mesh on which the DTensors are (or one with its axes), or pass the plain model",
        )
    return names


def _dim(placement: Placement) -> int:
    """Return the dim that a shard placement splits."""
    return int(placement.dim)  # type: ignore[attr-defined]


At = int | str


def style_entries(
    styles: Mapping[str, parallel.ParallelStyle] | parallel.ParallelStyle, axis: str, model: nn.Module | None
) -> list[Entry]:
    """Return the plan entries that shard a model as ``parallelize_module`` does with ``styles`` on ``axis``.

    Weights get the layouts of the styles. Inputs and outputs are pinned only if a style asks for another output than
    its default, or prepares them. Default outputs (split features after column-wise, a sum after row-wise) are left to
    propagation, which may find cheaper layouts if the next module needs a split sequence.

    Args:
        styles: path -> style, or one style for the root module.
        axis: the mesh axis.
        model: distinguishes linear modules and embeddings. Without it a row-wise module with a replicated input counts
            as an embedding, and a column-wise one as linear.

    Raises:
        PlanError: a style is of a class that is not torch's own.
    """
    entries: list[Entry] = []
    for key, style in styles.items() if isinstance(styles, Mapping) else [("", styles)]:
        if type(style).__module__ != STYLES:
            raise _unknown(style, key)
        entries += _read(by_part(key), style, axis, model)
    return in_order(entries)


def _read(glob: str, style: parallel.ParallelStyle, axis: str, model: nn.Module | None) -> list[Entry]:
    """Return the plan entries of one ``parallelize_module`` style for the modules that ``glob`` matches."""
    match style:
        case parallel.ColwiseParallel():
            embedding = model is not None and _embeddings(glob, model)
            usual = style.output_layouts == (Shard(-1),)
            split = split_module(glob, "output", embedding, axis)
            return split if usual else [*split, pin(f"{glob}:output", axis, style.output_layouts[0])]
        case parallel.RowwiseParallel():
            whole = style.input_layouts == (Replicate(),)
            split = split_module(glob, "input", whole if model is None else _embeddings(glob, model), axis)
            usual = style.output_layouts == (Replicate(),)
            return split if usual else [*split, pin(f"{glob}:output", axis, style.output_layouts[0])]
        case parallel.SequenceParallel():
            return [pin(f"{glob}:{where}", axis, style.sequence_sharding[0]) for where in ("input", "output")]
        case parallel.PrepareModuleInput():
            return _prepared_input(glob, style, axis)
        case parallel.PrepareModuleOutput():
            pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
            return _prepared(f"{glob}:output", axis, enumerate(pairs))
        case parallel.PrepareModuleInputOutput():
            prepared = style.prepare_module_output
            return [*_prepared_input(glob, style.prepare_module_input, axis), *_read(glob, prepared, axis, model)]
    raise _unknown(style, glob)  # of a later torch


def _unknown(style: parallel.ParallelStyle, key: str) -> PlanError:
    """Return the error for a style of a class that is not read, of the modules ``key``."""
    return PlanError(
        f"unknown style {type(style).__name__} of {key!r}",
        plan_entry=f"Plan.from_styles({{{quote(key)}: ...}})",
        fix="use the styles of torch.distributed.tensor.parallel, or write layouts with Plan(activations=...)",
    )


def _embeddings(glob: str, model: nn.Module) -> bool:
    """Return whether ``glob`` matches modules of ``model``, and all of these are embeddings."""
    names = matching(glob, [name for name, _ in model.named_modules()])
    return bool(names) and all(isinstance(model.get_submodule(name), nn.Embedding) for name in names)


def _prepared_input(glob: str, style: parallel.PrepareModuleInput, axis: str) -> list[Entry]:
    """Return a pin (an entry that fixes an activation's layout) for each input that the style ``PrepareModuleInput``
    redistributes.
    """
    pairs: dict[At, tuple[Placement | None, Placement | None]] = {}
    if style.input_layouts is not None:
        pairs.update(enumerate(zip(style.input_layouts, style.desired_input_layouts or (), strict=True)))
    for name, layout in style.input_kwarg_layouts.items():
        pairs[name] = layout, style.desired_input_kwarg_layouts.get(name)
    return _prepared(f"{glob}:input", axis, pairs.items())


def _prepared(
    target: str, axis: str, pairs: Iterable[tuple[At, tuple[Placement | None, Placement | None]]]
) -> list[Entry]:
    """Return a pin (an entry that fixes an activation's layout) for each tensor that a ``parallelize_module`` style
    redistributes.

    Args:
        target: the modules' glob with ":input" or ":output".
        pairs: (position or keyword of a tensor, (current placement, desired placement)); None for no placement.
    """
    return [pin(f"{target}[{at}]", axis, wanted) for at, (current, wanted) in pairs if current and wanted]
