"""`parallelize_module`: tensor parallel, and the same with the rest of each block split over the sequence."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers.row import Row
from benchmarks.work import Step, Work, train_step


def _styles(sequence: bool) -> tuple[dict[str, ParallelStyle], dict[str, ParallelStyle]]:
    """(of a block, of the rest); between blocks activations are whole, or split over the sequence."""
    between = Shard(1) if sequence else Replicate()
    block: dict[str, ParallelStyle] = {
        **{name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")},
        **{name: RowwiseParallel(output_layouts=between) for name in ("attn.wo", "mlp.down")},
    }
    rest: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        gather_attention = PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        )
        gather_mlp = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        norm = SequenceParallel
        block |= {"attn_norm": norm(), "attn": gather_attention, "mlp_norm": norm(), "mlp": gather_mlp}
        rest["norm"] = norm()
    return block, rest


def _whole(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes the parameters that no style touched replicated DTensors, which the fused optimizer wants all to be."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if not isinstance(p, DTensor):
                whole = nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()]))
                module.register_parameter(name, whole)
