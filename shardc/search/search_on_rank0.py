"""Runs the search for a plan on rank 0, and broadcasts the plan to all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardc.errors import PlanError, ShardcError
from shardc.ir.mesh import Mesh
from shardc.passes.options import Options
from shardc.plan.value import Plan
from shardc.runtime.events import Event
from shardc.runtime.groups import Groups
from shardc.search.request import Auto
from shardc.search.result import Found


def search_once(
    request: Auto,
    model: nn.Module,
    mesh: DeviceMesh | Mesh,
    loss: Callable[..., Any] | None,
    device: torch.device,
    options: Options,
    groups: Groups | None,
) -> Found:
    """Return the result of the search for a model to compile; ranks other than 0 receive that of rank 0.

    Raises:
        ShardcError: the error of the search; ranks other than 0 raise it as a PlanError.
        MeshError: the ranks search with different models or limits.
    """
    source = request.source(model, loss, device)
    if groups is None or groups.consistency.alone:
        return request.search(source, mesh, options).brief()
    error: ShardcError | None = None
    result: Found | None = None
    text = ""
    if groups.rank == 0:
        try:
            result = request.search(source, mesh, options).brief()
            text = json.dumps({"plan": _rest(result.plan, request.plan).to_json()})
        except ShardcError as raised:
            error, text = raised, json.dumps({"error": str(raised)})
    shapes = "\n".join(f"{name} of shape {list(shape)}" for name, (shape, _) in source.shapes.items())
    inputs = "\n".join(f"{name} of shape {list(shape)}" for name, shape in source.inputs)
    event = Event((("event", f"search by {request}"), ("parameters", shapes), ("input shapes", inputs)))
    reply = json.loads(groups.consistency.exchange(event, text, {0})[0])
    if error is not None:
        raise error
    if "error" in reply:
        raise PlanError(f"the mesh's first rank found no plan: {reply['error']}")
    return result or Found(request.plan | Plan.from_json(reply["plan"]), Mesh.of(mesh), hand=request.plan)


def _rest(plan: Plan, base: Plan) -> Plan:
    """Return the entries of ``plan`` that are not in ``own_entries``: their classes may be known to the caller only."""
    return Plan.of(entry for entry in plan.entries if entry not in base.entries)
