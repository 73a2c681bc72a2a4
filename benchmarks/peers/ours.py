"""`shardc.compile`, with the plan that matches each peer and buckets for the links, and `shardc.optim.wrap`.

Level 3 stands there twice: as it is, and with 8 MiB of gathered parameters that stay whole for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import shardc
from benchmarks.peers.row import OURS, Row
from benchmarks.work import LEARNING_RATE, Counted, Step, Work, train_step
from examples.models.llama import Llama, llama_tp, loss
from shardc.ir.comm_volume import collective_kind
from shardc.ir.stage_runs import Message


def build(
    work: Work,
    mesh: DeviceMesh,
    plan: Callable[[str], shardc.Plan],
    change: Callable[[Work, Llama], Llama] = lambda work, model: model,
    **said: Any,
) -> Step:
    assert mesh.mesh_dim_names is not None
    (axis,) = mesh.mesh_dim_names
    if mesh.device_type == "cpu":
        said = {"cost": shardc.measure_links(mesh), **said}
    options = shardc.Options(**said)
    module = shardc.compile(change(work, work.model(mesh.device_type)), mesh, plan(axis), loss=loss, options=options)

    def collectives() -> int:
        (program,) = module.shardc.programs.values()
        if program.stage_ranks:
            return sum(isinstance(action, Message) for action in program.actions(0))
        return sum(collective_kind(node) is not None for half, _ in program.runs() for node in half.graph.nodes)

    optimizer = shardc.optim.wrap(torch.optim.AdamW, module, lr=LEARNING_RATE, fused=True)
    return Counted(train_step(module, (), optimizer), collectives)


def half(axis: str, level: int) -> shardc.Plan:
    return shardc.fsdp(axis, level=level) | shardc.precision(param=torch.bfloat16, reduce=torch.float32)


ROWS = (
    Row("shardc/ddp", OURS, "ddp", partial(build, plan=shardc.ddp)),
    Row("shardc/fsdp3", OURS, "fsdp", partial(build, plan=partial(shardc.fsdp, level=3))),
    Row("shardc/fsdp3+8MiB", OURS, "fsdp", partial(build, plan=partial(shardc.fsdp, level=3), memory_budget=8 << 20)),
    Row(
        "shardc/fsdp3/whole", OURS, "fsdp", partial(build, plan=partial(shardc.fsdp, level=3), compile_regions="whole")
    ),
    Row(
        "shardc/fsdp3/blocks",
        OURS,
        "fsdp",
        partial(build, plan=partial(shardc.fsdp, level=3), compile_regions="blocks"),
    ),
    Row("shardc/fsdp2", OURS, "fsdp", partial(build, plan=partial(shardc.fsdp, level=2))),
    Row("shardc/fsdp3/bf16", OURS, "fsdp-bf16", partial(build, plan=partial(half, level=3))),
    Row("shardc/fsdp2/bf16", OURS, "fsdp-bf16", partial(build, plan=partial(half, level=2))),
    *(
        Row(
            f"shardc/{plan}{pieces}",
            OURS,
            "tp",
            partial(build, plan=partial(llama_tp, sequence=plan == "tp+sp"), **said),
            whole_batch=True,
        )
        for plan in ("tp", "tp+sp")
        for pieces, said in (
            ("", {}),
            ("/whole", {"decompose": 1}),
            ("/2 pieces", {"decompose": 2}),
            ("/4 pieces", {"decompose": 4}),
        )
    ),
)
