"""SimpleFSDP's way (Zhang et al., 2024): parameters gathered by DTensor inside the graph that torch.compile sees.

Each parameter is a DTensor that a parametrization makes whole where it is used; its gradient is reduced by DTensor in
the backward of that. Inductor sees the collectives and may bucket them, by its own passes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

from benchmarks.peers.row import Row
from benchmarks.work import Step, Work, model_loss, train_step

BUCKETS = {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all", "bucket_all_reduces_fx": "all"}


class _Whole(nn.Module):
    """A sharded parameter as a plain whole tensor, whose gradient is the mean of the ranks'."""

    def forward(self, x: DTensor) -> Tensor:
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def _build(work: Work, mesh: DeviceMesh, placement: Placement, bucketed: bool) -> Step:
    model = work.model(mesh.device_type)
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(param.detach(), mesh, [placement])
            setattr(module, name, nn.Parameter(placed))
            parametrize.register_parametrization(module, name, _Whole(), unsafe=True)
    known: dict[str, Any] = {name: value for name, value in BUCKETS.items() if hasattr(config, name)}
    options = known if bucketed else None
    return train_step(torch.compile(model_loss(model), dynamic=False, options=options), model.parameters())


ROWS = (
    Row("simple/replicate", "SimpleFSDP", "ddp", partial(_build, placement=Replicate(), bucketed=False)),
    Row("simple/replicate+buckets", "SimpleFSDP", "ddp", partial(_build, placement=Replicate(), bucketed=True)),
    Row("simple/shard", "SimpleFSDP", "fsdp", partial(_build, placement=Shard(0), bucketed=False)),
    Row("simple/shard+buckets", "SimpleFSDP", "fsdp", partial(_build, placement=Shard(0), bucketed=True)),
)
