"""Unused: axes of a mesh over which a plan that was found splits nothing."""

from __future__ import annotations

import warnings

from shardc.errors import PlanError, ShardcWarning
from shardc.ir.mesh import split_part
from shardc.plan.resolve import resolve_params
from shardc.search.opened import Model
from shardc.search.result import Found


def warn_unused(found: Found, source: Model) -> None:
    """Warns of each axis along which every rank would compute the same.

    Warns:
        ShardcWarning: names the axis, says why, and which entry would use it.
    """
    mesh, plan = found.mesh, found.plan
    used = {split_part(axis)[0] for axis in plan.axes}
    for axis in mesh.axes:
        size = mesh.size(axis)
        if size == 1 or axis in used:
            continue
        params = resolve_params(plan, mesh, source.shapes).values()
        dims = [n for shape in [*(p.compute.shape for p in params), *(s for _, s in source.inputs)] for n in shape]
        why = "to use it would take longer" if any(n % size == 0 for n in dims) else f"{size} divides no dim"
        text = f"axis {axis!r} of the mesh {mesh} is not used: {why}; all ranks along it compute the same"
        fix = f'write shardc.auto(...) | shardc.fsdp("{axis}"), which pads what does not divide, or use a smaller mesh'
        warnings.warn(ShardcWarning(str(PlanError(text, fix=fix))), stacklevel=4)
