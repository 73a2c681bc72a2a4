"""Together: one rank of a mesh searches for a plan, and all take it."""

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
from shardc.runtime.acts import Act
from shardc.runtime.groups import Groups
from shardc.search.request import Auto
from shardc.search.result import Found


def search_once(
    asked: Auto,
    model: nn.Module,
    mesh: DeviceMesh | Mesh,
    loss: Callable[..., Any] | None,
    device: torch.device,
    options: Options,
    groups: Groups | None,
) -> Found:
    """What a search finds for a model that is about to be compiled; on several ranks, what the first one finds.

    Raises:
        ShardcError: what the search raises, on every rank; that of another rank as a PlanError.
        MeshError: the ranks search for plans of other models, or with other limits.
    """
    source = asked.source(model, loss, device)
    if groups is None or groups.agreement.alone:
        return asked.search(source, mesh, options).brief()
    error: ShardcError | None = None
    found: Found | None = None
    text = ""
    if groups.rank == 0:
        try:
            found = asked.search(source, mesh, options).brief()
            text = json.dumps({"plan": _rest(found.plan, asked.plan).to_json()})
        except ShardcError as raised:
            error, text = raised, json.dumps({"error": str(raised)})
    shapes = "\n".join(f"{name} of shape {list(shape)}" for name, (shape, _) in source.shapes.items())
    inputs = "\n".join(f"{name} of shape {list(shape)}" for name, shape in source.inputs)
    act = Act((("act", f"search by {asked}"), ("parameters", shapes), ("input shapes", inputs)))
    said = json.loads(groups.agreement.exchange(act, text, {0})[0])
    if error is not None:
        raise error
    if "error" in said:
        raise PlanError(f"the mesh's first rank found no plan: {said['error']}")
    return found or Found(asked.plan | Plan.from_json(said["plan"]), Mesh.of(mesh), hand=asked.plan)


def _rest(plan: Plan, given: Plan) -> Plan:
    """What ``plan`` says beside ``given``, whose entries may be of classes that only the caller knows."""
    return Plan.of(entry for entry in plan.entries if entry not in given.entries)
