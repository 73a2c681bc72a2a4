"""Reads plan entries from a model whose parameters are DTensors already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.placement_types import Placement

from shardc.errors import InputError, PlanError
from shardc.ir.mesh import Mesh
from shardc.plan.entries import Param
from shardc.plan.placed import ParamPlan
from shardc.plan.spec_forms import OnAxes


def dtensor_entries(model: nn.Module, mesh: DeviceMesh | Mesh) -> list[Param]:
    """Return an entry for each parameter of ``model`` that is a DTensor, with the axes that split it.

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
    """Raise PlanError if the plan stores a parameter in another layout than that of the model's DTensor.

    Args:
        entries: the result of `dtensor_entries`.
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
    """Remove the hooks of ``parallelize_module`` that redistribute inputs and outputs: the compiler does.

    Raises:
        InputError: a hook is from ``distribute_module`` or from a style that is not torch's own: it may do anything.
    """
    for name, module in model.named_modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
                functions = (hook, *(getattr(x, "func", x) for x in cells))
                makers = {getattr(function, "__module__", None) for function in functions}
                if ColwiseParallel.__module__ in makers:
                    del hooks[key]
                elif distribute_module.__globals__["__name__"] in makers:
                    raise InputError(
                        f"module {name!r} has a hook by distribute_module, which may run any code",
                        fix="pass the plain model; write where tensors lie as Plan(activations=...), and what the hook "
                        "computes in forward",
                    )


def _axes(name: str, param: Any, mesh: DeviceMesh | Mesh) -> tuple[str, ...]:
    """Return the axes of ``mesh`` that the placements of ``param`` refer to."""
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
    return int(placement.dim)  # type: ignore[attr-defined]
