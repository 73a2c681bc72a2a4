"""`fully_shard` (FSDP2) and `FullyShardedDataParallel` (FSDP1), one unit per block and one for the rest."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.peers.row import Row
from benchmarks.work import Step, Work, model_loss, train_step
from examples.models.llama import Block

COMPILED = ("eager", "blocks", "whole")


FULL = MixedPrecisionPolicy()
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _fsdp2(work: Work, mesh: DeviceMesh, compiled: str, reshard: bool, policy: MixedPrecisionPolicy) -> Step:
    model = work.model(mesh.device_type)
    for layer in model.layers:
        if compiled == "blocks":
            layer.compile(dynamic=False)
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    # The root's own parameters are needed first in backward: FSDP2's own default keeps them.
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False, mp_policy=policy)
    if compiled == "whole":
        model.compile(dynamic=False)
    return train_step(model_loss(model), model.parameters())


def _fsdp1(work: Work, mesh: DeviceMesh, strategy: ShardingStrategy) -> Step:
    model = FullyShardedDataParallel(
        work.model(mesh.device_type),
        process_group=mesh.get_group(),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device(mesh.device_type),
        use_orig_params=True,
    )
    return train_step(model_loss(model), model.parameters())


ROWS = (
    *(
        Row(
            f"fsdp2/{compiled}/{name}{dtype}",
            "FSDP2",
            family,
            partial(_fsdp2, compiled=compiled, reshard=reshard, policy=policy),
        )
        for dtype, family, policy in (("", "fsdp", FULL), ("/bf16", "fsdp-bf16", HALF))
        for compiled in COMPILED
        for name, reshard in (("reshard", True), ("keep", False))
    ),
    Row("fsdp1/full", "FSDP1", "fsdp", partial(_fsdp1, strategy=ShardingStrategy.FULL_SHARD)),
    Row("fsdp1/grad-op", "FSDP1", "fsdp", partial(_fsdp1, strategy=ShardingStrategy.SHARD_GRAD_OP)),
)
