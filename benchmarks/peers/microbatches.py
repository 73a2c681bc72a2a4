"""A step in four microbatches: `fully_shard` (FSDP2) with accumulation by hand, and `shardc.microbatches`.

FSDP2 stands there as most trainers write it (each microbatch reduces its gradients), and with
``set_requires_gradient_sync(False)`` for all microbatches but the last.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardc
from benchmarks.peers.ours import build
from benchmarks.peers.row import OURS, Row
from benchmarks.work import LEARNING_RATE, Step, Work, model_loss

COUNT = 4
FAMILY = "microbatches"


def _fsdp2(work: Work, mesh: DeviceMesh, reshard: bool, syncs: bool) -> Step:
    model = work.model(mesh.device_type)
    for layer in model.layers:
        layer.compile(dynamic=False)
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)
    optimizer, forward = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True), model_loss(model)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        parts = list(zip(tokens.chunk(COUNT), targets.chunk(COUNT), strict=True))
        for at, part in enumerate(parts):
            model.set_requires_gradient_sync(syncs or at == len(parts) - 1)
            model.set_reshard_after_backward(reshard or at == len(parts) - 1)
            value = forward(*part) / COUNT
            value.backward()
            total += value.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _ours(axis: str, level: int) -> shardc.Plan:
    return shardc.fsdp(axis, level=level) | shardc.microbatches(COUNT)


ROWS = (
    *(
        Row(
            f"fsdp2/microbatches/{'reshard' if reshard else 'keep'}{'' if syncs else '/no sync'}",
            "FSDP2",
            FAMILY,
            partial(_fsdp2, reshard=reshard, syncs=syncs),
        )
        for reshard in (True, False)
        for syncs in (True, False)
    ),
    *(
        Row(f"shardc/fsdp{level}/microbatches", OURS, FAMILY, partial(build, plan=partial(_ours, level=level)))
        for level in (3, 2)
    ),
)
