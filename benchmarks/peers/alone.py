"""The limit: every rank trains by itself on its share of the batch and communicates nothing."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.peers.row import ALONE, Row
from benchmarks.work import Step, Work, model_loss, train_step


def _build(work: Work, mesh: DeviceMesh) -> Step:
    model = work.model(mesh.device_type)
    return train_step(torch.compile(model_loss(model), dynamic=False), model.parameters())


ROWS = (Row("limit", "limit", ALONE, _build),)
