"""`DistributedDataParallel`."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.row import Row
from benchmarks.work import Step, Work, model_loss, train_step
from examples.models.llama import loss


def _build(work: Work, mesh: DeviceMesh, compiled: bool) -> Step:
    model = DistributedDataParallel(
        work.model(mesh.device_type),
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    if not compiled:
        return train_step(model_loss(model), model.parameters())
    # The module itself is compiled, so that Dynamo cuts the graph where DDP's buckets end.
    forward, value = torch.compile(model, dynamic=False), torch.compile(loss, dynamic=False)
    return train_step(lambda tokens, targets: value(forward(tokens), targets), model.parameters())


ROWS = (
    Row("ddp/eager", "DDP", "ddp", partial(_build, compiled=False)),
    Row("ddp/compiled", "DDP", "ddp", partial(_build, compiled=True)),
)
