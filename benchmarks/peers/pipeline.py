"""A step in four microbatches on two pipeline stages or more: `torch.distributed.pipelining`, and `shardc.pp`.

torch's stages are split by hand: the first has the embedding, the last the norm, the head and the loss. Each block is
compiled; torch makes the schedule, and frees nothing else.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import shardc
from benchmarks.peers.ours import build
from benchmarks.peers.row import OURS, Row
from benchmarks.work import LEARNING_RATE, Step, Work
from examples.models.llama import Llama, loss, rotary_tables

COUNT = 4
FAMILY = "pipeline"


class Part(nn.Module):
    """Blocks ``first`` to ``last`` of a decoder, with what is before or behind them at its ends."""

    def __init__(self, model: Llama, first: int, last: int) -> None:
        super().__init__()
        ends = last == len(model.layers)
        self.config, self.embed = model.config, model.embed if first == 0 else None
        self.layers = nn.ModuleList(model.layers[first:last])
        self.norm, self.head = (model.norm, model.head) if ends else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        cos, sin = rotary_tables(x.shape[1], self.config, like=x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


def _torch(work: Work, mesh: DeviceMesh, schedule: type[PipelineScheduleSingle] | type[PipelineScheduleMulti]) -> Step:
    model, rank, ranks = work.model(mesh.device_type), mesh.get_local_rank(), mesh.size()
    single = issubclass(schedule, PipelineScheduleSingle)
    count = ranks if single else 2 * ranks
    each = work.config.layers // count
    if single:
        mine = [rank]
    else:  # a loop, or a V
        mine = [rank, count - 1 - rank if schedule is ScheduleZBVZeroBubble else rank + ranks]
    parts = []
    for at in mine:
        part = Part(model, at * each, (at + 1) * each if at < count - 1 else work.config.layers)
        part.compile(dynamic=False)
        parts.append(part)
    device, source = torch.device(mesh.device_type), 0 if schedule is ScheduleZBVZeroBubble else ranks - 1
    stages = [
        PipelineStage(part, at, count, device, group=mesh.get_group()) for at, part in zip(mine, parts, strict=True)
    ]
    runs = schedule(stages[0] if single else stages, COUNT, loss_fn=loss)  # type: ignore[arg-type]
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = (tokens,) if 0 in mine else ()
        if count - 1 in mine:
            runs.step(*inputs, target=targets, losses=losses)
        else:
            runs.step(*inputs)
        optimizer.step()
        optimizer.zero_grad()
        value = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        torch.distributed.broadcast(value, group_src=source, group=mesh.get_group())
        return value

    return step


def _ours(axis: str, schedule: str) -> shardc.Plan:
    return shardc.pp(axis, schedule, microbatches=COUNT)


SCHEDULES = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble,
}  # fmt: skip
ROWS = (
    *(
        Row(f"pipelining/{name}", "pipelining", FAMILY, partial(_torch, schedule=schedule), whole_batch=True)
        for name, schedule in SCHEDULES.items()
    ),
    *(
        Row(f"shardc/pp/{name}", OURS, FAMILY, partial(build, plan=partial(_ours, schedule=name)), whole_batch=True)
        for name in SCHEDULES
    ),
)
